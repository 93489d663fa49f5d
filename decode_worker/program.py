"""`python -m decode_worker --config FILE --set key=value`: one decode worker until SIGTERM."""

from decode_worker.service import serve_requests
from engine.worker.program import run_worker


def main() -> int:
    return run_worker("decode", serve_requests)
