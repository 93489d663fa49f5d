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


def reading(max_read_blocks: int = 2) -> Borrower:
    """Blocks [1, 5) are wanted and promised."""
    machine = Borrower(1, 5, max_read_blocks)
    assert machine.handle(Started(5)) == [Allocate(1, 5)]
    return machine


def announced(max_read_blocks: int = 2) -> Borrower:
    """All of them are announced, in two reads."""
    machine = reading(max_read_blocks)
    actions = machine.handle(Announced(1, (10, 11, 12, 13), (A, B, C, D)))
    if max_read_blocks == 2:
        assert actions == [Read(1, (10, 11)), Read(3, (12, 13))]
    return machine


def done(machine: Borrower, bound_end: int) -> bool:
    return machine.done and machine.bound_end == bound_end


# ------------------------------------------------------------------------------------------- success


def test_the_whole_loan() -> None:
    machine = announced()
    assert machine.handle(ReadCompleted(1, (A, B))) == [Release(1, 2), Bind(1, 3, (A, B))]
    assert machine.bound_end == 3
    assert machine.handle(ReadCompleted(3, (C, D))) == [Release(3, 2), Bind(3, 5, (C, D)), Close(5, 0, "")]
    assert done(machine, 5)


def test_announcements_come_in_pieces_of_any_size() -> None:
    machine = Borrower(0, 6, max_read_blocks=2)
    assert machine.handle(Started(6)) == [Allocate(0, 6)]
    assert machine.handle(Announced(0, (9,), (A,))) == [Read(0, (9,))]
    assert machine.handle(Announced(1, (8, 7, 6), (B, C, D))) == [Read(1, (8, 7)), Read(3, (6,))]
    assert machine.handle(ReadCompleted(0, (A,))) == [Release(0, 1), Bind(0, 1, (A,))]
    assert machine.handle(ReadCompleted(1, (B, C))) == [Release(1, 2), Bind(1, 3, (B, C))]
    assert machine.handle(ReadCompleted(3, (D,))) == [Release(3, 1), Bind(3, 4, (D,))]
    assert machine.handle(Announced(4, (5, 4), (A, B))) == [Read(4, (5, 4))]
    assert machine.handle(ReadCompleted(4, (A, B))) == [Release(4, 2), Bind(4, 6, (A, B)), Close(6, 0, "")]


def test_a_read_that_lands_early_is_released_and_waits_for_those_before_it() -> None:
    machine = announced()
    assert machine.handle(ReadCompleted(3, (C, D))) == [Release(3, 2)]
    assert machine.bound_end == 1
    assert machine.handle(ReadCompleted(1, (A, B))) == [
        Release(1, 2),
        Bind(1, 3, (A, B)),
        Bind(3, 5, (C, D)),
        Close(5, 0, ""),
    ]


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
    assert actions[3][-1] == (Close(1, 0, "") if wrong is None else Close(0, 1, "block 0 arrived corrupted"))


def test_a_lender_with_a_part_is_used_for_that_part() -> None:
    machine = Borrower(1, 5, 2)
    assert machine.handle(Started(2)) == [Allocate(1, 2)]
    assert machine.handle(Announced(1, (10,), (A,))) == [Read(1, (10,))]
    assert machine.handle(ReadCompleted(1, (A,))) == [
        Release(1, 1),
        Bind(1, 2, (A,)),
        Close(2, 0, "the lender holds only a part"),
    ]


def test_a_lender_with_nothing() -> None:
    machine = Borrower(1, 5, 2)
    assert machine.handle(Started(1)) == [Close(1, 0, "the lender holds none of the blocks")]
    assert machine.done


# ------------------------------------------------------------------------------------------ mismatch


@pytest.mark.parametrize(
    ("first_read", "second_read", "expected"),
    [
        ((BAD, B), None, [Release(1, 2), Abandon(), Close(1, 1, "block 1 arrived corrupted")]),
        ((BAD, BAD), None, [Release(1, 2), Abandon(), Close(1, 2, "block 1 arrived corrupted")]),
        (
            (A, BAD),
            None,
            [Release(1, 2), Bind(1, 2, (A,)), Abandon(), Close(2, 1, "block 2 arrived corrupted")],
        ),
        ((A, B), (BAD, D), [Release(3, 2), Close(3, 1, "block 3 arrived corrupted")]),
        ((A, B), (C, BAD), [Release(3, 2), Bind(3, 4, (C,)), Close(4, 1, "block 4 arrived corrupted")]),
    ],
)
def test_the_first_wrong_block_ends_the_prefix(
    first_read: tuple[bytes, ...], second_read: tuple[bytes, ...] | None, expected: list[object]
) -> None:
    machine = announced()
    actions = machine.handle(ReadCompleted(1, first_read))
    if second_read is not None:
        actions = machine.handle(ReadCompleted(3, second_read))
    assert actions == expected
    assert machine.done


def test_a_wrong_block_that_lands_early_shows_when_its_turn_comes() -> None:
    machine = announced()
    assert machine.handle(ReadCompleted(3, (BAD, D))) == [Release(3, 2)]
    assert machine.handle(ReadCompleted(1, (A, B))) == [
        Release(1, 2),
        Bind(1, 3, (A, B)),
        Close(3, 1, "block 3 arrived corrupted"),
    ]


def test_blocks_behind_a_wrong_one_are_never_bound() -> None:
    machine = announced()
    machine.handle(ReadCompleted(3, (C, D)))
    assert machine.handle(ReadCompleted(1, (BAD, B))) == [Release(1, 2), Close(1, 1, "block 1 arrived corrupted")]
    assert done(machine, 1)


# --------------------------------------------------------------------------- failure and cancel anywhere

ENDS = [(Failed("gone"), "gone"), (Cancelled(), "cancelled")]


@pytest.mark.parametrize(("event", "reason"), ENDS)
def test_the_end_while_opening(event: Event, reason: str) -> None:
    machine = Borrower(1, 5, 2)
    assert machine.handle(event) == [Close(1, 0, reason)]
    assert machine.done


@pytest.mark.parametrize(("event", "reason"), ENDS)
def test_the_end_before_anything_is_announced(event: Event, reason: str) -> None:
    assert reading().handle(event) == [Close(1, 0, reason)]


@pytest.mark.parametrize(("event", "reason"), ENDS)
def test_the_end_with_every_read_out(event: Event, reason: str) -> None:
    assert announced().handle(event) == [Abandon(), Close(1, 0, reason)]


@pytest.mark.parametrize(("event", "reason"), ENDS)
def test_the_end_between_two_reads_keeps_what_is_bound(event: Event, reason: str) -> None:
    machine = announced()
    machine.handle(ReadCompleted(1, (A, B)))
    assert machine.handle(event) == [Abandon(), Close(3, 0, reason)]


@pytest.mark.parametrize(("event", "reason"), ENDS)
def test_the_end_with_nothing_outstanding(event: Event, reason: str) -> None:
    machine = reading()
    machine.handle(Announced(1, (10,), (A,)))
    machine.handle(ReadCompleted(1, (A,)))
    assert machine.handle(event) == [Close(2, 0, reason)]


@pytest.mark.parametrize(("event", "reason"), ENDS)
def test_the_end_with_a_hole(event: Event, reason: str) -> None:
    """The later read landed, the earlier one is out: it alone must be abandoned, nothing is bound."""
    machine = announced()
    machine.handle(ReadCompleted(3, (C, D)))
    assert machine.handle(event) == [Abandon(), Close(1, 0, reason)]


def test_a_failed_read_ends_the_loan() -> None:
    machine = announced()
    machine.handle(ReadCompleted(1, (A, B)))
    assert machine.handle(ReadCompleted(3, None)) == [Abandon(), Close(3, 0, "the read failed")]
    assert machine.done


# ----------------------------------------------------------------------------------- protocol errors


@pytest.mark.parametrize("end", [0, 6, 1 << 32])
def test_a_start_outside_of_what_was_wanted(end: int) -> None:
    machine = Borrower(1, 5, 2)
    assert machine.handle(Started(end)) == [Close(1, 0, f"protocol error: Starting with end_block {end}")]


def test_a_second_start() -> None:
    assert announced().handle(Started(5)) == [
        Abandon(),
        Close(1, 0, "protocol error: Starting with end_block 5"),
    ]


def test_an_announcement_before_the_start() -> None:
    machine = Borrower(1, 5, 2)
    assert machine.handle(Announced(1, (10,), (A,))) == [Close(1, 0, "protocol error: BlocksReady 1+1")]


@pytest.mark.parametrize(
    "event",
    [
        Announced(1, (9,), (A,)),  # again
        Announced(4, (9,), (A,)),  # a gap
        Announced(3, (9, 9, 9), (A, B, C)),  # more than promised
        Announced(3, (9, 9), (A,)),  # a fingerprint is missing
        Announced(3, (9,), (A, B)),  # one too many
        Announced(3, (), ()),  # nothing
    ],
)
def test_a_bad_announcement(event: Announced) -> None:
    machine = reading()
    machine.handle(Announced(1, (10, 11), (A, B)))
    reason = f"protocol error: BlocksReady {event.first}+{len(event.block_ids)}"
    assert machine.handle(event) == [Abandon(), Close(1, 0, reason)]


@pytest.mark.parametrize(
    "event",
    [Started(5), Announced(1, (1,), (A,)), ReadCompleted(1, (A, B)), ReadCompleted(1, None), Failed("x"), Cancelled()],
)
def test_after_the_end_everything_is_ignored(event: Event) -> None:
    machine = announced()
    machine.handle(Cancelled())
    assert machine.handle(event) == []
    assert done(machine, 1)


# --------------------------------------------------------------------------------- a silent lender


def test_blocks_that_are_computed_here_are_not_read() -> None:
    machine = reading()
    assert machine.handle(Claimed(3)) == []
    assert machine.handle(Announced(1, (10, 11, 12), (A, B, C))) == [Release(1, 2), Read(3, (12,))]
    assert machine.hold_at == 3
    assert machine.handle(ReadCompleted(3, (C,))) == [Release(3, 1)]
    assert machine.hold_at == 3, "it waits for those before it"
    assert machine.handle(ComputedHere(2)) == []
    assert machine.handle(ComputedHere(3)) == [Bind(3, 4, (C,))]
    assert machine.hold_at is None
    assert machine.handle(Claimed(5)) == [Close(4, 0, OVERTAKEN)]


def test_all_is_computed_before_the_lender_starts() -> None:
    machine = Borrower(1, 5, 2)
    assert machine.handle(Claimed(3)) == []
    assert machine.handle(ComputedHere(3)) == []
    assert machine.handle(Started(3)) == [Close(3, 0, OVERTAKEN)]


def test_a_lender_that_comes_back_brings_the_rest() -> None:
    machine = Borrower(1, 5, 4)
    machine.handle(Claimed(2))
    machine.handle(ComputedHere(2))
    assert machine.handle(Started(5)) == [Allocate(1, 5)]
    assert machine.handle(Announced(1, (10, 11, 12, 13), (A, B, C, D))) == [Release(1, 1), Read(2, (11, 12, 13))]
    assert machine.handle(ReadCompleted(2, (B, C, D))) == [Release(2, 3), Bind(2, 5, (B, C, D)), Close(5, 0, "")]


def test_a_wrong_block_behind_those_computed_here() -> None:
    machine = reading()
    machine.handle(Claimed(2))
    machine.handle(Announced(1, (10, 11, 12, 13), (A, B, C, D)))
    machine.handle(ReadCompleted(2, (BAD, C)))
    assert machine.handle(ComputedHere(2)) == [Abandon(), Close(2, 1, "block 2 arrived corrupted")]


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
