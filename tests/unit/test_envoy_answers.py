"""What an endpoint picker reads in answers, and what it writes into requests."""

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protos import inference_pb2 as pb
from protos import membership_pb2
from router.frontend.envoy.picker import SeenAnswer, finish_of, with_lender
from router.placement.demand import Demand
from router.placement.fleet.fleet import Fleet
from router.placement.fleet.worker_records import ActivePlacement
from router.placement.learning.rate_learning import measured
from router.placement.place import Decision
from router.placement.rates import Priors

DEMAND = Demand(101, 6, 8, 16, 1000, (101,), 165)
JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


def place(lends: bool) -> tuple[ActivePlacement, Decision]:
    fleet = Fleet("router", Priors(1000, 10, 1e6, 0.01, 0.001, 0.001))
    roles = {"d": membership_pb2.ROLE_DECODE} | ({"p": membership_pb2.ROLE_PREFILL} if lends else {})
    for name, role in roles.items():
        worker = fleet.joined(membership_pb2.Hello(worker_id=name, role=role, model_fingerprint=b"m"))
        fleet.reported(worker, membership_pb2.LoadReport(available_blocks=100, num_blocks=100))
    decision = fleet.decide(DEMAND, [])
    assert (decision.lender_id == "p") is lends
    return fleet.placed(decision, DEMAND, []), decision


def answer_of(*parts: bytes, streams: bool = True) -> SeenAnswer:
    answer = SeenAnswer(streams)
    for part in parts:
        answer.add(part)
    return answer


def test_a_stream_tells_the_speed_of_its_server() -> None:
    placed, decision = place(lends=False)
    told = b'data: {"usage": {"completion_tokens": 11, "prompt_tokens_details": {"cached_tokens": 40}}}\n\n'
    answer = answer_of(b'data: {"choices": [{"text": "a"}]}\n\n' * 3, b'data: {"finish_reason": "length"}\n\n', told)
    finish = finish_of("r", placed, decision, answer, 0.5, 2.0)
    assert (finish.reason, finish.usage.completion_tokens) == (pb.FINISH_REASON_LENGTH, 11)
    assert (finish.receipt.kv.reused_blocks, finish.receipt.kv.computed_blocks) == (2, 4)
    assert not finish.receipt.kv.predicted
    seen = measured(finish, 0, 0, 1.0, 1)
    assert seen.tail == (101 - 32, pytest.approx(0.5))
    assert seen.step == (1.0, pytest.approx(0.2))


def test_tokens_are_about_as_many_as_events() -> None:
    placed, decision = place(lends=False)
    finish = finish_of("r", placed, decision, answer_of(b"data: {}\n\n" * 8, b"data: [DONE]\n\n"), 0.5, 2.0)
    assert (finish.reason, finish.usage.completion_tokens) == (pb.FINISH_REASON_STOP, 8)
    assert finish.receipt.kv.predicted


def test_a_whole_answer_tells_no_speed() -> None:
    placed, decision = place(lends=False)
    answer = answer_of(b'{"usage": {"output_tokens": 7}}', streams=False)
    finish = finish_of("r", placed, decision, answer, 0.5, 0.0)
    assert finish.usage.completion_tokens == 7
    seen = measured(finish, 0, 0, 1.0, 1)
    assert (seen.tail, seen.step) == (None, None)


def test_no_speed_of_prompts_is_learned_of_a_loan() -> None:
    placed, decision = place(lends=True)
    seen = measured(finish_of("r", placed, decision, answer_of(b"data: {}\n\n" * 9), 0.5, 2.0), 0, 0, 1.0, 1)
    assert (seen.tail, seen.prefill, seen.transfer) == (None, None, None)
    assert seen.step is not None


def test_what_is_predicted_is_at_most_what_is_usable() -> None:
    placed, decision = place(lends=False)
    finish = finish_of("r", placed, replace(decision, hit_blocks=9), answer_of(b"data: {}\n\n"), 0.5, 2.0)
    assert (finish.receipt.kv.reused_blocks, finish.receipt.kv.computed_blocks) == (6, 0)


@given(st.dictionaries(st.text(), JSON_VALUES), st.sampled_from(("", "\n", " \r\n\t")), st.integers(0, 4))
def test_a_lender_changes_nothing_else(values: dict[str, Any], end: str, indent: int) -> None:
    body = (json.dumps(values, indent=indent or None) + end).encode()
    edited = with_lender(body, values, "http://10.0.0.7:8000")
    assert json.loads(edited) == values | {"kv_transfer_params": {"lender": "http://10.0.0.7:8000"}}
    start = body.rindex(b"}")
    assert edited.startswith(body[:start])
    assert edited.endswith(body[start:])


def test_a_client_may_steer_its_own_transfers() -> None:
    values = {"prompt": "a", "kv_transfer_params": {"do_remote_prefill": True}}
    assert with_lender(json.dumps(values).encode(), values, "http://10.0.0.7:8000") is None
