"""Transfers in flight: bytes that placements move, from the placement until its first token.

Pure.

A NIC gives each of its transfers an equal part. So while a new transfer moves its own bytes, each other one moves as
many, or what it has left if that is less; the end with more of them decides. Of a loan that computes, only the bytes
that need no computing are in flight: the others move at the speed of computing, whose queue is a term of its own.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Flows:
    """Transfers of one end in one direction, and their bytes."""

    num_bytes: int = 0
    count: int = 0

    def plus(self, num_bytes: int, count: int) -> "Flows":
        """Return them with so many more."""
        return Flows(self.num_bytes + num_bytes, self.count + count)

    def shared_bytes(self, num_bytes: int) -> int:
        """Return how many of their bytes move while a transfer of so many bytes does."""
        return min(self.num_bytes, num_bytes * self.count)


IDLE = Flows()


class _End:
    """Transfers at one end, in one direction."""

    __slots__ = ("began", "flows")

    def __init__(self) -> None:
        self.flows = IDLE
        """Transfers in flight."""
        self.began = IDLE
        """Transfers that began since the end was idle."""


@dataclass(slots=True, eq=False)
class Transfer:
    """Bytes of one placement between two rows of the worker table, a shared store among them."""

    borrower_id: str
    lender_id: str
    num_bytes: int
    before: tuple[tuple[Flows, Flows], ...] = ()
    """Flows at each end when it began: in flight, and begun so far."""
    shared: tuple[tuple[Flows, Flows], ...] = ()
    """Flows at each end: in flight when it began, and these with all that began until its end; empty until then."""

    def shared_bytes(self, num_bytes: int) -> float:
        """Return the bytes of others that shared its busier end, if it moved so many itself; for one that is over.

        Others that began later count half: the first token comes after the last byte, and maybe they did so, too.
        """
        before = max(before.shared_bytes(num_bytes) for before, _ in self.shared)
        during = max(during.shared_bytes(num_bytes) for _, during in self.shared)
        return (before + during) / 2


class TransfersInFlight:
    """Transfers in flight of a fleet, by worker id or store id."""

    def __init__(self) -> None:
        self._outgoing: dict[str, _End] = {}
        self._incoming: dict[str, _End] = {}

    def outgoing(self, end_id: str) -> Flows:
        """Return the transfers from this end."""
        return end.flows if (end := self._outgoing.get(end_id)) is not None else IDLE

    def incoming(self, end_id: str) -> Flows:
        """Return the transfers to this end."""
        return end.flows if (end := self._incoming.get(end_id)) is not None else IDLE

    def begin(self, transfer: Transfer) -> None:
        """Count a new transfer; `end` must follow."""
        before = []
        for ends, end_id in self._ends_of(transfer):
            end = ends.setdefault(end_id, _End())
            end.began = end.began.plus(transfer.num_bytes, 1)
            before.append((end.flows, end.began))
            end.flows = end.flows.plus(transfer.num_bytes, 1)
        transfer.before = tuple(before)

    def end(self, transfer: Transfer) -> None:
        """Count a transfer no more, and note what it shared its ends with."""
        shared = []
        for (ends, end_id), (flows, began) in zip(self._ends_of(transfer), transfer.before, strict=True):
            end = ends[end_id]
            later = end.began.plus(-began.num_bytes, -began.count)
            shared.append((flows, flows.plus(later.num_bytes, later.count)))
            end.flows = end.flows.plus(-transfer.num_bytes, -1)
            if not end.flows.count:
                del ends[end_id]  # ends that have left never come back
        transfer.shared = tuple(shared)

    def _ends_of(self, transfer: Transfer) -> tuple[tuple[dict[str, _End], str], ...]:
        return (self._outgoing, transfer.lender_id), (self._incoming, transfer.borrower_id)
