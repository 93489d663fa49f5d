"""`python -m prefill_worker --config FILE --set key=value`: one prefill worker until SIGTERM."""

from decode_worker.program import add_services
from engine.worker.program import run_worker


def main() -> int:
    return run_worker("prefill", add_services)
