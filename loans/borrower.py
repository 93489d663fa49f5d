"""The borrower's side of one loan, as a pure state machine.

    OPENING ──Started──▶ READING ──all bound──▶ DONE
       │                    │
       └──Failed/Cancelled──┴──mismatch/Failed/Cancelled──▶ DONE

Blocks of the wanted range [first, end) move through

    wanted ─Announced─▶ reading ─ReadCompleted, fingerprints equal─▶ bound   (a growing prefix; usable at once)
                           │
                           └─ anything else ends the loan: bound blocks stay, the rest is computed locally

Ownership: the destination blocks belong to the request from `Allocate` on. After `Abandon`, a block whose read was
already posted belongs to the transport until that read is quiet; every other block is the request's again. A block is
bound only when it and all before it arrived with the fingerprints that the lender announced.

The lender may fall silent. Its borrower may then compute blocks itself while the loan stays open (a *hedged* loan). It
claims blocks in order, before it computes them; claimed blocks are not read any more, and a block that is being read is
not claimed. When everything is claimed, the loan ends.

A borrower of several ranks reads every piece once on each rank, into that rank's pool, and ranks finish
independently. A piece is complete with its last rank; only then is it compared, bound and released.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum, auto

import numpy as np

from kvtransfer.ranks import RankGrid

# ---------------------------------------------------------------------------------------------- events


@dataclass(frozen=True, slots=True)
class Started:
    """The lender has reserved everything; blocks [first, end) will be announced.

    `end` may be below the wanted one.
    """

    end: int


@dataclass(frozen=True, slots=True)
class Announced:
    """The lender's blocks of chain indices [first, first + len(block_ids)) may be read."""

    first: int
    block_ids: tuple[int, ...]
    fingerprints: tuple[bytes, ...]
    """One per block: uint64 per KV head."""


@dataclass(frozen=True, slots=True)
class Shortened:
    """The source has no block from `end` on, unlike it said at its start; only the shared store shortens a loan."""

    end: int


@dataclass(frozen=True, slots=True)
class ReadCompleted:
    """A read finished on one rank.

    `fingerprints` are of that rank's KV heads, or None when the read failed.
    """

    first: int
    fingerprints: tuple[bytes, ...] | None
    rank: int = 0


@dataclass(frozen=True, slots=True)
class Claimed:
    """This engine is about to compute all blocks before `end` that are not bound."""

    end: int


@dataclass(frozen=True, slots=True)
class ComputedHere:
    """This engine has computed, and named, all blocks before `end`."""

    end: int


@dataclass(frozen=True, slots=True)
class Failed:
    """The lender refused, died, fell silent, or broke the protocol."""

    reason: str


@dataclass(frozen=True, slots=True)
class Cancelled:
    """The request itself is over."""


Event = Started | Announced | Shortened | ReadCompleted | Claimed | ComputedHere | Failed | Cancelled

# --------------------------------------------------------------------------------------------- actions


@dataclass(frozen=True, slots=True)
class Allocate:
    """Take blocks for chain indices [first, end) from the request's reservation."""

    first: int
    end: int


@dataclass(frozen=True, slots=True)
class Read:
    """Post a read of the lender's `block_ids` into the blocks of chain indices from `first` on, on every rank."""

    first: int
    block_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Bind:
    """Blocks [first, end) are verified: name them and count them as computed."""

    first: int
    end: int
    fingerprints: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class Release:
    """Tell the lender that blocks [first, first + count) need no longer be held."""

    first: int
    count: int


@dataclass(frozen=True, slots=True)
class Abandon:
    """Withdraw every queued read; quarantine the blocks of posted reads until these are quiet."""


@dataclass(frozen=True, slots=True)
class Close:
    """End the stream; the last action."""

    bound_end: int
    mismatched: int
    failure: str
    """Reason of the end; empty when all wanted blocks were bound."""


Action = Allocate | Read | Bind | Release | Abandon | Close


NONE_HELD = "the lender holds none of the blocks"
"""Reason of the end of a loan whose source has nothing."""
OVERTAKEN = "the blocks were computed here before they arrived"
"""Reason of the end of a hedged loan."""


class _State(Enum):
    OPENING = auto()
    READING = auto()
    DONE = auto()


@dataclass(slots=True)
class _Piece:
    """One piece: its expected fingerprints, and those that arrived."""

    expected: tuple[bytes, ...]
    parts: dict[int, tuple[bytes, ...]] = field(default_factory=dict)
    """Fingerprints by rank."""

    def landed(self, grid: RankGrid) -> tuple[bytes, ...] | None:
        """Return the fingerprints of all heads, one entry per block; None while a rank is still reading.

        The entry is empty where replicas of a part differ, since then some of them are wrong.
        """
        if len(self.parts) < grid.ranks:
            return None
        if grid.ranks == 1:
            return self.parts[0]
        of_blocks = zip(*(self.parts[rank] for rank in range(grid.ranks)), strict=True)
        return tuple(_joined(of_ranks, grid) for of_ranks in of_blocks)


def _joined(of_ranks: tuple[bytes, ...], grid: RankGrid) -> bytes:
    """Return a block's fingerprints of all heads, from those of its ranks; empty where replicas of a part differ."""
    replicas = grid.replicas
    parts = of_ranks[::replicas]
    if replicas > 1 and any(each != parts[rank // replicas] for rank, each in enumerate(of_ranks)):
        return b""
    if grid.stages == 1:
        return b"".join(parts)
    return grid.joined([np.frombuffer(part, np.uint64)[None] for part in parts]).tobytes()


class Borrower:
    """One loan of chain blocks [first, end), read in pieces of at most `max_read_blocks` on each rank of a `grid`.

    `may_be_part`: the lender computes nothing, so fewer blocks than wanted are no failure.
    """

    def __init__(
        self,
        first: int,
        end: int,
        max_read_blocks: int,
        may_be_part: bool = False,
        grid: RankGrid = RankGrid(),  # noqa: B008
    ) -> None:
        assert 0 <= first < end
        assert max_read_blocks > 0
        self.first = first
        self.end = end
        self.bound_end = first
        self._announced_end = first
        self.claimed_end = first
        """Blocks before it are bound, or computed by this engine."""
        self._max_read_blocks = max_read_blocks
        self._may_be_part = may_be_part
        self._grid = grid
        self._pieces: dict[int, _Piece] = {}  # by first chain index; those not bound yet
        self._partial = False
        self._state = _State.OPENING

    @property
    def done(self) -> bool:
        return self._state is _State.DONE

    @property
    def opening(self) -> bool:
        """Whether the lender has not yet sent Started."""
        return self._state is _State.OPENING

    @property
    def hold_at(self) -> int | None:
        """First block that is read and not bound, which this engine must not compute; None without one."""
        return min(self._pieces, default=None)

    def handle(self, event: Event) -> list[Action]:
        """Process an event and return the actions.

        Events after the end are ignored, since they were in flight.
        """
        if self.done:
            return []
        match event:
            case Started(end):
                return self._on_started(end)
            case Announced():
                return self._on_announced(event)
            case Shortened(end):
                return self._on_shortened(end)
            case ReadCompleted(first, fingerprints, rank):
                return self._on_landed(first, fingerprints, rank)
            case Claimed(end):
                return self._on_claimed(end)
            case ComputedHere(end):
                self.bound_end = max(self.bound_end, min(end, self.end))
                return self._bind_landed()
            case Failed(reason):
                return self._finish(reason)
            case Cancelled():
                return self._finish("cancelled")

    def _on_started(self, end: int) -> list[Action]:
        if self._state is not _State.OPENING or not self.first <= end <= self.end:
            return self._finish(f"protocol error: Starting with end_block {end}")
        self._state = _State.READING
        wanted, self.end = self.end, end
        if end == self.first:
            return self._finish(NONE_HELD)
        self._partial = end < wanted and not self._may_be_part
        if end <= self.claimed_end:
            return self._finish(OVERTAKEN)
        return [Allocate(self.first, end)]

    def _on_announced(self, event: Announced) -> list[Action]:
        count = len(event.block_ids)
        in_order = event.first == self._announced_end and event.first + count <= self.end
        if self._state is not _State.READING or not in_order or count != len(event.fingerprints) or not count:
            return self._finish(f"protocol error: BlocksReady {event.first}+{count}")
        self._announced_end += count
        actions: list[Action] = []
        num_claimed = min(count, max(0, self.claimed_end - event.first))
        if num_claimed:
            actions.append(Release(event.first, num_claimed))
        for start in range(num_claimed, count, self._max_read_blocks):
            piece = slice(start, start + self._max_read_blocks)
            self._pieces[event.first + start] = _Piece(event.fingerprints[piece])
            actions.append(Read(event.first + start, event.block_ids[piece]))
        return actions

    def _on_shortened(self, end: int) -> list[Action]:
        if self._state is not _State.READING or not self._announced_end <= end <= self.end:
            return self._finish(f"protocol error: shortened to {end}")
        self.end = end
        if self.bound_end < end <= self.claimed_end:
            return self._finish(OVERTAKEN)
        return self._finish("") if self.bound_end == end else []

    def _on_landed(self, first: int, fingerprints: tuple[bytes, ...] | None, rank: int) -> list[Action]:
        piece = self._pieces[first]
        if fingerprints is None:
            return self._finish("the read failed")
        assert 0 <= rank < self._grid.ranks
        assert rank not in piece.parts
        piece.parts[rank] = fingerprints
        if piece.landed(self._grid) is None:
            return []
        return [Release(first, len(piece.expected)), *self._bind_landed()]

    def _on_claimed(self, end: int) -> list[Action]:
        assert not self._pieces or end <= min(self._pieces), "a block is computed that is being read"
        self.claimed_end = max(self.claimed_end, end)
        return self._finish(OVERTAKEN) if self.claimed_end >= self.end else []

    def _bind_landed(self) -> list[Action]:
        """Bind all pieces that have arrived and follow what is bound."""
        actions: list[Action] = []
        while (ready := self._pieces.get(self.bound_end)) is not None:
            if (landed := ready.landed(self._grid)) is None:
                break
            del self._pieces[self.bound_end]
            num_equal = _equal_prefix(ready.expected, landed)
            if num_equal:
                end = self.bound_end + num_equal
                actions.append(Bind(self.bound_end, end, landed[:num_equal]))
                self.bound_end = end
                self.claimed_end = max(self.claimed_end, end)
            if num_equal < len(ready.expected):
                mismatched = sum(a != b for a, b in zip(ready.expected, landed, strict=True))
                return actions + self._finish(f"block {self.bound_end} arrived corrupted", mismatched)
        if self.bound_end == self.end:
            return actions + self._finish("the lender holds only a part" if self._partial else "")
        return actions

    def _finish(self, failure: str, mismatched: int = 0) -> list[Action]:
        self._state = _State.DONE
        outstanding = any(piece.landed(self._grid) is None for piece in self._pieces.values())
        abandon: list[Action] = [Abandon()] if outstanding else []
        return [*abandon, Close(self.bound_end, mismatched, failure)]


def _equal_prefix(expected: Sequence[bytes], landed: Sequence[bytes]) -> int:
    """Return how many leading fingerprints agree."""
    for index, (want, got) in enumerate(zip(expected, landed, strict=True)):
        if want != got:
            return index
    return len(expected)
