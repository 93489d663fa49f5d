"""KV groups of a vLLM model: which blocks a boundary needs, and how they are named.

vLLM keeps layers that remember alike in a group: full attention, sliding windows, recurrent states. A block belongs to
one group at a time. vLLM's own lookup says what a boundary needs: asked with a pool in which everything is cached, it
returns exactly the blocks that a request continuing there reads. So every kind of group that vLLM has is known here.

The chain of keys has one key for each `unit` tokens, vLLM's hash block size. A group's block is named by the last key
that it covers and by its group. The block of the *chain group* has the key itself as its name.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from copy import copy
from dataclasses import dataclass, field
from typing import Any

from vllm.v1.core.kv_cache_utils import BlockHash
from vllm.v1.kv_cache_interface import FullAttentionSpec, MambaSpec

from kvcache.block_keys import BlockKey
from kvcache.chain import BlockRange, GroupBlock, name_of

HashOf = Callable[[BlockKey], BlockHash]
"""Function that returns the hash under which vLLM's prefix cache has the blocks of a key."""
RUNNING_STATES = 3
"""States that vLLM holds of a request at most: the running one, and those of the two steps before."""


class _Everything:
    """Block pool in which every block is cached, each as the pair of its hash and group."""

    def __init__(self, pool: Any) -> None:
        self.hash_block_size, self.null_block = pool.hash_block_size, pool.null_block

    def get_cached_block(self, block_hash: BlockHash, groups: Iterable[int]) -> list[Any]:
        return [(bytes(block_hash), group) for group in groups]


class KvGroups:
    """Groups of one engine."""

    def __init__(
        self, manager: Any, unit: int, num_ahead: int = 0, parts: int = 1, hash_of: HashOf = BlockHash
    ) -> None:
        """Create it for vLLM's KVCacheManager.

        `unit` is the number of tokens of a key, and `num_ahead` that of positions after a sequence's tokens that
        vLLM gives blocks to, for drafts. vLLM's groups describe one rank's part of a block, of so many `parts`.
        `hash_of` returns vLLM's hash of a key, which is the key itself in an engine whose requests are Tandem's.
        """
        self.hash_of = hash_of
        coordinator = manager.coordinator
        self._coordinator = coordinator
        self._ideal = copy(coordinator)
        everything = _Everything(coordinator.block_pool)
        self._ideal.block_pool = everything
        self._ideal.single_type_managers = tuple(map(copy, coordinator.single_type_managers))
        for each in self._ideal.single_type_managers:
            each.block_pool = everything
        self.unit = unit
        specs = [each.kv_cache_spec for each in coordinator.single_type_managers]
        self.widths = [each.block_size // unit for each in coordinator.single_type_managers]
        """Keys of a block, by group."""
        full = [group for group, spec in enumerate(specs) if isinstance(spec, FullAttentionSpec)]
        self.chain_group = full[0] if full else 0
        """Group whose blocks have the chain's keys as names: one of full attention, where there is one."""
        self.has_full = bool(full)
        self.is_chain = len(specs) == 1 and bool(full) and not coordinator.eagle_group_ids
        """Whether a boundary is any number of blocks, and needs these blocks alone."""
        self._num_ahead = num_ahead if self.is_chain else max(1, num_ahead)  # a fill goes one token beyond its boundary
        windows = (
            getattr(spec, "sliding_window", None) or getattr(spec, "attention_chunk_size", None) for spec in specs
        )
        self._longest_window = 2 + max((window or 0) // unit for window in windows)
        """Blocks after which every window is full."""
        self._most = [_most_blocks(each) for each in coordinator.single_type_managers]
        self.kinds = [type(spec).__name__.removesuffix("Spec") for spec in specs]
        self.shape = f"{unit},{self.widths},{[_whole(spec, parts) for spec in specs]}" if len(specs) > 1 else ""
        """Text that is equal where blocks of all groups mean the same."""

    @property
    def num_groups(self) -> int:
        return len(self.widths)

    def name(self, key: BlockKey, group: int) -> BlockKey:
        return key if group == self.chain_group else name_of(key, group)

    def blocks_for(self, num_tokens: int) -> int:
        """Return the number of blocks, of all groups, that a sequence of `num_tokens` tokens holds at most."""
        total = 0
        for width, most in zip(self.widths, self._most, strict=True):
            count = -(-(num_tokens + self._num_ahead) // (width * self.unit))
            total += count if most is None else min(count, most)
        return total

    def needs(self, keys: Sequence[BlockKey]) -> tuple[int, list[GroupBlock]]:
        """Return the last boundary within `keys`, and the blocks that it needs, ordered by their ends."""
        if not keys:
            return 0, []
        by_group, num_tokens, _ = self._ideal.find_longest_cache_hit(list(map(BlockHash, keys)), len(keys) * self.unit)
        end = num_tokens // self.unit
        return end, sorted(
            self.block(keys, group, at, end)
            for group, blocks in enumerate(by_group)
            for at, block in enumerate(blocks)
            if isinstance(block, tuple)
        )

    def tails(self) -> list[tuple[list[int], int]]:
        """Return the groups that need the same, and how many of their last blocks a boundary needs.

        A chain group of full attention is not among them, since a chain is its blocks. Other groups of full attention
        count one block: the chain group stands for their earlier ones.
        """
        most = max(self.widths) * self._longest_window
        keys = [b"%016d" % number for number in range(most)]
        counts = Counter(block.group for block in self.needs(keys)[1])
        classes: dict[tuple[int, int], list[int]] = {}
        for group, width in enumerate(self.widths):
            if group != self.chain_group or not self.has_full:
                count = 1 if counts[group] == most // width else counts[group]
                classes.setdefault((width, count), []).append(group)
        return [(groups, count) for (_, count), groups in classes.items()]

    def resumable(
        self, keys: Sequence[BlockKey], is_filled: Callable[[int, BlockKey], bool]
    ) -> tuple[int, list[tuple[GroupBlock, int]]]:
        """Return the last boundary within `keys` whose blocks are all in vLLM's cache and filled, with these blocks.

        `is_filled` says of a block and a name whether the block's fingerprint under this name is known.
        """
        most = len(keys)
        while most:
            hashes = [self.hash_of(key) for key in keys[:most]]
            by_group, num_tokens, _ = self._coordinator.find_longest_cache_hit(hashes, most * self.unit)
            end = num_tokens // self.unit
            numbers = {
                (group, at): block.block_id
                for group, blocks in enumerate(by_group)
                for at, block in enumerate(blocks)
                if not block.is_null
            }
            held = [(self.block(keys, group, at, end), number) for (group, at), number in numbers.items()]
            missing = [block.end for block, number in held if not is_filled(number, block.name)]
            if not missing:
                return end, sorted(held)
            most = min(min(missing), end) - 1  # being computed: its fingerprint is not known yet
        return 0, []

    def range_of(self, keys: Sequence[BlockKey], first: int, end: int) -> "GroupRange":
        """Return the blocks from the boundary `first` to the last one within `keys[:end]`."""
        _, held = self.needs(keys[:first])
        end, needed = self.needs(keys[:end])
        names = {block.name for block in held}
        blocks = [*held, *(block for block in needed if block.name not in names)]
        return GroupRange(first, end, len(held), [block.name for block in blocks], self, list(keys[:end]), blocks)

    def block(self, keys: Sequence[BlockKey], group: int, at: int, boundary: int) -> GroupBlock:
        """Return block number `at` of a group; one that the boundary cuts is named by the boundary's key."""
        end = min((at + 1) * self.widths[group], boundary)
        key = keys[end - 1]
        before = keys[at * self.widths[group] - 1] if at else b""
        return GroupBlock(end, group, key, self.name(key, group), before)


@dataclass(frozen=True, slots=True)
class GroupRange(BlockRange):
    """BlockRange of a model with several groups."""

    groups: KvGroups
    keys: list[BlockKey] = field(repr=False)
    """The chain up to its end."""
    blocks: list[GroupBlock] = field(repr=False)
    """Blocks by position."""

    def cut(self, end: int) -> "GroupRange":
        return self.groups.range_of(self.keys, self.first, end)

    def num_chain_blocks(self, first: int, end: int) -> int:
        width = self.groups.widths[self.groups.chain_group]
        return int(width) * sum(block.group == self.groups.chain_group for block in self.blocks[first:end])


def _most_blocks(manager: Any) -> int | None:
    """Return the largest number of blocks of a group that one request holds; None where it grows with the request."""
    spec = manager.kv_cache_spec
    if isinstance(spec, MambaSpec):
        return RUNNING_STATES + int(spec.num_speculative_blocks) if spec.mamba_cache_mode == "align" else None
    most = manager.max_admission_blocks_per_request
    return None if most is None else int(most)


def _whole(spec: Any, parts: int) -> str:
    """Return the text of a group's specification with the KV heads of all parts."""
    heads = getattr(spec, "num_kv_heads", None)
    return str(spec) if heads is None else str(spec).replace(f"num_kv_heads={heads},", f"num_kv_heads={heads * parts},")
