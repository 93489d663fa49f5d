"""`python -m router --config FILE --set key=value`: one router until SIGTERM."""

import sys

from cluster.errors import StartError
from cluster.logs import set_up
from cluster.process.life import run_role
from router.config import RouterConfig
from router.runtime import start_router


def main() -> int:
    try:
        config = RouterConfig.from_command_line("router")
        set_up("router", config.id(), config)
    except StartError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return run_role(lambda: start_router(config))
