"""`python -m prefill_worker --config FILE --set key=value`: one prefill worker until SIGTERM."""

from worker.program import run_worker


def main() -> int:
    return run_worker("prefill")
