"""Several choices of one prompt: computed once up to their fork.

A request starts as one sequence, its lead, whatever number of choices it asks for. The others are its `siblings`:

    lead      computes the shared tokens ──▶ forked ──▶ runs as any other sequence
    sibling   nothing here, only counted in ───────▲   │
              the lead's reservation               ├──blocks are free──▶ runs
                                                   └──else────────────▶ preempted

The shared part is the prompt without its last token. Each sequence computes that token itself, and the tokens that an
earlier attempt emitted of it, so every first token is sampled like any other. A fork shares the full blocks and copies
a partial one. It happens between steps, when nothing writes that block. After the fork every sequence is one of its own
for the scheduler, for preemption and for the KV cache manager.
"""

from collections.abc import Callable

from engine.core_types import EngineSequence
from engine.messages.to_engine import Generate
from kvcache.block_keys import BlockKey
from kvcache.items import begun_items
from kvcache.layout import KvLayout


def chains_of(message: Generate, root: BlockKey, next_arrival: Callable[[], int]) -> list[EngineSequence]:
    """Return the sequences to compute, the lead first; empty when an earlier attempt emitted everything."""
    sampling = message.sampling
    chains: list[EngineSequence] = []
    for choice in range(sampling.n):
        if choice in message.finished:
            continue
        emitted = message.emitted_of(choice)
        tokens = [*message.prompt, *emitted]
        chain = EngineSequence(
            request_id=message.request_id,
            token_ids=tokens,
            num_prompt=len(tokens),
            root=root,
            sampling=sampling,
            priority=message.priority,
            arrival=next_arrival(),
            num_emitted_before=len(emitted),
            choice=choice,
            adapter=message.adapter,
            items=message.items,
            num_expected=len(tokens) + message.reserve_output_tokens if message.reserve_output_tokens else 0,
        )
        chain.num_scored = min(chain.num_to_score, chain.num_to_score if chains else message.num_scored)
        if sampling.pooling == "last":
            chain.num_scored = chain.num_to_score - 1
        chains.append(chain)
    if len(chains) > 1:
        chains[0].siblings = chains[1:]
        chains[0].fork_at = len(message.prompt) - 1
    return chains


def without_tail(message: Generate, layout: KvLayout) -> Generate:
    """Return a request without output with the full blocks of its prompt only, and any other as it is."""
    if message.sampling.max_tokens:
        return message
    end = len(message.prompt) // layout.block_tokens * layout.block_tokens
    return message._replace(prompt=message.prompt[:end], items=begun_items(message.items, end))


def is_complete(chain: EngineSequence) -> bool:
    """Return whether an earlier attempt emitted all that may be sampled."""
    return not chain.only_fills and chain.num_tokens >= chain.max_num_tokens


def num_blocks_at_most(chains: list[EngineSequence], layout: KvLayout) -> int:
    """Return the number of blocks that all sequences have at their ends, counting shared blocks once."""
    shared = chains[0].fork_at // layout.block_tokens
    return shared + sum(layout.blocks_for(chain.max_num_tokens) - shared for chain in chains)
