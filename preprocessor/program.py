"""`python -m preprocessor --config FILE --set key=value`: one preprocessor until SIGTERM."""

import sys

from cluster.errors import StartError
from cluster.logs import set_up
from cluster.process.life import run_role
from preprocessor.config import PreprocessorConfig
from preprocessor.runtime import start_preprocessor


def main() -> int:
    try:
        return run_preprocessor(PreprocessorConfig.from_command_line("preprocessor"))
    except StartError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def run_preprocessor(config: PreprocessorConfig) -> int:
    """Run a preprocessor to its end and return the exit code.

    Raises StartError for a wrong setting of logs.
    """
    set_up("preprocessor", config.id(), config)
    return run_role(lambda: start_preprocessor(config))
