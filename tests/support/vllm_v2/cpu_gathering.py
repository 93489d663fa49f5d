"""What vLLM's CPU communicator lacks for experts of several data-parallel ranks: gathering of batches of unlike size."""

from collections.abc import Sequence
from typing import Any


def gather_unlike_batches(module: Any) -> None:
    """Let the CPU's communicator gather and scatter rows of which each rank has a number of its own."""
    import torch
    import torch.distributed as dist

    def gathered(self: Any, rows: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
        padded = rows.new_zeros((max(sizes), *rows.shape[1:]))
        padded[: len(rows)] = rows
        parts = [torch.empty_like(padded) for _ in sizes]
        dist.all_gather(parts, padded, group=self.device_group)
        return torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])

    def all_gatherv(self: Any, rows: Any, dim: int = 0, sizes: Sequence[int] | None = None) -> Any:
        assert dim == 0
        each = rows if isinstance(rows, list) else [rows]
        answers = [gathered(self, one, sizes or [len(one)] * self.world_size) for one in each]
        return answers if isinstance(rows, list) else answers[0]

    def reduce_scatterv(self: Any, rows: torch.Tensor, dim: int = -1, sizes: Sequence[int] | None = None) -> Any:
        assert dim in (0, -rows.dim())
        summed = rows.contiguous().clone()
        dist.all_reduce(summed, group=self.device_group)
        counts = sizes or [len(summed) // self.world_size] * self.world_size
        first = sum(counts[: self.rank_in_group])
        return summed[first : first + counts[self.rank_in_group]].contiguous()

    module.CpuCommunicator.all_gatherv = all_gatherv
    module.CpuCommunicator.reduce_scatterv = reduce_scatterv
