"""`python -m decode_worker --config FILE --set key=value`: one decode worker until SIGTERM."""

from worker.program import run_worker


def main() -> int:
    return run_worker("decode")
