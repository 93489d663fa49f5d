"""Size of a KV pool that is to take what the weights and a step leave."""

import logging
import resource
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from engine.backends.torch.attention import use_attention
from engine.errors import EngineStartError
from engine.host.container_memory import container_memory
from engine.host.memory import UNMEASURED_KV_BYTES

log = logging.getLogger(__name__)

MEASURED_TOKENS = 256
"""Tokens of the measured step, since a whole step takes long; its memory grows with the tokens."""
RESERVE = 0.05
"""Share of the container's memory that stays free: fragments, and what libraries take later."""
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


def automatic_kv_bytes(model: torch.nn.Module, room: KvRoom, max_context_tokens: int) -> int:
    """Return the size of the KV pool in bytes.

    `model` is loaded and has no pool yet. Outside of a container of its own, the worker's share of the memory is
    unknown, and the size fixed. Raises EngineStartError where nothing is left.
    """
    if (of_container := container_memory()) is None:
        return UNMEASURED_KV_BYTES
    tokens = min(room.step_tokens, max_context_tokens, MEASURED_TOKENS)
    step = measured_step(model, tokens) * room.step_tokens // tokens
    total, free = of_container
    free -= room.host_bytes
    reserve = max(int(RESERVE * total), MIN_RESERVE_BYTES)
    left = free - step - reserve
    how = (
        f"{free / GIB:.2f} of {total / GIB:.2f} GiB are free beside the weights, a step of {room.step_tokens} tokens"
        f" takes {step / GIB:.2f} and {reserve / GIB:.2f} stay free"
    )
    if left <= 0:
        raise EngineStartError("kv_memory_mib", f"auto leaves no memory for KV blocks: {how}")
    log.info("the KV pool takes %.2f GiB: %s", left / GIB, how)
    return left


@torch.inference_mode()
def measured_step(model: torch.nn.Module, num_tokens: int) -> int:
    """Return the memory in bytes that a step of one prompt needs beyond the weights, attention's own aside."""
    use_attention(model, _nothing)
    token_ids = torch.zeros(1, num_tokens, dtype=torch.long)
    Path("/proc/self/clear_refs").write_text("5")  # the kernel begins a new maximum
    before = _peak()
    model(input_ids=token_ids, position_ids=torch.arange(num_tokens)[None], use_cache=False, logits_to_keep=1)
    return max(0, _peak() - before)


def _peak() -> int:
    """Return the most memory in bytes that was in use."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


def _nothing(module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, *_: object, **__: object) -> object:
    """Return attention's output as zeros."""
    return value.new_zeros(1, query.shape[2], query.shape[1], value.shape[3]), None
