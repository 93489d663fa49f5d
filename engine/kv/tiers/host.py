"""The tier in main memory: an arena of fixed slots."""

import numpy as np

from engine.errors import EngineStartError
from engine.kv.tiers.slots import Slots


class HostTier:
    """`memory` is [slots, block_bytes] of uint8; `slots` are its books.

    A row of the arena is written by whoever took its slot, before it has a name, and not changed until it is taken
    again. The system provides the memory as it is first written.
    """

    def __init__(self, num_bytes: int, block_bytes: int) -> None:
        """At most `num_bytes`. Raises EngineStartError naming kv_host_memory_mib."""
        if num_bytes < block_bytes:
            raise EngineStartError("kv_host_memory_mib", f"less than one KV block of {block_bytes} bytes")
        num_slots = num_bytes // block_bytes
        try:
            self.memory = np.empty((num_slots, block_bytes), np.uint8)
        except (MemoryError, ValueError) as error:  # ValueError: more than an address can express
            raise EngineStartError("kv_host_memory_mib", f"{num_bytes} bytes cannot be had: {error}") from error
        self.slots = Slots(num_slots)
