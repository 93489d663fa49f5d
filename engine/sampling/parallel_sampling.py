"""Several choices of one prompt, or the beams of one search: computed once up to where they part.

A request starts as one chain, its lead, whatever number it asks for. The others are its `siblings`:

    lead      computes the tokens that all share ──▶ forked ──▶ runs as any other sequence
    sibling   nothing here, only counted in ───────────▲   │
              the lead's promise of blocks                 ├──there is room──▶ runs
                                                           └──there is none──▶ preempted

What is shared is the prompt but for its last token: each chain computes that itself, with what an earlier attempt
emitted of it, so that each first token is sampled as every other is. A fork shares the full blocks, and copies the one
that is partial, if one is. It happens between steps: nobody writes into that block then. Forked, every chain is a
sequence of its own for the scheduler, for preemption and for the books.

Of beams (`engine/sampling/beam_search.py`) some end and others part again and again: the chain that is dropped gives its blocks back,
and its sequence is forked anew from the one that goes on twice. A beam whose candidates are known computes nothing
until those of all others are. It may be preempted meanwhile; what was heard of it stays valid.
"""

from collections.abc import Callable
from dataclasses import replace

from engine.core.core_types import Sequence
from engine.kv.block_keys import BlockKey
from engine.kv.layout import KvLayout
from engine.messages import Generate
from engine.sampling.beam_search import BeamSearch


def search_of(message: Generate, eos_token_ids: frozenset[int]) -> BeamSearch | None:
    """The beam search that was asked for."""
    sampling = message.sampling
    if sampling.beam is None:
        return None
    ends = sampling.stop_token_ids | (frozenset() if sampling.ignore_eos else eos_token_ids)
    return BeamSearch(sampling.beam, sampling.max_tokens, ends)


def chains_of(
    message: Generate, root: BlockKey, search: BeamSearch | None, next_arrival: Callable[[], int]
) -> list[Sequence]:
    """Those that are to be computed, the lead first. Empty: everything was emitted by an earlier attempt.

    A beam search begins anew whatever was emitted: in the end it finds the same."""
    sampling = message.sampling
    if search is not None:
        sampling = replace(sampling, logprobs=search.num_candidates)
    chains: list[Sequence] = []
    for choice in range(sampling.num_chains):
        if choice in message.finished and search is None:
            continue
        emitted = () if search is not None else message.emitted_of(choice)
        tokens = [*message.prompt, *emitted]
        chain = Sequence(
            request_id=message.request_id,
            token_ids=tokens,
            num_prompt=len(tokens),
            root=root,
            sampling=sampling,
            priority=message.priority,
            arrival=next_arrival(),
            num_emitted_before=len(emitted),
            choice=choice,
        )
        chain.num_scored = min(chain.num_to_score, chain.num_to_score if chains else message.num_scored)
        chains.append(chain)
    if len(chains) > 1:
        chains[0].siblings = chains[1:]
        chains[0].fork_at = len(message.prompt) - 1
    return chains


def num_blocks_at_most(chains: list[Sequence], layout: KvLayout) -> int:
    """That all of them have at their ends, counting what they share once."""
    shared = chains[0].fork_at // layout.block_tokens
    return shared + sum(layout.blocks_for(chain.max_num_tokens) - shared for chain in chains)
