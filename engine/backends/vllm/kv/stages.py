"""Pipeline stages of a vLLM engine: which part of whole blocks the KV memory of each stage is.

vLLM makes the KV groups of all layers together and leaves each stage those of its layers. A stage's pool is then laid
out like that of a smaller model. Side by side the pools of all stages are a whole block, and usually exactly that of a
worker with one stage. They are not where groups have unlike numbers of layers before a stage, or where layers of unlike
shapes lie in one span: such a worker exchanges blocks with workers of the same stages alone.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import gcd
from typing import TYPE_CHECKING, NamedTuple

from engine.errors import EngineStartError
from kvtransfer.ranks import ALL, Share, shares_of

if TYPE_CHECKING:
    pass

HEADS, LAYERS = "heads", "layers"
"""Orders of the bytes in a block of a pool: those of a head lie together, or those of a layer."""


class StagePool(NamedTuple):
    """Facts about the KV memory of a rank."""

    layers: tuple[int, ...]
    """Number of its layers in each KV group."""
    block_bytes: int
    orders: frozenset[str]
    """HEADS and LAYERS, as far as they are true."""
    attention: tuple[str, ...]
    """Names of its layers' attention classes."""


@dataclass(frozen=True, slots=True)
class Stage:
    """One pipeline stage's share of whole blocks. The numbers are those of one tensor-parallel rank of each stage."""

    share: Share
    planes: int
    """Planes of a whole block."""
    block_bytes: int
    """Bytes of a whole block."""
    layers: int
    has_heads: bool
    """Whether the bytes of a head lie together within a plane, in all stages."""
    division: str = ""
    """Text of the stages where their blocks are not those of a worker with one stage; empty where they are."""


def stages_of(pools: Sequence[StagePool], in_planes: bool) -> list[Stage]:
    """Return the stages of an engine from the pool of one rank of each.

    With `in_planes` a layer has a plane of its own; otherwise a block is one span.

    Raises EngineStartError.
    """
    for number, pool in enumerate(pools):
        if not sum(pool.layers):
            reason = f"{len(pools)} leaves stage {number} without attention layers, so without KV: set fewer stages"
            raise EngineStartError("pipeline_parallel", reason)
    orders = frozenset.intersection(*(pool.orders for pool in pools))
    depths = [max(pool.layers) for pool in pools]
    before = [0, *accumulate(depths)]
    """Layers of the largest group before each stage."""
    in_line = all(
        sum(pool.layers[group] for pool in pools[:number]) == before[number]
        for number, each in enumerate(pools)
        for group, count in enumerate(each.layers)
        if count
    )
    if not in_line:
        reason = f"{len(pools)} puts unlike numbers of layers of the model's KV groups before a stage: the stages have "
        reason += f"{', '.join(str(pool.layers) for pool in pools)} layers by group; set VLLM_PP_LAYER_PARTITION"
        raise EngineStartError("pipeline_parallel", reason)
    in_order = in_planes or bool(orders)
    widths = depths if in_planes else [pool.block_bytes for pool in pools]
    smallest = 1 if in_planes else gcd(*widths)
    has_heads = HEADS in orders
    division = "" if in_order else str([pool.layers for pool in pools])
    planes, block_bytes = (sum(depths) if in_planes else 1), sum(pool.block_bytes for pool in pools)
    num_layers = sum(sum(pool.layers) for pool in pools)
    shares = shares_of([end // smallest for end in accumulate(widths)]) if len(pools) > 1 else (ALL,)
    return [Stage(share, planes, block_bytes, num_layers, has_heads, division) for share in shares]
