"""The host memory tier: an arena of fixed slots."""

from engine.errors import EngineStartError
from engine.kv.rows import Allocate, private_rows
from engine.kv.tiers.slots import Slots


class HostTier:
    """Host memory tier.

    `memory` is uint8 [slots, block_bytes]; `slots` has its records.

    A row of the arena is written by the owner of its slot before the slot has a name, and unchanged until the slot is
    taken again.
    """

    def __init__(self, num_bytes: int, block_bytes: int, allocate: Allocate = private_rows) -> None:
        """Allocate at most `num_bytes`.

        Raises EngineStartError naming kv_host_memory_mib.
        """
        if num_bytes < block_bytes:
            raise EngineStartError("kv_host_memory_mib", f"is less than one KV block of {block_bytes} bytes")
        num_slots = num_bytes // block_bytes
        try:
            self.memory = allocate(num_slots, block_bytes)
        except MemoryError as error:
            raise EngineStartError(
                "kv_host_memory_mib", f"cannot allocate {num_bytes} bytes of memory: {error}"
            ) from error
        self.slots = Slots(num_slots)
