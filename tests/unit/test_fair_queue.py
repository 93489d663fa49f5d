"""Flows take turns, and none of them loses or reorders what it holds."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtransfer.fair_queue import FairQueue

OPERATIONS = st.lists(st.one_of(st.sampled_from("abcd"), st.none()), max_size=60)
"""A letter: put the next number into that flow. None: take one."""


def taken(queue: FairQueue[str]) -> list[str]:
    return [queue.pop() for _ in range(len(queue))]


def test_one_flow_is_a_plain_queue() -> None:
    queue = FairQueue[str]()
    for item in "abc":
        queue.put(None, item)
    assert (len(queue), taken(queue), bool(queue)) == (3, ["a", "b", "c"], False)
    with pytest.raises(KeyError):
        queue.pop()


def test_flows_take_turns_and_a_new_one_comes_last() -> None:
    queue = FairQueue[str]()
    for item in ("a1", "a2", "a3", "b1", "b2"):
        queue.put(item[0], item)
    assert queue.pop() == "a1"
    queue.put("c", "c1")
    assert taken(queue) == ["b1", "a2", "c1", "b2", "a3"]


def test_what_is_removed_costs_nobody_his_turn() -> None:
    queue = FairQueue[str]()
    for item in ("a1", "a2", "b1", "b2", "c1"):
        queue.put(item[0], item)
    assert queue.remove(lambda item: item in ("a1", "b1", "b2")) == ["a1", "b1", "b2"]
    assert taken(queue) == ["a2", "c1"]


@given(OPERATIONS)
def test_nothing_is_lost_and_a_flow_keeps_its_order(operations: list[str | None]) -> None:
    queue = FairQueue[tuple[str, int]]()
    put: dict[str, int] = {}
    got: dict[str, list[int]] = {}
    for flow in [*operations, *[None] * len(operations)]:
        if flow is not None:
            queue.put(flow, (flow, put.get(flow, 0)))
            put[flow] = put.get(flow, 0) + 1
        elif queue:
            name, number = queue.pop()
            got.setdefault(name, []).append(number)
        assert len(queue) == sum(put.values()) - sum(map(len, got.values()))
    assert got == {flow: list(range(count)) for flow, count in put.items()}


@given(OPERATIONS)
def test_an_item_waits_for_at_most_as_many_of_each_other_flow_as_it_has_before_it(operations: list[str | None]) -> None:
    queue = FairQueue[str]()
    for flow in operations:
        if flow is not None:
            queue.put(flow, flow)
        elif queue:
            queue.pop()
    before: dict[str, int] = {}
    for flow in taken(queue):
        own = before.get(flow, 0) + 1
        assert all(count <= own for count in before.values())
        before[flow] = own
