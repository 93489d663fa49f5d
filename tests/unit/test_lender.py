"""The lender's machine: exact actions on every path, then any order of events."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loans.lender import (
    Announce,
    Closed,
    Computed,
    LenderLoan,
    Refuse,
    Released,
    SendStarting,
    Start,
    StopComputing,
    Unhold,
)


def lending(first: int = 0) -> LenderLoan:
    """A loan of two cached blocks, 10 and 11, and two to be computed."""
    loan = LenderLoan(first)
    assert loan.handle(Start((10, 11), first + 4)) == [
        SendStarting(first + 4, first + 2),
        Announce(first, (10, 11)),
    ]
    return loan


def test_the_whole_loan() -> None:
    loan = lending(first=3)
    assert loan.held_blocks == [10, 11]
    assert loan.handle(Computed((12,))) == [Announce(5, (12,))]
    assert loan.handle(Released(3, 2)) == [Unhold((10, 11))]
    assert loan.held_blocks == [12]
    assert loan.handle(Computed((13,))) == [Announce(6, (13,))]
    assert loan.handle(Released(5, 2)) == [Unhold((12, 13))]
    assert loan.held_blocks == []
    assert not loan.done
    assert loan.handle(Closed()) == [StopComputing()]
    assert loan.done


def test_ranges_may_be_released_in_any_order_and_size() -> None:
    loan = lending()
    loan.handle(Computed((12, 13)))
    assert loan.handle(Released(3, 1)) == [Unhold((13,))]
    assert loan.handle(Released(0, 1)) == [Unhold((10,))]
    assert loan.held_blocks == [11, 12]
    assert loan.handle(Released(1, 2)) == [Unhold((11, 12))]


def test_nothing_cached() -> None:
    loan = LenderLoan(2)
    assert loan.handle(Start((), 4)) == [SendStarting(4, 2)]
    assert loan.handle(Computed(())) == []
    assert loan.handle(Computed((7,))) == [Announce(2, (7,))]


def test_everything_cached() -> None:
    loan = LenderLoan(0)
    assert loan.handle(Start((5, 6), 2)) == [SendStarting(2, 2), Announce(0, (5, 6))]


def test_a_lender_that_has_nothing_and_may_not_compute() -> None:
    loan = LenderLoan(3)
    assert loan.handle(Start((), 3)) == [SendStarting(3, 3)]
    assert loan.handle(Closed()) == [StopComputing()]


def test_close_while_queued_holds_nothing() -> None:
    loan = LenderLoan(0)
    assert loan.handle(Closed()) == [StopComputing()]
    assert loan.done


def test_close_in_the_middle_lets_go_of_what_is_left() -> None:
    loan = lending()
    loan.handle(Released(0, 1))
    loan.handle(Computed((12,)))
    assert loan.handle(Closed()) == [Unhold((11, 12)), StopComputing()]
    assert loan.held_blocks == []


@pytest.mark.parametrize(("first", "count"), [(0, 0), (2, 1), (1, 2), (0, 1 << 32), (4, 1), (100, 1), (0, -1), (0, 5)])
def test_a_release_of_what_is_not_held_ends_the_loan(first: int, count: int) -> None:
    loan = lending()
    text = f"release of blocks [{first}, {first + count}) that this loan does not hold"
    assert loan.handle(Released(first, count)) == [Refuse(text), Unhold((10, 11)), StopComputing()]
    assert loan.done


def test_a_release_twice_ends_the_loan_and_frees_nothing_twice() -> None:
    loan = lending()
    loan.handle(Released(0, 1))
    refuse, *rest = loan.handle(Released(0, 1))
    assert isinstance(refuse, Refuse)
    assert rest == [Unhold((11,)), StopComputing()]


def test_a_release_before_the_start_ends_the_loan() -> None:
    loan = LenderLoan(0)
    refuse, *rest = loan.handle(Released(0, 1))
    assert isinstance(refuse, Refuse)
    assert rest == [StopComputing()]


@pytest.mark.parametrize("event", [Start((1,), 2), Computed((1,)), Released(0, 1), Closed()])
def test_after_the_end_everything_is_ignored(event: Start | Computed | Released | Closed) -> None:
    loan = lending()
    loan.handle(Closed())
    assert loan.handle(event) == []
    assert loan.held_blocks == []


@pytest.mark.parametrize("event", [Start((), 4), Computed((1, 2, 3))])
def test_our_own_mistakes_are_assertions(event: Start | Computed) -> None:
    """A second start; more blocks than were promised."""
    loan = lending()
    with pytest.raises(AssertionError):
        loan.handle(event)


@given(st.data())
def test_every_announced_block_is_let_go_once(data: st.DataObject) -> None:
    first, total = data.draw(st.integers(0, 3)), data.draw(st.integers(0, 6))
    loan = LenderLoan(first)
    num_cached = data.draw(st.integers(0, total))
    ids = iter(range(100, 200))
    held: dict[int, int] = {}
    announced = first
    computed = num_cached

    def perform(actions: list[object]) -> None:
        nonlocal announced
        for action in actions:
            if isinstance(action, Announce):
                assert action.first == announced
                held.update({announced + i: block for i, block in enumerate(action.block_ids)})
                announced += len(action.block_ids)
            elif isinstance(action, Unhold):
                for block in action.block_ids:
                    index = next(index for index, other in held.items() if other == block)
                    del held[index]

    perform([*loan.handle(Start(tuple(next(ids) for _ in range(num_cached)), first + total))])
    while not loan.done:
        kind = data.draw(st.sampled_from(["close"] + 4 * ["compute"] + 4 * ["release"] + ["bad release"]))
        if kind == "compute" and computed < total:
            count = data.draw(st.integers(1, total - computed))
            computed += count
            perform([*loan.handle(Computed(tuple(next(ids) for _ in range(count))))])
        elif kind == "release" and held:
            start = data.draw(st.sampled_from(sorted(held)))
            run = 1
            while start + run in held and data.draw(st.booleans()):
                run += 1
            perform([*loan.handle(Released(start, run))])
            assert not loan.done
        elif kind == "bad release":
            perform([*loan.handle(Released(announced, 1))])
            assert loan.done
        elif kind == "close":
            perform([*loan.handle(Closed())])
        assert sorted(loan.held_blocks) == sorted(held.values())
    assert held == {}
