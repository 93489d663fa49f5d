"""`python -m decode_worker --config FILE --set key=value`: one decode worker until SIGTERM."""

from typing import Any

from decode_worker.service import add_decode_service
from engine.worker.program import run_worker
from engine.worker.runtime import WorkerContext


def add_services(server: Any, context: WorkerContext) -> list[str]:
    """Register the services of a worker of either role, since it may switch roles."""
    return add_decode_service(server, context)


def main() -> int:
    return run_worker("decode", add_services)
