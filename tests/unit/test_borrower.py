"""The borrower's machine: exact actions on every path, then any order of events."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtransfer.ranks import RankGrid
from loans.borrower import (
    OVERTAKEN,
    Abandon,
    Allocate,
    Announced,
    Bind,
    Borrower,
    Cancelled,
    Claimed,
    Close,
    ComputedHere,
    Event,
    Failed,
    Read,
    ReadCompleted,
    Release,
    Started,
)

A, B, C, D, BAD = b"A", b"B", b"C", b"D", b"?"


Steps = list[tuple[Event, list[object]]]

# Blocks [1, 5) are wanted, promised, and announced for two reads.
OPENED: Steps = [(Started(5), [Allocate(1, 5)])]
ALL = Announced(1, (10, 11, 12, 13), (A, B, C, D))
READING: Steps = [*OPENED, (ALL, [Read(1, (10, 11)), Read(3, (12, 13))])]
AB: Steps = [*READING, (ReadCompleted(1, (A, B)), [Release(1, 2), Bind(1, 3, (A, B))])]
CD_EARLY: Steps = [*READING, (ReadCompleted(3, (C, D)), [Release(3, 2)])]
FIRST_TWO: Steps = [*OPENED, (Announced(1, (10, 11), (A, B)), [Read(1, (10, 11))])]
ONE_OF_FOUR: Steps = [
    *OPENED,
    (Announced(1, (10,), (A,)), [Read(1, (10,))]),
    (ReadCompleted(1, (A,)), [Release(1, 1), Bind(1, 2, (A,))]),
]


def after(steps: Steps, first: int = 1, end: int = 5, max_read_blocks: int = 2) -> Borrower:
    """The machine after the events of `steps`, each of which gave exactly its actions."""
    machine, bound_end = Borrower(first, end, max_read_blocks), first
    for event, actions in steps:
        assert machine.handle(event) == actions
        bound_end = max(
            [bound_end, *(action.end for action in [event, *actions] if isinstance(action, Bind | ComputedHere))]
        )
        assert machine.bound_end == bound_end
        assert machine.done == any(isinstance(action, Close) for action in actions)
    return machine


def corrupted(block: int, mismatched: int = 1) -> Close:
    return Close(block, mismatched, f"block {block} arrived corrupted")


# ------------------------------------------------------------------------------------------- success

LOANS: dict[str, Steps] = {
    "whole": [*AB, (ReadCompleted(3, (C, D)), [Release(3, 2), Bind(3, 5, (C, D)), Close(5, 0, "")])],
    "the later read lands first": [
        *CD_EARLY,
        (ReadCompleted(1, (A, B)), [Release(1, 2), Bind(1, 3, (A, B)), Bind(3, 5, (C, D)), Close(5, 0, "")]),
    ],
    "the lender has a part": [
        (Started(2), [Allocate(1, 2)]),
        (Announced(1, (10,), (A,)), [Read(1, (10,))]),
        (ReadCompleted(1, (A,)), [Release(1, 1), Bind(1, 2, (A,)), Close(2, 0, "the lender holds only a part")]),
    ],
    "the lender has nothing": [(Started(1), [Close(1, 0, "the lender holds none of the blocks")])],
    "a read fails": [*AB, (ReadCompleted(3, None), [Abandon(), Close(3, 0, "the read failed")])],
    # the first wrong block ends the prefix
    "1 is wrong": [*READING, (ReadCompleted(1, (BAD, B)), [Release(1, 2), Abandon(), corrupted(1)])],
    "1 and 2 are wrong": [*READING, (ReadCompleted(1, (BAD, BAD)), [Release(1, 2), Abandon(), corrupted(1, 2)])],
    "2 is wrong": [*READING, (ReadCompleted(1, (A, BAD)), [Release(1, 2), Bind(1, 2, (A,)), Abandon(), corrupted(2)])],
    "3 is wrong": [*AB, (ReadCompleted(3, (BAD, D)), [Release(3, 2), corrupted(3)])],
    "4 is wrong": [*AB, (ReadCompleted(3, (C, BAD)), [Release(3, 2), Bind(3, 4, (C,)), corrupted(4)])],
    "a wrong one that lands early shows when its turn comes": [
        *READING,
        (ReadCompleted(3, (BAD, D)), [Release(3, 2)]),
        (ReadCompleted(1, (A, B)), [Release(1, 2), Bind(1, 3, (A, B)), corrupted(3)]),
    ],
    "those behind a wrong one are never bound": [
        *CD_EARLY,
        (ReadCompleted(1, (BAD, B)), [Release(1, 2), corrupted(1)]),
    ],
    # a silent lender
    "all is computed before it starts": [
        (Claimed(3), []),
        (ComputedHere(3), []),
        (Started(3), [Close(3, 0, OVERTAKEN)]),
    ],
    "a wrong one behind those computed here": [
        *OPENED,
        (Claimed(2), []),
        (ALL, [Release(1, 1), Read(2, (11, 12)), Read(4, (13,))]),
        (ReadCompleted(2, (BAD, C)), [Release(2, 2)]),
        (ComputedHere(2), [Abandon(), corrupted(2)]),
    ],
}


@pytest.mark.parametrize("steps", LOANS.values(), ids=LOANS)
def test_loans(steps: Steps) -> None:
    after(steps)


@pytest.mark.parametrize("wrong", [None, 0, 1, 2, 3])
def test_of_four_ranks_two_hold_each_head(wrong: int | None) -> None:
    """A replica that differs spoils the block, whichever it is."""
    machine = Borrower(0, 1, 1, grid=RankGrid(4, replicas=2))
    machine.handle(Started(1))
    assert machine.handle(Announced(0, (9,), (A + B,))) == [Read(0, (9,))]
    heads = [BAD if rank == wrong else head for rank, head in enumerate((A, A, B, B))]
    actions = [machine.handle(ReadCompleted(0, (head,), rank)) for rank, head in enumerate(heads)]
    assert actions[:3] == [[], [], []]
    assert machine.bound_end == (1 if wrong is None else 0)
    assert actions[3][-1] == (Close(1, 0, "") if wrong is None else corrupted(0))


# --------------------------------------------------------------------------- failure and cancel anywhere


@pytest.mark.parametrize(("event", "reason"), [(Failed("gone"), "gone"), (Cancelled(), "cancelled")])
@pytest.mark.parametrize(
    ("steps", "abandoned", "bound_end"),
    [
        pytest.param([], [], 1, id="opening"),
        pytest.param(OPENED, [], 1, id="nothing is announced"),
        pytest.param(READING, [Abandon()], 1, id="every read is out"),
        pytest.param(AB, [Abandon()], 3, id="between two reads"),
        pytest.param(ONE_OF_FOUR, [], 2, id="nothing is outstanding"),
        pytest.param(CD_EARLY, [Abandon()], 1, id="the earlier read alone is out"),
    ],
)
def test_the_end(steps: Steps, abandoned: list[object], bound_end: int, event: Event, reason: str) -> None:
    after([*steps, (event, [*abandoned, Close(bound_end, 0, reason)])])


# ----------------------------------------------------------------------------------- protocol errors


@pytest.mark.parametrize(
    ("steps", "event", "text"),
    [
        *(([], Started(end), f"Starting with end_block {end}") for end in (0, 6, 1 << 32)),  # outside of the wanted
        ([], Announced(1, (10,), (A,)), "BlocksReady 1+1"),  # before the start
        (READING, Started(5), "Starting with end_block 5"),  # again
        (FIRST_TWO, Announced(1, (9,), (A,)), "BlocksReady 1+1"),  # again
        (FIRST_TWO, Announced(4, (9,), (A,)), "BlocksReady 4+1"),  # a gap
        (FIRST_TWO, Announced(3, (9, 9, 9), (A, B, C)), "BlocksReady 3+3"),  # more than promised
        (FIRST_TWO, Announced(3, (9, 9), (A,)), "BlocksReady 3+2"),  # a fingerprint is missing
        (FIRST_TWO, Announced(3, (9,), (A, B)), "BlocksReady 3+1"),  # one too many
        (FIRST_TWO, Announced(3, (), ()), "BlocksReady 3+0"),  # nothing
    ],
)
def test_what_breaks_the_protocol_ends_the_loan(steps: Steps, event: Event, text: str) -> None:
    abandoned: list[object] = [Abandon()] if len(steps) > 1 else []
    after([*steps, (event, [*abandoned, Close(1, 0, f"protocol error: {text}")])])


@pytest.mark.parametrize(
    "event",
    [Started(5), Announced(1, (1,), (A,)), ReadCompleted(1, (A, B)), ReadCompleted(1, None), Failed("x"), Cancelled()],
)
def test_after_the_end_everything_is_ignored(event: Event) -> None:
    machine = after([*READING, (Cancelled(), [Abandon(), Close(1, 0, "cancelled")])])
    assert machine.handle(event) == []
    assert (machine.done, machine.bound_end) == (True, 1)


# --------------------------------------------------------------------------------- a silent lender


def test_blocks_that_are_computed_here_are_not_read() -> None:
    machine = after(OPENED)
    assert machine.handle(Claimed(3)) == []
    assert machine.handle(Announced(1, (10, 11, 12), (A, B, C))) == [Release(1, 2), Read(3, (12,))]
    assert machine.hold_at == 3
    assert machine.handle(ReadCompleted(3, (C,))) == [Release(3, 1)]
    assert machine.hold_at == 3, "it waits for those before it"
    assert machine.handle(ComputedHere(2)) == []
    assert machine.handle(ComputedHere(3)) == [Bind(3, 4, (C,))]
    assert machine.hold_at is None
    assert machine.handle(Claimed(5)) == [Close(4, 0, OVERTAKEN)]


# ------------------------------------------------------------------------------------------ any order


@given(st.data())
def test_any_order_of_events(data: st.DataObject) -> None:
    """Bound is exactly the longest prefix that arrived right; every landed block is released once; one Close."""
    first = data.draw(st.integers(0, 2))
    end = first + data.draw(st.integers(1, 7))
    held_end = data.draw(st.integers(first, end))
    machine = Borrower(first, end, data.draw(st.integers(1, 3)))
    expected = {index: b"%d" % index for index in range(first, end)}
    out: dict[int, int] = {}  # reads under way
    landed: dict[int, bytes] = {}
    released: list[int] = []
    bound = first
    failed_early = overtaken = False
    computed_here: set[int] = set()
    closes: list[Close] = []

    def perform(actions: list[object]) -> None:
        nonlocal bound
        for action in actions:
            assert not closes, "an action after the end"
            match action:
                case Read(start, ids):
                    out[start] = len(ids)
                case Release(start, count):
                    released.extend(range(start, start + count))
                case Bind(start, stop, prints):
                    assert start == bound
                    assert prints == tuple(expected[index] for index in range(start, stop))
                    assert all(landed[index] == expected[index] for index in range(start, stop))
                    bound = stop
                case Close():
                    closes.append(action)

    perform([*machine.handle(Started(held_end))])
    next_announced = claimed = first
    while not machine.done:
        kinds = ["fail"] if data.draw(st.integers(0, 19)) == 0 else []
        kinds += ["land"] * bool(out) + ["announce"] * (next_announced < held_end)
        hold = machine.hold_at
        limit = held_end if hold is None else hold
        kinds += ["claim"] * (bound < limit and claimed <= bound) + ["compute"] * (bound < claimed)
        kind = data.draw(st.sampled_from(kinds or ["fail"]))
        if kind == "announce":
            count = data.draw(st.integers(1, held_end - next_announced))
            indices = range(next_announced, next_announced + count)
            prints = tuple(expected[index] for index in indices)
            perform([*machine.handle(Announced(next_announced, tuple(indices), prints))])
            next_announced += count
        elif kind == "land":
            start = data.draw(st.sampled_from(sorted(out)))
            count = out.pop(start)
            good = data.draw(st.integers(0, 9)) > 0
            arrived = [expected[index] for index in range(start, start + count)]
            if not good:
                arrived[data.draw(st.integers(0, count - 1))] = BAD
            landed.update(zip(range(start, start + count), arrived, strict=True))
            perform([*machine.handle(ReadCompleted(start, tuple(arrived)))])
        elif kind == "claim":
            claimed = data.draw(st.integers(bound + 1, limit))
            perform([*machine.handle(Claimed(claimed))])
            overtaken |= machine.done
        elif kind == "compute":
            landed.update((index, expected[index]) for index in range(bound, claimed))
            computed_here.update(range(bound, claimed))
            bound = claimed
            perform([*machine.handle(ComputedHere(claimed))])
        else:
            failed_early = True
            perform([*machine.handle(Failed("x"))])
    assert [close.bound_end for close in closes] == [bound] == [machine.bound_end]
    assert set(released) >= set(landed) - computed_here
    assert set(released) <= set(landed) | set(range(first, claimed))
    assert len(set(released)) == len(released)
    right = first
    while right < held_end and landed.get(right) == expected[right]:
        right += 1
    if overtaken:
        assert (closes[0].failure, claimed) == (OVERTAKEN, held_end)
    elif not failed_early:
        assert bound == right
        assert (closes[0].failure == "") == (bound == end)
