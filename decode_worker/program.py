"""`python -m decode_worker --config FILE --set key=value`: one decode worker until SIGTERM."""

import sys
from typing import Any

from cluster.errors import StartError
from cluster.logs import set_up
from cluster.process.life import run_role
from decode_worker.service import add_decode_service
from engine.config import WorkerConfig
from engine.worker.headless import start_headless
from engine.worker.local_ranks import run_local_ranks
from engine.worker.runtime import WorkerContext, start_worker
from prefill_worker.service import add_lend_service


def add_services(server: Any, context: WorkerContext) -> list[str]:
    """Register the services of a worker of either role.

    A worker may switch roles, so both can lend and decode.
    """
    return [*add_decode_service(server, context), *add_lend_service(server, context)]


def main() -> int:
    try:
        config = WorkerConfig.from_command_line("decode_worker")
        set_up("decode", config.id_for("decode"), config)
    except StartError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if config.data_parallel_local > 1:
        return run_local_ranks(config, "decode")
    if config.node_rank:
        return run_role(lambda: start_headless(config, "decode"))
    return run_role(lambda: start_worker(config, "decode", add_services))
