"""The lender's side of one loan, as a pure state machine.

    QUEUED ──Start──▶ LENDING ──Closed / Lost / protocol error──▶ DONE
       └──────────────────Closed──────────────────────────────────────┘

The loan holds one reference on every announced block until the borrower releases it or the stream ends. While QUEUED it
holds nothing; at `Start` everything it will need is reserved, so half-done loans cannot block each other. Blocks that a
compute job holds for itself are not the loan's.
"""

from dataclasses import dataclass
from enum import Enum, auto

# ---------------------------------------------------------------------------------------------- events


@dataclass(frozen=True, slots=True)
class Start:
    """Everything is reserved.

    `cached` blocks of chain indices [first, first + len(cached)) can be lent now; blocks up to `end` will be computed.
    """

    cached: tuple[int, ...]
    end: int


@dataclass(frozen=True, slots=True)
class Computed:
    """The next blocks of the chain are full: computed here, or `fetched` from elsewhere."""

    block_ids: tuple[int, ...]
    fetched: bool = False


@dataclass(frozen=True, slots=True)
class Released:
    """The borrower is done with chain indices [first, first + count)."""

    first: int
    count: int


@dataclass(frozen=True, slots=True)
class Closed:
    """The stream ended, for whatever reason."""


@dataclass(frozen=True, slots=True)
class Lost:
    """The blocks to lend cannot be had: those of a silent source are quarantined, and no others are free."""

    reason: str


Event = Start | Computed | Released | Closed | Lost

# --------------------------------------------------------------------------------------------- actions


@dataclass(frozen=True, slots=True)
class SendStarting:
    end: int
    cached_end: int


@dataclass(frozen=True, slots=True)
class Announce:
    """Take one reference on each block for this loan, and send its id and fingerprint."""

    first: int
    block_ids: tuple[int, ...]
    fetched: bool = False


@dataclass(frozen=True, slots=True)
class Unhold:
    """Drop this loan's reference on each block."""

    block_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class StopComputing:
    """Drop the compute job of this loan, if there is one."""


@dataclass(frozen=True, slots=True)
class Refuse:
    """End the stream: the borrower broke the protocol, or there is no capacity."""

    reason: str
    bad_request: bool = True


Action = SendStarting | Announce | Unhold | StopComputing | Refuse


class _State(Enum):
    QUEUED = auto()
    LENDING = auto()
    DONE = auto()


class LenderLoan:
    """One loan of chain blocks from `first` on."""

    def __init__(self, first: int) -> None:
        assert first >= 0
        self.first = first
        self._end = first
        self.announced_end = first
        """Position after the last announced block."""
        self._held: dict[int, int] = {}  # chain index -> block
        self._state = _State.QUEUED

    @property
    def done(self) -> bool:
        return self._state is _State.DONE

    @property
    def held_blocks(self) -> list[int]:
        """Blocks this loan holds a reference on."""
        return list(self._held.values())

    def handle(self, event: Event) -> list[Action]:
        """Process an event and return the actions.

        Events after the end are ignored, since they were in flight.
        """
        if self.done:
            return []
        match event:
            case Start(cached, end):
                return self._on_start(cached, end)
            case Computed(block_ids, fetched):
                assert self._state is _State.LENDING
                return self._announce(block_ids, fetched)
            case Lost(reason):
                return [Refuse(reason, bad_request=False), *self._finish()]
            case Released(first, count):
                return self._on_released(first, count)
            case Closed():
                return self._finish()

    def _on_start(self, cached: tuple[int, ...], end: int) -> list[Action]:
        assert self._state is _State.QUEUED
        assert self.first <= end
        self._state = _State.LENDING
        self._end = end
        return [SendStarting(end, self.first + len(cached)), *self._announce(cached)]

    def _announce(self, block_ids: tuple[int, ...], fetched: bool = False) -> list[Action]:
        if not block_ids:
            return []
        first = self.announced_end
        self.announced_end += len(block_ids)
        assert self.announced_end <= self._end
        self._held.update(zip(range(first, self.announced_end), block_ids, strict=True))
        return [Announce(first, block_ids, fetched)]

    def _on_released(self, first: int, count: int) -> list[Action]:
        indices = range(first, first + count)
        if count < 1 or any(index not in self._held for index in indices):
            return [
                Refuse(f"release of blocks [{first}, {first + count}) that this loan does not hold"),
                *self._finish(),
            ]
        return [Unhold(tuple(self._held.pop(index) for index in indices))]

    def _finish(self) -> list[Action]:
        self._state = _State.DONE
        held, self._held = tuple(self._held.values()), {}
        unhold: list[Action] = [Unhold(held)] if held else []
        return [*unhold, StopComputing()]
