"""The tensor-parallel ranks of one engine, and the sums by which they agree. gloo on a CPU, NCCL on GPUs.

Every value that all ranks have is the same to the bit on all of them: a sum is computed once and handed to everybody,
and what follows is computed alike. So a mixture's router chooses the same experts everywhere.
"""

import os
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from engine.errors import EngineStartError

SKEW_S = 600
"""How much later than another a rank may come to a sum: the first steps compile kernels."""


@dataclass(frozen=True, slots=True)
class RankInfo:
    """Which rank this process is."""

    rank: int
    size: int
    meeting: Path
    """A file that does not exist yet, in a folder that only this user reads: by it the ranks find each other."""


class RankGroup:
    """The ranks of this engine, from inside one of them. All ranks call the same methods in the same order."""

    def __init__(self, place: RankInfo, device: torch.device) -> None:
        """Waits until all ranks are there. Raises EngineStartError."""
        self.rank, self.size = place.rank, place.size
        backend = "nccl" if device.type == "cuda" else "gloo"
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # the ranks of a worker share a host
        store = dist.FileStore(str(place.meeting), place.size)  # type: ignore[attr-defined]
        try:
            dist.init_process_group(
                backend,
                store=store,
                rank=place.rank,
                world_size=place.size,
                timeout=timedelta(seconds=SKEW_S),
                device_id=device if backend == "nccl" else None,
            )
        except (RuntimeError, ValueError) as error:
            raise EngineStartError("tensor_parallel", f"the ranks do not find each other: {error}") from error

    def sum(self, part: Tensor) -> Tensor:
        """The sum of all ranks' `part`, in its place."""
        dist.all_reduce(part)
        return part

    def gather(self, part: Tensor) -> list[Tensor]:
        """All ranks' `part`, in order, on rank 0; nothing on the others. Equal shapes."""
        part = part.contiguous()
        parts = [torch.empty_like(part) for _ in range(self.size)] if self.rank == 0 else None
        dist.gather(part, parts)
        return parts or []
