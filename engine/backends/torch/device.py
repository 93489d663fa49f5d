"""Device of the torch engine: its KV memory, and small transfers to and from it.

On a GPU a copy from or to ordinary memory waits for everything that was started before it, and the GPU then waits for
Python. So a step's inputs cross through pinned memory without waiting, and one copy brings back the sampled tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.core_types import GpuDevice
from engine.errors import EngineStartError
from engine.host.memory import pool_memory
from engine.kv.layout import KvLayout
from kvtransfer.transport import AnyPool, DevicePool

Device = Literal["auto", "cpu", "cuda"]


def choose_device(wanted: Device, rank: int | None = None) -> torch.device:
    """Return the device to compute on.

    auto is the GPU where there is one. Each tensor-parallel rank takes the GPU of its own number. Raises
    EngineStartError when a GPU is asked for and there is none.
    """
    if wanted == "cpu" or (wanted == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise EngineStartError("device", "torch sees no CUDA device here")
    if rank is None:
        return torch.device("cuda", torch.cuda.current_device())
    if rank >= torch.cuda.device_count():
        raise EngineStartError("tensor_parallel", f"rank {rank} finds {torch.cuda.device_count()} GPUs")
    torch.cuda.set_device(rank)
    return torch.device("cuda", rank)


def gpu_of(device: torch.device) -> GpuDevice | None:
    """Return the GPU that a device is, or None for the CPU."""
    if device.type != "cuda":
        return None
    properties = torch.cuda.get_device_properties(device)
    return GpuDevice(properties.name, properties.total_memory)


@dataclass(frozen=True, slots=True)
class KvMemory:
    """Memory of all KV blocks."""

    pool: AnyPool
    """Pool as the engine and the transports see it."""
    tensor: Tensor
    """Tensor over the pool, [blocks, kv_heads, layers, 2, block_tokens, head_dim].

    On a GPU it has one block more than `pool` knows. Where KV is quantised: uint8 [blocks, kv_heads, layers, 2,
    block_tokens * vector_bytes]."""

    @property
    def scratch_block(self) -> int:
        """Number of a block on a GPU that belongs to no sequence: padding writes its KV there."""
        assert isinstance(self.pool, DevicePool)
        return self.pool.num_blocks

    @property
    def byte_blocks(self) -> Tensor:
        """Pool as uint8 [num_blocks, block_bytes], without the scratch block."""
        blocks: Tensor = self.tensor[: self.pool.num_blocks].view(self.pool.num_blocks, -1).view(torch.uint8)
        return blocks


def allocate(layout: KvLayout, num_blocks: int, device: torch.device, in_file: bool = False) -> KvMemory:
    """Allocate zeroed memory for `num_blocks` blocks.

    `pool_memory` decides where main memory comes from. Raises EngineStartError when the GPU's memory is too small.
    """
    on_gpu = device.type == "cuda"
    count = num_blocks + on_gpu
    shape: tuple[int, ...] = (count, layout.kv_heads, layout.layers, 2, layout.block_tokens, layout.head_dim)
    dtype: torch.dtype = getattr(torch, layout.dtype)
    if layout.quantised:
        shape, dtype = (*shape[:4], layout.block_tokens * layout.vector_bytes), torch.uint8
    if not on_gpu:
        in_main_memory = pool_memory(num_blocks, layout.block_bytes, in_file)
        return KvMemory(in_main_memory, torch.from_numpy(in_main_memory.memory).view(dtype).view(shape))
    try:
        tensor = torch.zeros(shape, dtype=dtype, device=device)
    except torch.cuda.OutOfMemoryError as error:
        raise EngineStartError("kv_memory_mib", f"the GPU has no room for {count} KV blocks: {error}") from error
    pool = DevicePool(tensor.data_ptr(), num_blocks, layout.block_bytes, device.index, owner=tensor)
    return KvMemory(pool, tensor)


def staged(values: Sequence[int] | Sequence[float] | NDArray[Any], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return the values as a tensor [len(values)] on the device; a copy to a GPU does not wait for the GPU."""
    if device.type != "cuda":
        return torch.tensor(values, dtype=dtype, device=device)
    return torch.tensor(values, dtype=dtype).pin_memory().to(device, non_blocking=True)


def read_back(tokens: Tensor) -> list[int]:
    """Return the values of an integer tensor.

    On a GPU this waits for everything that was started before.
    """
    if not tokens.is_cuda:
        return [int(token) for token in tokens.tolist()]
    pinned = torch.empty(tokens.shape, dtype=tokens.dtype, pin_memory=True)
    pinned.copy_(tokens, non_blocking=True)
    torch.cuda.current_stream(tokens.device).synchronize()
    return [int(token) for token in pinned.tolist()]
