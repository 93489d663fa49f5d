"""Tensor-parallel ranks of one engine, and the sums between them: gloo on a CPU, NCCL on GPUs.

A value that all ranks hold has the same bits on all of them: one sum is computed and distributed, and later computation
is identical. So a mixture-of-experts router chooses the same experts on every rank.
"""

import os
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from engine.errors import EngineStartError
from engine.model_runner import RankInfo

SKEW_S = 600
"""Seconds that a rank may come later than another to a sum: the first steps compile kernels."""


class RankGroup:
    """Communicator of one rank.

    All ranks call the same methods in the same order.
    """

    def __init__(self, place: RankInfo, device: torch.device) -> None:
        """Wait until all ranks have joined.

        Raises EngineStartError.
        """
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
        """Replace `part` by the sum over all ranks, and return it."""
        dist.all_reduce(part)
        return part

    def least(self, value: int) -> int:
        """Return the least value of all ranks."""
        values = torch.tensor(value, device="cuda" if dist.get_backend() == "nccl" else "cpu")
        dist.all_reduce(values, dist.ReduceOp.MIN)
        return int(values)

    def gather(self, part: Tensor) -> list[Tensor]:
        """Return all ranks' `part`, in order, on rank 0 and an empty list on the others.

        Shapes are equal.
        """
        part = part.contiguous()
        parts = [torch.empty_like(part) for _ in range(self.size)] if self.rank == 0 else None
        dist.gather(part, parts)
        return parts or []
