"""Pools spread over the tensor-parallel ranks of a worker, each a process with a transport of its own.

Rank r of n holds the bytes [r/n, (r+1)/n) of every block, which are its KV heads because a block is head-major. Workers
of unlike sizes exchange blocks span by span without rearranging: a reader takes from each remote part what lies within
its own part.

    block of the lender, 2 ranks    |----- rank 0 -----|----- rank 1 -----|
    block of the reader, 3 ranks    |-- rank 0 --|-- rank 1 --|-- rank 2 --|
                                                  two spans
"""

import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kvtransfer.errors import EndpointMismatch
from kvtransfer.transport import Span

MAGIC = b"tandem-ranks-1\n"
MAX_RANKS = 64
_COUNT = struct.Struct("<I")


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
            raise EndpointMismatch(f"an endpoint of {count} ranks, 2 to {MAX_RANKS} are possible")
        ranks: list[bytes] = []
        for _ in range(count):
            size, at = _count(endpoint, at)
            ranks.append(endpoint[at : at + size])
            at += size
    except struct.error:
        raise EndpointMismatch("the endpoint of several ranks is cut short") from None
    if at != len(endpoint):
        raise EndpointMismatch(f"the endpoint of several ranks has {len(endpoint)} bytes and says {at}")
    return tuple(ranks)


def _count(endpoint: bytes, at: int) -> tuple[int, int]:
    """Return the number at a position, and the position after it."""
    (count,) = _COUNT.unpack_from(endpoint, at)
    return count, at + _COUNT.size


@dataclass(frozen=True, slots=True)
class BlockPart:
    """Part of every block of `block_bytes` that one rank holds."""

    block_bytes: int
    rank: int = 0
    ranks: int = 1

    def __post_init__(self) -> None:
        assert 0 <= self.rank < self.ranks
        assert self.block_bytes % self.ranks == 0

    @property
    def num_bytes(self) -> int:
        """Bytes per block in the rank's pool."""
        return self.block_bytes // self.ranks

    @property
    def start(self) -> int:
        """Offset of the part within the whole block."""
        return self.rank * self.num_bytes

    @property
    def end(self) -> int:
        return self.start + self.num_bytes


def parts_of(block_bytes: int, ranks: int) -> list[BlockPart]:
    """Return the parts of all ranks of a peer.

    Raises EndpointMismatch when the size does not divide evenly.
    """
    if block_bytes % ranks:
        raise EndpointMismatch(f"a block of {block_bytes} bytes on {ranks} ranks")
    return [BlockPart(block_bytes, rank, ranks) for rank in range(ranks)]


def part_spans(own: BlockPart, theirs: BlockPart, pairs: Iterable[tuple[int, int]]) -> list[Span]:
    """Return spans that copy what `theirs` has of `own`, for (local block, remote block) pairs.

    The list is empty where the parts do not meet. Neighbours in both pools become one span.
    """
    first, end = max(own.start, theirs.start), min(own.end, theirs.end)
    if first >= end:
        return []
    local, remote, length = first - own.start, first - theirs.start, end - first
    local_step, remote_step = own.num_bytes, theirs.num_bytes
    spans: list[Span] = []
    begun_to = begun_at = end_to = end_at = -1
    for local_block, remote_block in pairs:
        to, at = local_block * local_step + local, remote_block * remote_step + remote
        if to != end_to or at != end_at:
            if end_to >= 0:
                spans.append(Span(begun_to, begun_at, end_to - begun_to))
            begun_to, begun_at = to, at
        end_to, end_at = to + length, at + length
    if end_to >= 0:
        spans.append(Span(begun_to, begun_at, end_to - begun_to))
    return spans
