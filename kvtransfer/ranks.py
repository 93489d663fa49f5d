"""Shape of a worker's pool: its ranks, each a process with a transport of its own, and its planes.

Tensor-parallel rank r of n holds the bytes [r/n, (r+1)/n) of every block, which are its KV heads because a block is
head-major. Workers of unlike sizes exchange blocks span by span without rearranging: a reader takes from each remote
part what lies within its own part.

    block of the lender, 2 ranks    |----- rank 0 -----|----- rank 1 -----|
    block of the reader, 3 ranks    |-- rank 0 --|-- rank 1 --|-- rank 2 --|
                                                  two spans

A pool of several planes keeps each block in as many spans, one per plane, at equal distances: vLLM on CPUs has a plane
per layer. A rank then holds its KV heads of every plane. Pools of unlike planes do not exchange blocks.

    pool of 3 planes, 4 blocks    |0|1|2|3|0|1|2|3|0|1|2|3|    block 1 is the three spans named 1

Pipeline stages divide the layers: a stage has some planes, or with a single plane a range of each head's bytes. Each
stage has its tensor-parallel ranks, so a part is a range of layers times a range of heads.

    block of one plane, 2 heads of 3 layers             |a0 a1 a2|b0 b1 b2|
    stage 0 has layers 0 and 1, one rank: two spans     |a0 a1|b0 b1|
"""

import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvtransfer.errors import EndpointMismatch
from kvtransfer.transport import Span

MAGIC = b"tandem-ranks-1\n"
PLANES_MAGIC = b"tandem-planes-1\n"
STAGES_MAGIC = b"tandem-stages-1\n"
MAX_RANKS = 64
MAX_PLANES = 4096
_COUNT = struct.Struct("<I")
_PLANES = struct.Struct("<II")


def join_endpoints(endpoints: Sequence[bytes]) -> bytes:
    """Join the endpoints of a worker's ranks, in order.

    A single rank's endpoint stays unchanged.
    """
    assert 0 < len(endpoints) <= MAX_RANKS
    if len(endpoints) == 1:
        return endpoints[0]
    parts = [_COUNT.pack(len(endpoint)) + endpoint for endpoint in endpoints]
    return MAGIC + _COUNT.pack(len(endpoints)) + b"".join(parts)


def split_endpoint(endpoint: bytes) -> tuple[bytes, ...]:
    """Return the endpoints of the ranks, in order.

    Raises EndpointMismatch.
    """
    if not endpoint.startswith(MAGIC):
        return (endpoint,)
    try:
        count, at = _count(endpoint, len(MAGIC))
        if not 1 < count <= MAX_RANKS:
            raise EndpointMismatch(f"the endpoint has {count} ranks, not 2 to {MAX_RANKS}")
        ranks: list[bytes] = []
        for _ in range(count):
            size, at = _count(endpoint, at)
            ranks.append(endpoint[at : at + size])
            at += size
    except struct.error:
        raise EndpointMismatch("the endpoint of several ranks is cut short") from None
    if at != len(endpoint):
        raise EndpointMismatch(f"the endpoint of several ranks has {len(endpoint)} bytes, its header says {at}")
    return tuple(ranks)


def with_planes(endpoint: bytes, planes: int, num_blocks: int) -> bytes:
    """Add the number of planes, and of each rank's blocks, to a worker's endpoint.

    The endpoint of a pool of one plane stays unchanged.
    """
    assert 0 < planes <= MAX_PLANES
    return endpoint if planes == 1 else PLANES_MAGIC + _PLANES.pack(planes, num_blocks) + endpoint


def without_planes(endpoint: bytes) -> tuple[int, int, bytes]:
    """Return the number of planes, the number of blocks (0 with one plane), and the endpoint without them.

    Raises EndpointMismatch.
    """
    if not endpoint.startswith(PLANES_MAGIC):
        return 1, 0, endpoint
    start = len(PLANES_MAGIC)
    try:
        planes, num_blocks = _PLANES.unpack_from(endpoint, start)
    except struct.error:
        raise EndpointMismatch("the endpoint of several planes is cut short") from None
    if not 1 < planes <= MAX_PLANES or not num_blocks:
        raise EndpointMismatch(
            f"the endpoint has {planes} planes of {num_blocks} blocks; 2 to {MAX_PLANES} planes and 1 block are needed"
        )
    return planes, num_blocks, endpoint[start + _PLANES.size :]


def _count(endpoint: bytes, at: int) -> tuple[int, int]:
    """Return the number at a position, and the position after it."""
    (count,) = _COUNT.unpack_from(endpoint, at)
    return count, at + _COUNT.size


class Share(NamedTuple):
    """Share of a block's layers that a pipeline stage holds: [first, end) of `of` equal pieces.

    The pieces are the planes of a pool that has several.
    """

    first: int
    end: int
    of: int


ALL = Share(0, 1, 1)


def shares_of(ends: Sequence[int]) -> tuple[Share, ...]:
    """Return the shares of stages that end at `ends`, of which the last is the number of pieces."""
    return tuple(Share(first, end, ends[-1]) for first, end in zip((0, *ends), ends, strict=False))


def with_stages(endpoint: bytes, shares: Sequence[Share]) -> bytes:
    """Add the shares of pipeline stages to a worker's endpoint; that of a single stage stays unchanged."""
    if len(shares) == 1:
        return endpoint
    ends = [share.end for share in shares]
    return STAGES_MAGIC + struct.pack(f"<{1 + len(ends)}I", len(ends), *ends) + endpoint


def without_stages(endpoint: bytes) -> tuple[tuple[Share, ...], bytes]:
    """Return the shares of pipeline stages, and the endpoint without them.

    Raises EndpointMismatch.
    """
    if not endpoint.startswith(STAGES_MAGIC):
        return (ALL,), endpoint
    try:
        count, at = _count(endpoint, len(STAGES_MAGIC))
        if not 1 < count <= MAX_RANKS:
            raise EndpointMismatch(f"the endpoint has {count} stages, not 2 to {MAX_RANKS}")
        ends = struct.unpack_from(f"<{count}I", endpoint, at)
    except struct.error:
        raise EndpointMismatch("the endpoint of several stages is cut short") from None
    if any(end <= first for first, end in zip((0, *ends), ends, strict=False)):
        raise EndpointMismatch(f"the endpoint has stages that end at {ends}, which do not rise")
    return shares_of(ends), endpoint[at + _COUNT.size * count :]


@dataclass(frozen=True, slots=True)
class RankGrid:
    """Ranks of a worker, in this order: stage by stage, in a stage head by head, and replicas of a part in a row."""

    ranks: int = 1
    stages: int = 1
    replicas: int = 1
    """Ranks in a row that hold the same part of every block; the first of them lends it."""

    def __post_init__(self) -> None:
        assert self.ranks % (self.stages * self.replicas) == 0

    def joined(self, of_ranks: Sequence[NDArray[np.uint64]]) -> NDArray[np.uint64]:
        """Return fingerprints of whole blocks, [blocks, KV heads], from those of the parts without replicas.

        A head's fingerprint is a sum over its words, so the sum of those that its stages have.
        """
        per_stage = len(of_ranks) // self.stages
        of_stages = [
            np.concatenate(of_ranks[first : first + per_stage], axis=1) for first in range(0, len(of_ranks), per_stage)
        ]
        return reduce(np.add, of_stages)


@dataclass(frozen=True, slots=True)
class BlockPart:
    """Part of every block of `block_bytes` that one rank holds: a share of the heads in a share of the layers."""

    block_bytes: int
    rank: int = 0
    """Number of its share of the heads, of `ranks` equal ones."""
    ranks: int = 1
    planes: int = 1
    """Number of spans, one per plane, that a whole block consists of."""
    num_blocks: int = 0
    """Blocks of the rank's pool, which give the distance of its planes; not needed with one plane."""
    share: Share = ALL
    """Layers."""
    heads: int = 1
    """Heads of a whole block, each of which has all its layers together; only needed with stages and one plane."""

    def __post_init__(self) -> None:
        assert 0 <= self.rank < self.ranks
        assert self.block_bytes % (self.ranks * self.planes) == 0
        assert self.planes == 1 or self.num_blocks > 0
        assert self.share == ALL or self.planes in (1, self.share.of)
        assert not self._cuts_heads or (
            self.heads % self.ranks == 0 and self.block_bytes // self.heads * self.share.first % self.share.of == 0
        )

    @property
    def _cuts_heads(self) -> bool:
        """Whether the rank has only some of each head's bytes in a plane."""
        return self.planes == 1 and self.share != ALL

    @property
    def own_planes(self) -> range:
        """Planes of a whole block that the rank has."""
        return range(self.planes) if self.planes == 1 or self.share == ALL else range(self.share.first, self.share.end)

    @property
    def _rows(self) -> int:
        """Number of rows in a whole block's span of a plane; the rank has the same columns of each of its rows."""
        return self.heads if self._cuts_heads else self.ranks

    @property
    def _own_rows(self) -> range:
        each = self._rows // self.ranks
        return range(self.rank * each, (self.rank + 1) * each)

    @property
    def row_bytes(self) -> int:
        """Bytes of a row of a whole block; of a head, where the rank has only some of each head's bytes."""
        return self.block_bytes // self.planes // self._rows

    @property
    def columns(self) -> range:
        """Bytes of each of its rows that the rank has."""
        if not self._cuts_heads:
            return range(self.row_bytes)
        first, end, of = self.share
        return range(self.row_bytes * first // of, self.row_bytes * end // of)

    @property
    def num_bytes(self) -> int:
        """Bytes per block in the rank's pool."""
        return len(self.own_planes) * self.span_bytes

    @property
    def span_bytes(self) -> int:
        """Bytes per block in one plane of the rank's pool."""
        return len(self._own_rows) * len(self.columns)

    @property
    def plane_bytes(self) -> int:
        """Distance of the rank's planes in bytes."""
        return self.num_blocks * self.span_bytes

    @property
    def start(self) -> int:
        """Offset of the part within the block's whole span of a plane, for a part that is one span there."""
        assert not self._cuts_heads
        return self.rank * self.span_bytes

    @property
    def end(self) -> int:
        return self.start + self.span_bytes

    def of(self, block: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """Return this part, [num_bytes], of a whole block, [block_bytes]; a view where the part is one span."""
        return self._box(block).reshape(-1)

    def put(self, content: NDArray[np.uint8], block: NDArray[np.uint8]) -> None:
        """Set this part of a whole block, [block_bytes], to `content`, [num_bytes]."""
        box = self._box(block)
        box[:] = content.reshape(box.shape)

    def _box(self, block: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """Return the view of this part, [planes, rows, columns]."""
        planes, rows, columns = self.own_planes, self._own_rows, self.columns
        whole = block.reshape(self.planes, self._rows, -1)
        return whole[planes.start : planes.stop, rows.start : rows.stop, columns.start : columns.stop]

    def pieces(self, other: "BlockPart") -> list[tuple[int, int, int]]:
        """Return the pieces of a block's plane that both parts have: the offset in each, and the length."""
        assert self.planes == other.planes
        if not (self._cuts_heads or other._cuts_heads):
            first, end = max(self.start, other.start), min(self.end, other.end)
            return [(first - self.start, first - other.start, end - first)] if first < end else []
        mine, theirs = self._in_heads(), other._in_heads()
        rows, columns = _common(mine._own_rows, theirs._own_rows), _common(mine.columns, theirs.columns)
        if not columns:
            return []
        return [(mine._offset(row, columns), theirs._offset(row, columns), len(columns)) for row in rows]

    def _in_heads(self) -> "BlockPart":
        """Return the same part, with a row for each head."""
        return self if self._cuts_heads else replace(self, share=Share(0, 2, 2))

    def _offset(self, row: int, columns: range) -> int:
        """Return the offset of a row's columns in the rank's span of a block."""
        return (row - self._own_rows.start) * len(self.columns) + columns.start - self.columns.start


def _common(some: range, others: range) -> range:
    """Return the numbers that two ranges of step 1 have in common."""
    return range(max(some.start, others.start), min(some.stop, others.stop))


def parts_of(
    block_bytes: int,
    ranks: int,
    planes: int = 1,
    num_blocks: int = 0,
    shares: Sequence[Share] = (ALL,),
    heads: int = 1,
) -> list[BlockPart]:
    """Return the parts of all ranks of a peer, whose pipeline stages have `shares` of the layers.

    Raises EndpointMismatch when the size does not divide evenly.
    """
    per_stage, rest = divmod(ranks, len(shares))
    if rest or block_bytes % (max(per_stage, 1) * planes):
        what = f"{ranks} ranks and {planes} planes"
        what += f" in {len(shares)} stages" if len(shares) > 1 else ""
        raise EndpointMismatch(f"a block of {block_bytes} bytes cannot be split over {what}")
    if len(shares) > 1:
        in_planes = planes > 1 and shares[0].of == planes
        in_heads = planes == 1 and not heads % per_stage and not block_bytes % heads
        if in_heads:
            in_heads = not any(block_bytes // heads * share.end % share.of for share in shares)
        if not (in_planes or in_heads):
            reason = f"a block of {block_bytes} bytes, {planes} planes and {heads} heads has no stages {tuple(shares)}"
            raise EndpointMismatch(reason)
    return [
        BlockPart(block_bytes, rank, per_stage, planes, num_blocks, share, heads)
        for share in shares
        for rank in range(per_stage)
    ]


def part_spans(own: BlockPart, theirs: BlockPart, pairs: Iterable[tuple[int, int]]) -> list[Span]:
    """Return spans that copy what `theirs` has of `own`, for (local block, remote block) pairs, plane by plane.

    The list is empty where the parts do not meet. Neighbours in both pools become one span.
    """
    pieces, planes = own.pieces(theirs), _common(own.own_planes, theirs.own_planes)
    local_step, remote_step = own.span_bytes, theirs.span_bytes
    spans: list[Span] = []
    begun_to = begun_at = end_to = end_at = -1
    pairs = list(pairs)
    for plane in planes:
        local = (plane - own.own_planes.start) * own.plane_bytes
        remote = (plane - theirs.own_planes.start) * theirs.plane_bytes
        for local_block, remote_block in pairs:
            for in_local, in_remote, length in pieces:
                to = local_block * local_step + local + in_local
                at = remote_block * remote_step + remote + in_remote
                if to != end_to or at != end_at:
                    if end_to >= 0:
                        spans.append(Span(begun_to, begun_at, end_to - begun_to))
                    begun_to, begun_at = to, at
                end_to, end_at = to + length, at + length
    if end_to >= 0:
        spans.append(Span(begun_to, begun_at, end_to - begun_to))
    return spans
