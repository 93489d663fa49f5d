"""`python -m prefill_worker --config FILE --set key=value`: one prefill worker until SIGTERM."""

import sys

from cluster.launch import launch
from worker.program import run_worker

if __name__ == "__main__":
    sys.exit(launch("prefill_worker.__main__"))


def main() -> int:
    return run_worker("prefill")
