"""`python -m decode_worker --config FILE --set key=value`: one decode worker until SIGTERM."""

from typing import Any

from decode_worker.service import serve_requests
from engine.worker.program import run_worker
from engine.worker.runtime import WorkerContext
from prefill_worker.service import add_lend_service


def add_services(server: Any, context: WorkerContext) -> list[str]:
    """Register the services of a worker of either role.

    A worker may switch roles, so both can lend and decode.
    """
    serve_requests(context)
    return add_lend_service(server, context)


def main() -> int:
    return run_worker("decode", add_services)
