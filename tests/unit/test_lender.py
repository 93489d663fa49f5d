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

Event = Start | Computed | Released | Closed
Steps = list[tuple[Event, list[object]]]

# Two cached blocks, 10 and 11, and two to be computed; then also from block 3 on.
LENDING: Steps = [(Start((10, 11), 4), [SendStarting(4, 2), Announce(0, (10, 11))])]
FROM_3: Steps = [(Start((10, 11), 7), [SendStarting(7, 5), Announce(3, (10, 11))])]
CLOSED: Steps = [(Closed(), [StopComputing()])]
ONE_GIVEN_BACK: Steps = [*LENDING, (Released(0, 1), [Unhold((10,))])]


def not_held(first: int, end: int) -> Refuse:
    return Refuse(f"release of blocks [{first}, {end}) that this loan does not hold")


def after(steps: Steps, first: int = 0) -> LenderLoan:
    """The loan after the events of `steps`, each of which gave exactly its actions; what it holds follows from them."""
    loan, held = LenderLoan(first), list[int]()
    for event, actions in steps:
        assert loan.handle(event) == actions
        for action in actions:
            if isinstance(action, Announce):
                held += action.block_ids
            elif isinstance(action, Unhold):
                held = [block for block in held if block not in action.block_ids]
        assert loan.held_blocks == held
        assert loan.done == (StopComputing() in actions)
    return loan


LOANS: dict[str, tuple[int, Steps]] = {
    "whole": (3, [
        *FROM_3,
        (Computed((12,)), [Announce(5, (12,))]),
        (Released(3, 2), [Unhold((10, 11))]),
        (Computed((13,)), [Announce(6, (13,))]),
        (Released(5, 2), [Unhold((12, 13))]),
        *CLOSED,
    ]),
    "ranges of any order and size": (0, [
        *LENDING,
        (Computed((12, 13)), [Announce(2, (12, 13))]),
        (Released(3, 1), [Unhold((13,))]),
        (Released(0, 1), [Unhold((10,))]),
        (Released(1, 2), [Unhold((11, 12))]),
    ]),
    "nothing is cached": (2, [
        (Start((), 4), [SendStarting(4, 2)]),
        (Computed(()), []),
        (Computed((7,)), [Announce(2, (7,))]),
    ]),
    "everything is cached": (0, [(Start((5, 6), 2), [SendStarting(2, 2), Announce(0, (5, 6))])]),
    "nothing, and it may not compute": (3, [(Start((), 3), [SendStarting(3, 3)]), *CLOSED]),
    "closed while queued": (0, CLOSED),
    "closed in the middle": (0, [
        *ONE_GIVEN_BACK,
        (Computed((12,)), [Announce(2, (12,))]),
        (Closed(), [Unhold((11, 12)), StopComputing()]),
    ]),
    "a release twice": (0, [*ONE_GIVEN_BACK, (Released(0, 1), [not_held(0, 1), Unhold((11,)), StopComputing()])]),
    "a release before the start": (0, [(Released(0, 1), [not_held(0, 1), StopComputing()])]),
}  # fmt: skip


@pytest.mark.parametrize(("first", "steps"), LOANS.values(), ids=LOANS)
def test_loans(first: int, steps: Steps) -> None:
    after(steps, first)


@pytest.mark.parametrize(("first", "count"), [(0, 0), (2, 1), (1, 2), (0, 1 << 32), (4, 1), (100, 1), (0, -1), (0, 5)])
def test_a_release_of_what_is_not_held_ends_the_loan(first: int, count: int) -> None:
    refused = not_held(first, first + count)
    after([*LENDING, (Released(first, count), [refused, Unhold((10, 11)), StopComputing()])])


@pytest.mark.parametrize("event", [Start((1,), 2), Computed((1,)), Released(0, 1), Closed()])
def test_after_the_end_everything_is_ignored(event: Event) -> None:
    loan = after([*LENDING, (Closed(), [Unhold((10, 11)), StopComputing()])])
    assert loan.handle(event) == []
    assert loan.held_blocks == []


@pytest.mark.parametrize("event", [Start((), 4), Computed((1, 2, 3))])
def test_our_own_mistakes_are_assertions(event: Event) -> None:
    """A second start; more blocks than were promised."""
    loan = after(LENDING)
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
