"""What a client sends to the next router, and whom it asks when."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.errors import Unavailable
from protos import inference_pb2 as pb
from router.request_path.stream_state import StreamState
from tandem.client.resuming import CONTINUE_S, START_S, StreamProgress, Tries, may_have_others

ORIGIN = pb.Origin(model="m", revision="ab", prompt=b"p")
responses = st.lists(
    st.builds(
        pb.GenerateResponse,
        index=st.integers(0, 2),
        token_ids=st.lists(st.integers(0, 9), max_size=3),
        text=st.text("aé😀", max_size=3),
        prompt_logprobs=st.lists(st.builds(pb.TokenLogprobs), max_size=2),
        finish=st.one_of(st.none(), st.builds(pb.Finish, reason=st.just(pb.FINISH_REASON_LENGTH))),
    ),
    min_size=1,
)


@given(responses)
def test_the_next_router_knows_what_the_first_one_knew(received: list[pb.GenerateResponse]) -> None:
    """A resumed stream's state is that of a router which has sent these messages itself."""
    progress, sent = StreamProgress(pb.GenerateRequest(text="x"), True), StreamState(3)
    received[0].origin.CopyFrom(ORIGIN)
    for message in received:
        progress.add(message)
        sent.add(message.SerializeToString())
    assert progress.can_continue
    request = progress.next_request()
    assert request.text == "x"
    assert request.resume.origin == ORIGIN
    resumed = StreamState.resumed(3, request.resume)
    for one, other in zip(resumed.choices, sent.choices, strict=True):
        assert (one.token_ids, one.num_chars, one.finished) == (other.token_ids, other.num_chars, other.finished)
    assert resumed.num_prompt_logprobs == sent.num_prompt_logprobs
    assert not resumed.empty


def begun(request: pb.GenerateRequest, has_others: bool = True, origin: pb.Origin = ORIGIN) -> StreamProgress:
    progress = StreamProgress(request, has_others)
    progress.add(pb.GenerateResponse(token_ids=[1], origin=origin))
    return progress


@pytest.mark.parametrize(
    "fields",
    [
        {"embedding": pb.EmbeddingOptions()},
        {"stream_tool_calls": True},
        {"media": [pb.Media(kind="image", url="http://x")]},
        {"messages": [pb.ChatMessage(parts=[pb.ContentPart(media=pb.Media(kind="image", url="http://x"))])]},
    ],
)
def test_what_cannot_go_on_is_not_kept(fields: dict[str, Any]) -> None:
    request = pb.GenerateRequest(**fields)
    progress = begun(request)
    assert not progress.can_continue
    assert StreamProgress(request, True).next_request() is request, "no seed is drawn in vain"


def test_a_stream_goes_on_where_there_are_others_that_know_its_model() -> None:
    request = pb.GenerateRequest(text="x")
    assert begun(request).can_continue
    assert not begun(request, has_others=False).can_continue
    assert not begun(request, origin=pb.Origin(model="m")).can_continue, (
        "a worker of an earlier version has no revision"
    )


def test_a_stream_whose_choices_are_all_finished_is_complete() -> None:
    progress = StreamProgress(pb.GenerateRequest(text="x", sampling=pb.Sampling(n=2)), True)
    for index in (0, 1):
        assert not progress.is_complete
        progress.add(pb.GenerateResponse(index=index, origin=ORIGIN, finish=pb.Finish()))
    assert progress.is_complete


def test_a_seed_is_drawn_once_where_tokens_are_drawn() -> None:
    drawn = StreamProgress(pb.GenerateRequest(text="x"), True)
    first = drawn.next_request()
    assert first.sampling.HasField("seed")
    drawn.add(pb.GenerateResponse(token_ids=[1], origin=ORIGIN))
    assert drawn.next_request().sampling.seed == first.sampling.seed
    for sampling in (pb.Sampling(temperature=0), pb.Sampling(seed=7)):
        request = pb.GenerateRequest(text="x", sampling=sampling)
        assert StreamProgress(request, True).next_request() is request
    alone = pb.GenerateRequest(text="x")
    assert StreamProgress(alone, False).next_request() is alone


def test_a_router_that_begins_anew_is_left() -> None:
    """One of an earlier version overlooks `resume`, and would repeat what the client has."""
    progress = begun(pb.GenerateRequest(text="x"))
    progress.next_request()
    with pytest.raises(Unavailable, match="cannot continue streams"):
        progress.add(pb.GenerateResponse(token_ids=[1]))
    progress.add(pb.GenerateResponse(token_ids=[2], origin=ORIGIN))
    progress.add(pb.GenerateResponse(token_ids=[3]))
    assert list(progress.next_request().resume.choices[0].token_ids) == [1, 2, 3]


def test_a_new_request_asks_several_routers_for_a_moment_and_a_stream_for_a_while() -> None:
    now = 0.0
    tries = Tries(2, lambda: now)
    assert tries.failed(False) is not None
    assert tries.number == 1
    while (pause := tries.failed(False)) is not None:
        now += max(pause, 0.1)
    assert now > START_S
    assert Tries(1, lambda: now).failed(False) is None, "its caller may try again"
    now, tries = 0.0, Tries(2, lambda: now)
    pauses = []
    while (pause := tries.failed(True)) is not None:
        pauses.append(pause)
        now += max(pause, 0.1)
    assert pauses[:4] == [0.0, 0.1, 0.1, 0.2], "one router after the other, then with pauses"
    assert max(pauses) == 1.0
    assert now > CONTINUE_S
    tries.succeeded()
    assert tries.failed(True) == 0.0, "an answer begins a new search"


@pytest.mark.parametrize(
    ("addresses", "has_others"),
    [
        (["10.0.0.1:1"], False),
        (["[::1]:1"], False),
        (["localhost:1"], False),
        (["routers.svc:1"], True),
        (["1.1.1.1:1", "1.1.1.2:1"], True),
    ],
)
def test_a_name_may_mean_several_routers(addresses: list[str], has_others: bool) -> None:
    assert may_have_others(addresses) is has_others
