"""Size of a KV pool that is to take what the weights and a step leave."""

import logging
import resource
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from engine.backends.torch.attention import use_attention
from engine.backends.torch.ranks import RankGroup
from engine.errors import EngineStartError
from engine.host.container_memory import container_memory
from engine.host.memory import UNMEASURED_KV_BYTES

log = logging.getLogger(__name__)

CPU_TOKENS = 256
"""Tokens of the measured step on a CPU, where a whole step takes long; its memory grows with the tokens."""
RESERVE = 0.05
"""Share of the device's memory that stays free: fragments, and what libraries take later."""
MIN_RESERVE_BYTES = 512 << 20
GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class KvRoom:
    """Memory that others take beside a KV pool of automatic size."""

    step_tokens: int
    """Largest number of tokens of a step."""
    host_bytes: int = 0
    """Main memory that will be taken, for evicted blocks."""


DEFAULT_ROOM = KvRoom(2048)


def automatic_kv_bytes(
    model: torch.nn.Module,
    device: torch.device,
    room: KvRoom,
    max_context_tokens: int,
    with_draft: bool = False,
    group: RankGroup | None = None,
) -> int:
    """Return the size of the KV pool of all ranks together, in bytes.

    `model` is loaded and has no pool yet. On a CPU outside of a container of its own, the worker's share of the memory
    is unknown, and the size fixed. Raises EngineStartError where nothing is left.
    """
    on_gpu = device.type == "cuda"
    # Ranks on a CPU share one container, and each would take what all of them have.
    of_container = container_memory() if not on_gpu and group is None else None
    if not on_gpu and of_container is None:
        return UNMEASURED_KV_BYTES
    if with_draft:
        raise EngineStartError("kv_memory_mib", "auto cannot size the pool beside a draft model: set a number")
    tokens = min(room.step_tokens, max_context_tokens, room.step_tokens if on_gpu else CPU_TOKENS)
    step = measured_step(model, device, tokens) * room.step_tokens // tokens
    if of_container is None:
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(device)
    else:
        total, free = of_container
        free -= room.host_bytes
    reserve = max(int(RESERVE * total), MIN_RESERVE_BYTES)
    left = free - step - reserve
    if group is not None:
        left = group.least(left)  # before any rank gives up, since all ranks must take part
    how = (
        f"{free / GIB:.2f} of {total / GIB:.2f} GiB are free beside the weights, a step of {room.step_tokens} tokens"
        f" takes {step / GIB:.2f} and {reserve / GIB:.2f} stay free"
    )
    if left <= 0:
        raise EngineStartError("kv_memory_mib", f"auto leaves no memory for KV blocks: {how}")
    log.info("the KV pool takes %.2f GiB: %s", left / GIB, how)
    return left * (1 if group is None else group.size)


@torch.inference_mode()
def measured_step(model: torch.nn.Module, device: torch.device, num_tokens: int) -> int:
    """Return the memory in bytes that a step of one prompt needs beyond the weights, attention's own aside."""
    use_attention(model, _nothing)
    token_ids = torch.zeros(1, num_tokens, dtype=torch.long, device=device)
    positions = torch.arange(num_tokens, device=device)[None]
    before = _peak(device, begin=True)
    model(input_ids=token_ids, position_ids=positions, use_cache=False, logits_to_keep=1)
    return max(0, _peak(device) - before)


def _peak(device: torch.device, begin: bool = False) -> int:
    """Return the most memory in bytes that was in use since `begin`; with `begin`, what is in use now."""
    if device.type == "cuda":
        if begin:
            torch.cuda.synchronize(device)
            torch.cuda.reset_peak_memory_stats(device)
        return torch.cuda.max_memory_allocated(device)
    if begin:
        Path("/proc/self/clear_refs").write_text("5")  # the kernel begins a new maximum
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


def _nothing(module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, *_: object, **__: object) -> object:
    """Return attention's output as zeros."""
    return value.new_zeros(1, query.shape[2], query.shape[1], value.shape[3]), None
