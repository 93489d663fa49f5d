"""Starts a program of ours: `launch` from a package's `__main__`, `python -m cluster.launch MODULE ARGUMENT ...` else.

What a process imports is a good part of what its start costs, so two things are seen to first, which must be so before
anything large is imported, this package's other modules included.
"""

import gc
import os
import sys
from importlib import import_module


def launch(module: str) -> int:
    """Import it and run its `main`; the exit code."""
    # numpy's BLAS starts a thread for each core, which wait actively, a tenth of a second of a core; nobody uses it.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    gc.disable()  # what is imported stays: collections would look at all of it again and again, and find nothing
    try:
        program = import_module(module)
    finally:
        gc.enable()
    return program.main() or 0


if __name__ == "__main__":
    sys.exit(launch(sys.argv.pop(1)))
