"""`python -m prefill_worker --config FILE --set key=value`: one prefill worker until SIGTERM."""

import sys

from cluster.errors import StartError
from cluster.logs import set_up
from cluster.process.life import run_role
from decode_worker.program import add_services
from engine.config import WorkerConfig
from engine.worker.headless import start_headless
from engine.worker.local_ranks import run_local_ranks
from engine.worker.runtime import start_worker


def main() -> int:
    try:
        config = WorkerConfig.from_command_line("prefill_worker")
        set_up("prefill", config.id_for("prefill"), config)
    except StartError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if config.data_parallel_local > 1:
        return run_local_ranks(config, "prefill")
    if config.node_rank:
        return run_role(lambda: start_headless(config, "prefill"))
    return run_role(lambda: start_worker(config, "prefill", add_services))
