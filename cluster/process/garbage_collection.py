"""Settings of Python's cyclic garbage collector for long-lived processes."""

import atexit
import gc

ALLOCATED = 1_000
"""New objects, minus freed ones, between two collections of the youngest generation; fewer give shorter pauses."""
COLLECTIONS = 400
"""Collections of the youngest generation before one of all generations, whose pause grows with all live objects."""


def spare_the_started() -> None:
    """Exclude all objects alive now from collections, and make full collections rare.

    Call it when loading is done.

    Reference counting frees nearly all that serving allocates; the rest is mostly gRPC's, five objects per call. With
    the defaults, full collections paused a router for up to 34 ms.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(ALLOCATED, COLLECTIONS, 50)
    atexit.register(gc.unfreeze)  # otherwise C++ bindings such as Triton's report these objects as leaked
