"""`python -m batches`, see `program.py`."""

import sys

from cluster.launch import launch

if __name__ == "__main__":
    sys.exit(launch("batches.program"))
