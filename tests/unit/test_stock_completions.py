"""Placed requests become bodies of /v1/completions, and their chunks an engine's messages."""

import pytest

from cluster.errors import InvalidRequest, RevisionGone, Unavailable
from engine.core_types import FinishReason
from protos import decode_pb2 as pb
from protos import inference_pb2 as public_pb
from router.stock.completions import Call, calls_of, prompt_scores, read_chunk, tokens_of
from router.stock.facts import EventReader

PROMPT = [5, 6, 7]


def request(**sampling: object) -> pb.DecodeRequest:
    asked = public_pb.Sampling(**({"max_tokens": 10, "temperature": 0.0, "top_p": 1.0} | sampling))  # type: ignore[arg-type]
    return pb.DecodeRequest(
        request_id="r", prompt_token_ids=PROMPT, sampling=asked, seed_is_drawn="seed" not in sampling
    )


def body(asked: pb.DecodeRequest, lender: str = "", approximately: bool = False) -> dict[str, object]:
    (call,) = calls_of(asked, "m", PROMPT, lender, approximately)
    return call.body


def test_each_option_is_named_so_that_no_default_of_the_server_fills_in() -> None:
    sent = body(request())
    expected = {"model": "m", "prompt": PROMPT, "max_tokens": 10, "stream": True, "temperature": 0.0, "top_p": 1.0}
    expected |= {"top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
    expected |= {"return_token_ids": True, "stream_options": {"include_usage": True}}
    assert sent == expected


def test_options_are_those_of_the_request() -> None:
    asked = request(
        n=3,
        seed=2**64 - 1,
        temperature=0.5,
        logprobs=2,
        stop_token_ids=[9],
        ignore_eos=True,
        min_tokens=4,
        logit_bias={7: -1.5},
        stop=["x"],
    )
    asked.cache_salt = "s"
    sent = body(asked, lender="http://p:8000")
    assert sent["n"] == 3
    assert sent["seed"] == 2**63 - 1
    assert sent["logprobs"] == 2
    assert sent["return_tokens_as_token_ids"]
    assert sent["stop_token_ids"] == [9]
    assert sent["ignore_eos"]
    assert sent["min_tokens"] == 4
    assert sent["logit_bias"] == {"7": -1.5}
    assert sent["cache_salt"] == "s"
    assert sent["kv_transfer_params"] == {"lender": "http://p:8000"}
    assert "stop" not in sent  # the router searches stop strings, over all servers of a stream


@pytest.mark.parametrize(
    ("form", "sent"),
    [
        ({"json_schema": "{}"}, {"json": "{}"}),
        ({"json_object": True}, {"json_object": True}),
        ({"regex": "a+"}, {"regex": "a+"}),
        ({"grammar": "root ::= 'a'"}, {"grammar": "root ::= 'a'"}),
        ({"choice": ["a", "b"]}, {"choice": ["a", "b"]}),
    ],
)
def test_structured_output(form: dict[str, object], sent: dict[str, object]) -> None:
    structured = public_pb.StructuredOutput(**form)  # type: ignore[arg-type]
    assert body(request(structured=structured))["structured_outputs"] == sent


def test_a_stream_goes_on_after_what_was_sent() -> None:
    asked = request(n=3, min_tokens=4)
    asked.emitted_token_ids.extend([1, 2, 3])
    asked.emitted_choices.add(index=2, token_ids=[8])
    asked.finished_choices.append(1)
    first, third = calls_of(asked, "m", PROMPT, "", False)
    assert (first.choice, first.body["prompt"], first.body["max_tokens"]) == (0, [*PROMPT, 1, 2, 3], 7)
    assert (third.choice, third.body["prompt"], third.body["max_tokens"]) == (2, [*PROMPT, 8], 9)
    assert (first.body["min_tokens"], third.body["min_tokens"]) == (1, 3)
    assert "n" not in first.body


@pytest.mark.parametrize(
    ("sampling", "field"),
    [
        ({"structured": public_pb.StructuredOutput(regex="a+")}, "sampling.structured"),
        ({"presence_penalty": 0.5}, "sampling.presence_penalty"),
        ({"frequency_penalty": 0.5}, "sampling.frequency_penalty"),
        ({"seed": 3, "temperature": 1.0}, "sampling.seed"),
    ],
)
def test_what_cannot_go_on_exactly_ends_or_goes_on_approximately(sampling: dict[str, object], field: str) -> None:
    asked = request(**sampling)
    body(asked)  # a new stream starts anywhere
    asked.emitted_token_ids.append(1)
    with pytest.raises(RevisionGone, match=field):
        body(asked)
    assert "structured_outputs" not in body(asked, approximately=True)


@pytest.mark.parametrize(
    "sampling",
    [
        {"repetition_penalty": 1.5},
        {"logit_bias": {3: 1.0}},
        {"seed": 3},
        {"logprobs": 1},
        {"min_p": 0.1, "temperature": 1.0},
    ],
)
def test_what_can_go_on_does(sampling: dict[str, object]) -> None:
    asked = request(**sampling)
    asked.emitted_token_ids.append(1)
    assert body(asked)["prompt"] == [*PROMPT, 1]


def test_what_a_stock_server_cannot_do_is_refused_by_name() -> None:
    embedding = request()
    embedding.embedding.SetInParent()
    with pytest.raises(InvalidRequest, match="embedding"):
        body(embedding)
    picture = request()
    picture.items.add()
    with pytest.raises(InvalidRequest, match="media"):
        body(picture)


CALL = Call({"stream": True}, None)


def read(text: str, **sampling: object) -> list[tuple[int, int, FinishReason | None]]:
    chunk = read_chunk(text.encode(), "server s")
    return [
        (each.choice, each.token_id, each.finish) for each in tokens_of(CALL, chunk, request(**sampling), "server s")
    ]


def test_tokens_of_chunks() -> None:
    text = '{"id":"x","choices":[{"index":1,"text":"ab","token_ids":[3,4],"finish_reason":"length","logprobs":null}]}'
    assert read(text) == [(1, 3, None), (1, 4, FinishReason.LENGTH)]
    assert read('{"choices":[],"usage":{"prompt_tokens":3,"completion_tokens":2,"total_tokens":5}}') == []


@pytest.mark.parametrize(
    ("text", "error", "reason"),
    [
        ('{"error":{"message":"engine died","code":500}}', Unavailable, "server s answered 500: engine died"),
        ('{"error":{"message":"bad regex","code":400}}', InvalidRequest, "bad regex"),
        ('{"choices":[{"index":0,"text":"a"}]}', Unavailable, "without token ids"),
        ('{"choices":[{"index":0,"text":"","token_ids":[],"finish_reason":"abort"}]}', Unavailable, "abort"),
        ('{"choices":[{"index":0,"token_ids":[3],"finish_reason":"error"}]}', Unavailable, "error"),
        ("no json", Unavailable, "no chunk"),
        ('{"choices":[{"index":0,"token_ids":[3]}]}', Unavailable, "log probabilities"),
    ],
)
def test_chunks_that_end_the_attempt(text: str, error: type[Exception], reason: str) -> None:
    with pytest.raises(error, match=reason):
        read(text, logprobs=1)


def test_log_probabilities() -> None:
    text = (
        '{"choices":[{"index":0,"text":"","token_ids":[3,4],"logprobs":{"token_logprobs":[-0.5,-1.0],"top_logprobs":'
        '[{"token_id:3":-0.5,"token_id:9":-2.0,"token_id:8":-1.5},{"token_id:7":-0.1,"token_id:4":-1.0}]}}]}'
    )
    first, second = tokens_of(CALL, read_chunk(text.encode(), ""), request(logprobs=2), "")
    assert first.logprobs == (-0.5, (3, 8), (-0.5, -1.5))
    assert second.logprobs == (-1.0, (7, 4), (-0.1, -1.0))


def test_log_probabilities_of_the_prompt_come_in_whole_answers() -> None:
    asked = request(prompt_logprobs=1)
    assert not body(asked)["stream"]
    text = (
        '{"choices":[{"index":0,"text":"","token_ids":[3],"prompt_logprobs":[null,{"6":{"logprob":-1.0,"rank":2},'
        '"4":{"logprob":-0.5,"rank":1}},{"7":{"logprob":-0.25,"rank":1}}]}]}'
    )
    scored = prompt_scores(read_chunk(text.encode(), ""), asked, PROMPT)
    assert scored.logprobs == ((-1.0, (4,), (-0.5,)), (-0.25, (7,), (-0.25,)))


@pytest.mark.parametrize("size", range(1, 20))
def test_events_come_in_pieces_of_any_size(size: int) -> None:
    wire = b'data: {"a":1}\n\n: a comment\n\ndata: {"b":2}\n\ndata: [DONE]\n\n'
    reader, events = EventReader(), []
    for start in range(0, len(wire), size):
        events += reader.feed(wire[start : start + size])
    assert events == [b'{"a":1}', b'{"b":2}', b"[DONE]"]
