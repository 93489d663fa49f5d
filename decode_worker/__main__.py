"""`python -m decode_worker --config FILE --set key=value`: one decode worker until SIGTERM."""

import sys

from cluster.launch import launch
from worker.program import run_worker

if __name__ == "__main__":
    sys.exit(launch("decode_worker.__main__"))


def main() -> int:
    return run_worker("decode")
