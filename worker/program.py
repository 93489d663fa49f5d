"""Main function of a worker's process, of either role."""

import sys

from cluster.errors import StartError
from cluster.logs import set_up
from cluster.process.life import run_role
from cluster.roles import Role
from engine.config import WorkerConfig
from worker.headless import start_headless
from worker.local_ranks import run_local_ranks
from worker.requests.service import serve_requests
from worker.runtime import start_worker


def run_worker(role: Role) -> int:
    """Run a worker with the settings of the command line until SIGTERM; return the exit code."""
    try:
        config = WorkerConfig.from_command_line(f"{role}_worker")
        set_up(role, config.id_for(role), config)
    except StartError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if config.data_parallel_local > 1:
        return run_local_ranks(config, role)
    if config.node_rank:
        return run_role(lambda: start_headless(config, role))
    return run_role(lambda: start_worker(config, role, serve_requests))
