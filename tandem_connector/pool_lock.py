"""Lock around vLLM's block pool, which two threads use: vLLM's, and that of loans.

vLLM's scheduler looks how many blocks are free and then takes them. So these calls hold the lock:

- `KVCacheManager.allocate_slots`, from its count to its allocation;
- every call of `BlockPool` that changes something.

The thread of loans takes references on cached blocks, drops references and names blocks. It never takes free blocks,
since that would give away cached blocks that vLLM has found and not taken yet.
"""

import functools
import threading
from collections.abc import Callable
from typing import Any

READS = {"get_cached_block", "get_num_free_blocks", "get_usage", "is_block_writable"}
"""Calls of `BlockPool` that change nothing."""


def lock_pool(manager: Any, lock: "threading.RLock") -> None:
    """Have vLLM's KVCacheManager and its BlockPool hold the lock in calls that change blocks."""
    pool = manager.block_pool
    for name in [*(each for each in dir(type(pool)) if not each.startswith("_")), "_insert_block_hash"]:
        if name not in READS and callable(getattr(type(pool), name)):
            setattr(pool, name, _locked(getattr(pool, name), lock))
    manager.allocate_slots = _locked(manager.allocate_slots, lock)


def _locked(call: Callable[..., Any], lock: Any) -> Callable[..., Any]:
    @functools.wraps(call)
    def locked(*args: Any, **kwargs: Any) -> Any:
        with lock:
            return call(*args, **kwargs)

    return locked
