"""Demand of a checked request on a model's workers.

Pure.
"""

from collections.abc import Sequence

from cluster.errors import InvalidRequest
from protos import inference_pb2 as pb
from router.placement.demand import Demand, num_blocks_of


def demand_of(
    prompt: Sequence[int],
    sampling: pb.Sampling,
    chains: Sequence[Sequence[int]],
    to_score: bool,
    block_tokens: int,
    block_bytes: int,
    largest_pool: int | None,
    traffic_hash: float = 1.0,
    embeds: bool = False,
    only_fills: bool = False,
    files: str = "",
    revision: str = "",
) -> Demand:
    """Return the demand.

    Raises InvalidRequest for a request that not even the largest pool could hold.

    `only_fills`: the prompt's blocks are wanted, all of them full, and no output. `to_score`: log probabilities of the
    prompt are still to come, so all of it is computed. `largest_pool` None: of any size.
    """
    num_prompt = len(prompt)
    end = num_prompt + sampling.max_tokens
    shared = num_prompt - 1 if len(chains) > 1 else 0
    total = num_blocks_of([end] * len(chains), shared, block_tokens)
    if largest_pool is not None and total > largest_pool:
        times = f" {len(chains)} times" if len(chains) > 1 else ""
        raise InvalidRequest(
            "sampling.max_tokens",
            f"prompt of {num_prompt} tokens + max_tokens of {sampling.max_tokens}{times} need {total} KV blocks; "
            f"the largest pool has {largest_pool}",
        )
    num_reusable = len(chains[0]) - (not only_fills)
    num_usable = 0 if to_score or embeds else num_reusable // block_tokens
    lengths = tuple(map(len, chains))
    num_tokens = len(chains[0])
    return Demand(
        num_tokens,
        num_usable,
        total,
        block_tokens,
        block_bytes,
        lengths,
        end,
        shared,
        traffic_hash=traffic_hash,
        files=files,
        revision=revision,
        embeds=embeds,
    )
