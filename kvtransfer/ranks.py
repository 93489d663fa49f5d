"""Shape of a worker's pool: its tensor-parallel ranks, each a process with a transport of its own, and its planes.

Rank r of n holds the bytes [r/n, (r+1)/n) of every block, which are its KV heads because a block is head-major. Workers
of unlike sizes exchange blocks span by span without rearranging: a reader takes from each remote part what lies within
its own part.

    block of the lender, 2 ranks    |----- rank 0 -----|----- rank 1 -----|
    block of the reader, 3 ranks    |-- rank 0 --|-- rank 1 --|-- rank 2 --|
                                                  two spans

A pool of several planes keeps each block in as many spans, one per plane, at equal distances: vLLM on CPUs has a plane
per layer. A rank then holds its KV heads of every plane. Pools of unlike planes do not exchange blocks.

    pool of 3 planes, 4 blocks    |0|1|2|3|0|1|2|3|0|1|2|3|    block 1 is the three spans named 1
"""

import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvtransfer.errors import EndpointMismatch
from kvtransfer.transport import Span

MAGIC = b"tandem-ranks-1\n"
PLANES_MAGIC = b"tandem-planes-1\n"
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


@dataclass(frozen=True, slots=True)
class BlockPart:
    """Part of every block of `block_bytes` that one rank holds."""

    block_bytes: int
    rank: int = 0
    ranks: int = 1
    planes: int = 1
    """Number of spans, one per plane of the pool, that a block consists of."""
    num_blocks: int = 0
    """Blocks of the rank's pool, which give the distance of its planes; not needed with one plane."""

    def __post_init__(self) -> None:
        assert 0 <= self.rank < self.ranks
        assert self.block_bytes % (self.ranks * self.planes) == 0
        assert self.planes == 1 or self.num_blocks > 0

    @property
    def num_bytes(self) -> int:
        """Bytes per block in the rank's pool."""
        return self.block_bytes // self.ranks

    @property
    def span_bytes(self) -> int:
        """Bytes per block in one plane of the rank's pool."""
        return self.num_bytes // self.planes

    @property
    def plane_bytes(self) -> int:
        """Distance of the rank's planes in bytes."""
        return self.num_blocks * self.span_bytes

    @property
    def start(self) -> int:
        """Offset of the part within the block's whole span of a plane."""
        return self.rank * self.span_bytes

    @property
    def end(self) -> int:
        return self.start + self.span_bytes

    def of(self, block: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """Return this part, [num_bytes], of a whole block, [block_bytes]; a view where the block has one plane."""
        return self._spans(block).reshape(-1)

    def put(self, content: NDArray[np.uint8], block: NDArray[np.uint8]) -> None:
        """Set this part of a whole block, [block_bytes], to `content`, [num_bytes]."""
        self._spans(block)[:] = content.reshape(self.planes, self.span_bytes)

    def _spans(self, block: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """Return the view of this part's spans, [planes, span_bytes]."""
        return block.reshape(self.planes, self.ranks, self.span_bytes)[:, self.rank]


def parts_of(block_bytes: int, ranks: int, planes: int = 1, num_blocks: int = 0) -> list[BlockPart]:
    """Return the parts of all ranks of a peer.

    Raises EndpointMismatch when the size does not divide evenly.
    """
    if block_bytes % (ranks * planes):
        raise EndpointMismatch(f"a block of {block_bytes} bytes cannot be split over {ranks} ranks and {planes} planes")
    return [BlockPart(block_bytes, rank, ranks, planes, num_blocks) for rank in range(ranks)]


def part_spans(own: BlockPart, theirs: BlockPart, pairs: Iterable[tuple[int, int]]) -> list[Span]:
    """Return spans that copy what `theirs` has of `own`, for (local block, remote block) pairs, plane by plane.

    The list is empty where the parts do not meet. Neighbours in both pools become one span.
    """
    assert own.planes == theirs.planes
    first, end = max(own.start, theirs.start), min(own.end, theirs.end)
    if first >= end:
        return []
    length, local_step, remote_step = end - first, own.span_bytes, theirs.span_bytes
    spans: list[Span] = []
    begun_to = begun_at = end_to = end_at = -1
    pairs = list(pairs)
    for plane in range(own.planes):
        local, remote = plane * own.plane_bytes + first - own.start, plane * theirs.plane_bytes + first - theirs.start
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
