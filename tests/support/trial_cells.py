"""Which fault met which state of the handshake, counted over trials."""

from collections import Counter
from typing import Any, cast

from loans.component import Loans
from loans.lender_manager import LenderManager
from loans.loan import LenderSource
from support.hand_network import Stream
from support.trial_node import TrialNode

FAULTS = (
    "lender killed",
    "borrower killed",
    "lender stopped",
    "borrower stopped",
    "cancelled",
    "deadline",
    "connection cut",
    "message doubled",
    "messages reordered",
    "bytes corrupted",
    "completion delayed",
    "pool exhausted",
    "late write",
    "late read",
)
"""late write: into the borrower's pool, after the loan was over. late read: of blocks the lender has given away."""
STATES = {
    "borrower": ("opening", "reading", "hedged", "restoring", "over"),
    "lender": ("queued", "fetching", "computing", "unread", "partly released", "over"),
}
"""Of the borrower; `restoring` is from its own tier or the shared store, and a `hedged` one computes meanwhile. Of the
lender: `fetching` from a source, its own tier or the store; `unread`: everything is announced and nothing released."""
Cell = tuple[str, str, str]
"""Fault, side, state."""

_NO_LENDER_YET = "its own tier is asked first, and no stream is open before that is over"
_NOTHING_ANNOUNCED = "no block was announced, so none is read"
_BY_DEFINITION_AFTER = "late is what is written after the loan was over"
_NOT_GIVEN_AWAY = "the lender still holds what it announced"
IMPOSSIBLE: dict[Cell, str] = {
    ("lender killed", "borrower", "restoring"): _NO_LENDER_YET,
    ("lender stopped", "borrower", "restoring"): _NO_LENDER_YET,
    ("connection cut", "borrower", "restoring"): _NO_LENDER_YET,
    ("message doubled", "borrower", "restoring"): _NO_LENDER_YET,
    ("messages reordered", "borrower", "restoring"): _NO_LENDER_YET,
    ("messages reordered", "lender", "queued"): "nothing but the end is said of a loan that waits",
    ("bytes corrupted", "borrower", "opening"): _NOTHING_ANNOUNCED,
    ("bytes corrupted", "lender", "queued"): _NOTHING_ANNOUNCED,
    ("completion delayed", "borrower", "opening"): _NOTHING_ANNOUNCED,
    ("completion delayed", "lender", "queued"): _NOTHING_ANNOUNCED,
    ("late write", "lender", "queued"): _NOTHING_ANNOUNCED,
    ("late write", "borrower", "opening"): _BY_DEFINITION_AFTER,
    ("late write", "borrower", "reading"): _BY_DEFINITION_AFTER,
    ("late write", "borrower", "hedged"): _BY_DEFINITION_AFTER,
    ("late write", "borrower", "restoring"): _BY_DEFINITION_AFTER,
    ("late read", "borrower", "opening"): _NOTHING_ANNOUNCED,
    ("late read", "borrower", "restoring"): _NO_LENDER_YET,
    ("late read", "lender", "queued"): _NOTHING_ANNOUNCED,
    ("late read", "lender", "fetching"): _NOT_GIVEN_AWAY,
    ("late read", "lender", "computing"): _NOT_GIVEN_AWAY,
    ("late read", "lender", "unread"): _NOT_GIVEN_AWAY,
    ("late read", "lender", "partly released"): "what was released has been read; the rest it still holds",
}
"""Cells that cannot be reached, and why. A trial that reaches one fails."""


def borrower_state(stream: Stream) -> str:
    loan = stream.loan
    if loan.machine.done:
        return "over"
    if loan.wanted.sequence.hedged:
        return "hedged"
    return "opening" if loan.machine.opening else "reading"


def lender_state(stream: Stream) -> str | None:
    """None: it has not heard of the loan yet."""
    if not stream.asked:
        return None
    assert stream.lender is not None
    manager = cast(Loans[Any], stream.lender.gives).lender
    loan = manager.loan_of(stream)
    if loan is None:
        return "over"
    if loan.loan_id in manager.waiting:
        return "queued"
    if loan.fetching:
        return "fetching"
    if loan.job is not None:
        return "computing"
    released = len(loan.machine.held_blocks) < loan.machine.announced_end - loan.machine.first
    return "partly released" if released else "unread"


def _is_served(stream: Stream) -> bool:
    """What the loan was for, a request or a loan given, is not over."""
    owner: Any = stream.loan.wanted.owner
    return stream.borrower_id in (owner.loans if isinstance(owner, LenderManager) else owner.by_id)


class Cells:
    """Counts."""

    def __init__(self) -> None:
        self.counts: Counter[Cell] = Counter()

    def note(self, fault: str, stream: Stream) -> None:
        """It meets both sides of this loan, unless the loan and what it was for are over for good."""
        assert fault in FAULTS
        borrower, lender = borrower_state(stream), lender_state(stream)
        if borrower == "over" and lender in (None, "over") and not _is_served(stream):
            return
        self.counts[fault, "borrower", borrower] += 1
        if lender is not None:
            self.counts[fault, "lender", lender] += 1

    def note_restoring(self, fault: str, node: TrialNode, loan_id: str | None = None) -> None:
        """It meets what this engine, or one sequence there, is bringing back from its tier or the store."""
        for found_id, loan in node.core.borrower_manager.loans.items():
            if not isinstance(loan.source, LenderSource) and loan_id in (None, found_id):
                self.counts[fault, "borrower", "restoring"] += 1


def table(counts: Counter[Cell]) -> str:
    """One line per fault; - where it is impossible."""
    columns = [(side, state) for side, states in STATES.items() for state in states]
    heads = [f"{side[0].upper()}:{state}" for side, state in columns]
    assert not [cell for cell in IMPOSSIBLE if counts[cell]]
    lines = [" " * 20 + " ".join(f"{head:>17}" for head in heads)]
    for fault in FAULTS:
        cells = ["-" if (fault, *column) in IMPOSSIBLE else str(counts[(fault, *column)]) for column in columns]
        lines.append(f"{fault:<20}" + " ".join(f"{cell:>17}" for cell in cells))
    return "\n".join(lines)


def empty_cells(counts: Counter[Cell]) -> list[Cell]:
    """Those that are possible and were not reached."""
    cells = [(fault, side, state) for fault in FAULTS for side, states in STATES.items() for state in states]
    return [cell for cell in cells if not counts[cell] and cell not in IMPOSSIBLE]
