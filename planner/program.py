"""`python -m planner --config FILE --set key=value`: sizes pools until SIGTERM."""

import sys

from cluster.errors import StartError
from cluster.logs import set_up
from cluster.process.life import run_role
from planner.runtime import PlannerConfig, start_planner


def main() -> int:
    try:
        config = PlannerConfig.from_command_line("planner")
        set_up("planner", "planner", config)
    except StartError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return run_role(lambda: start_planner(config))
