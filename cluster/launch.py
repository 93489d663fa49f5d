"""Entry point of all processes: `launch` from `__main__`, or `python -m cluster.launch MODULE ARGUMENT ...`.

Imports are a large part of a process's start time. The two settings here must precede every large import, also of other
modules of this package.
"""

import gc
import os
import sys
from importlib import import_module


def launch(module: str) -> int:
    """Import `module`, run its `main` and return the exit code."""
    # numpy's BLAS starts a spinning thread per core, a tenth of a second of a core; no code here multiplies matrices by
    # numpy
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    gc.disable()  # imported objects stay alive: collections would scan them again and again and free nothing
    try:
        program = import_module(module)
    finally:
        gc.enable()
    return program.main() or 0


if __name__ == "__main__":
    sys.exit(launch(sys.argv.pop(1)))
