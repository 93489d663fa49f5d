"""Python's collector of cycles, for processes that serve or simulate: what it looks at, and how often."""

import atexit
import gc

ALLOCATED = 1_000
"""Objects more than freed, between two collections of what is new: a pause is as long as there is much of it."""
COLLECTIONS = 400
"""Of what is new, before one of all that outlived them, whose pause is as long as everything is large."""


def spare_the_started() -> None:
    """Once everything is loaded: no collection looks at what is there now, and large ones are rare.

    Nearly all that serving makes is freed by its count of references; the rest is mostly gRPC's, five objects a call.
    Left alone, collections were pauses of up to 34 ms in a router and 66 in a process of workers: modules and code
    alone are 60,000 objects. docs/benchmarks.md.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(ALLOCATED, COLLECTIONS, 50)
    atexit.register(gc.unfreeze)  # else bindings in C++ (Triton's, which torch loads where it is) call it leaked
