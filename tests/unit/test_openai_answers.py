"""From our messages to OpenAI's: events of a stream, whole answers, errors."""

import asyncio
import json
import math
from collections.abc import AsyncGenerator, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.errors import (
    DeadlineExceeded,
    Draining,
    InvalidRequest,
    Overloaded,
    ServiceError,
    Unavailable,
    UnknownModel,
    UnknownRequest,
)
from protos import inference_pb2 as pb
from router.frontend.http.endpoint import merged
from router.frontend.http.errors import client_field, error_answer
from router.frontend.http.generation import PromptInfo
from router.frontend.openai.answers import ChatAnswer, CompletionAnswer, OpenAiAnswer
from router.frontend.openai.request import ApiRequest
from router.models.output.output_format import OutputFormat, OutputParser
from router.models.output.token_texts import TokenForm

STOP, LENGTH = pb.FINISH_REASON_STOP, pb.FINISH_REASON_LENGTH
CALL = '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'


def asked_for(num_prompts: int = 1, **options: Any) -> ApiRequest:
    sampling = pb.Sampling(**options.pop("sampling", {}))
    requests = [pb.GenerateRequest(sampling=sampling) for _ in range(num_prompts)]
    return ApiRequest("r", requests, {}, created=7, **options)


FORM = OutputFormat("hermes", "qwen3")


def form_of(token_id: int) -> TokenForm:
    return TokenForm.of(f"<{token_id}>".encode())


def answer_of(kind: type[OpenAiAnswer], asked: ApiRequest, echo: str = "", tools: bool = False) -> OpenAiAnswer:
    answer = kind(asked, "r")

    def new_parser() -> OutputParser | None:
        return FORM.parser(parses_calls=True) if tools else None

    for number in range(len(asked.requests)):
        answer.begin(number, PromptInfo("m", [1, 2], echo, form_of, new_parser, lambda: ["<1>", "<2>"]))
    return answer


def said(text: str, *token_ids: int, index: int = 0, logprobs: tuple[float, ...] = ()) -> pb.GenerateResponse:
    of = [pb.TokenLogprobs(logprob=one, top_token_ids=[9], top_logprobs=[-0.5]) for one in logprobs]
    return pb.GenerateResponse(text=text, token_ids=token_ids or [1], index=index, logprobs=of)


def end(
    reason: pb.FinishReason.ValueType = STOP, index: int = 0, stop: str = "", last: bool = True
) -> pb.GenerateResponse:
    finish = pb.Finish(reason=reason, stop_match=stop, usage=pb.Usage(completion_tokens=3))
    if last:
        finish.usage.prompt_tokens, finish.usage.cached_tokens = 2, 1
        finish.receipt.request_id = "r"
    return pb.GenerateResponse(index=index, finish=finish)


def events_of(answer: OpenAiAnswer, *messages: pb.GenerateResponse) -> list[Any]:
    """Of the only prompt; the last one is "[DONE]"."""
    stream = b"".join(answer.chunk(0, message) for message in messages).decode()
    assert stream.endswith("\n\n")
    events = stream[:-2].split("\n\n")
    assert all(event.startswith("data: ") for event in events)
    return [event if event == "data: [DONE]" else json.loads(event[6:]) for event in events]


def whole_of(answer: OpenAiAnswer, *messages: pb.GenerateResponse) -> Any:
    for message in messages:
        answer.absorb(0, message)
    return json.loads(answer.whole())


def test_the_events_of_a_chat_to_the_byte() -> None:
    answer = answer_of(ChatAnswer, asked_for(stream=True))
    top = b'data: {"id":"chatcmpl-r","object":"chat.completion.chunk","created":7,"model":"m","choices":[{"index":0,'
    rest = b',"logprobs":null,"finish_reason":null}]}\n\n'
    assert answer.chunk(0, said('a "b"\n\u2028')) == (
        top + b'"delta":{"role":"assistant","content":""}' + rest
        + top + b'"delta":{"content":"a \\"b\\"\\n\\u2028"}' + rest
    )  # fmt: skip
    finish = b'"delta":{},"logprobs":null,"finish_reason":"length","stop_reason":null}]}\n\n'
    assert answer.chunk(0, end(LENGTH)) == top + finish + b"data: [DONE]\n\n"


def test_a_stream_ends_with_usage_and_receipt() -> None:
    answer = answer_of(CompletionAnswer, asked_for(stream=True, include_usage=True, receipt=True))
    *events, usage, done = events_of(answer, said("a", 1, 2), end())
    assert done == "data: [DONE]"
    assert [event["usage"] for event in events] == [None, None]
    assert usage["choices"] == []
    assert usage["usage"] == {
        "prompt_tokens": 2, "completion_tokens": 3, "total_tokens": 5, "prompt_tokens_details": {"cached_tokens": 1},
    }  # fmt: skip
    assert usage["tandem"]["request_id"] == "r"
    without = events_of(answer_of(CompletionAnswer, asked_for(stream=True, receipt=True)), said("a"), end())
    assert [("tandem" in event, event["choices"][0]["finish_reason"]) for event in without[:-1]] == [
        (False, None),
        (True, "stop"),
    ]


def test_usage_in_every_event() -> None:
    asked = asked_for(stream=True, include_usage=True, continuous_usage=True)
    *events, last, _ = events_of(answer_of(CompletionAnswer, asked), said("a", 1, 2), said("b", 3), end())
    so_far = [event["usage"] and event["usage"]["completion_tokens"] for event in events]
    assert so_far == [2, 3, 3]
    assert events[0]["usage"] == {"prompt_tokens": 2, "total_tokens": 4, "completion_tokens": 2}
    assert last["usage"]["completion_tokens"] == 3
    role, *_ = events_of(answer_of(ChatAnswer, asked), said("a", 1), end())
    assert role["usage"] == {"prompt_tokens": 2, "total_tokens": 2, "completion_tokens": 0}


@pytest.mark.parametrize(("match", "reason"), [("end", "end"), ("17", 17), ("", None)])
def test_what_stopped_it(match: str, reason: Any) -> None:
    asked = asked_for(sampling={"stop": ["end"], "stop_token_ids": [17]})
    assert whole_of(answer_of(ChatAnswer, asked), said("a"), end(stop=match))["choices"][0]["stop_reason"] == reason


def test_choices_are_counted_together() -> None:
    messages = [said("b", index=1), end(index=1, last=False), said("a"), end(LENGTH)]
    sampling = {"n": 2}
    whole = whole_of(answer_of(CompletionAnswer, asked_for(sampling=sampling)), *messages)
    assert [(one["text"], one["finish_reason"]) for one in whole["choices"]] == [("a", "length"), ("b", "stop")]
    assert (whole["usage"]["prompt_tokens"], whole["usage"]["completion_tokens"]) == (2, 6)
    *events, _ = events_of(answer_of(CompletionAnswer, asked_for(sampling=sampling, stream=True)), *messages)
    assert [event["choices"][0]["index"] for event in events] == [1, 1, 0, 0]


def test_log_probabilities_of_both_kinds() -> None:
    messages = [said("<3><4>", 3, 4, logprobs=(-1.0, -math.inf)), end()]
    options: Any = {"token_ids": True}
    chat = whole_of(answer_of(ChatAnswer, asked_for(**options)), *messages)["choices"][0]
    entry = {"token": "<9>", "logprob": -0.5, "bytes": [60, 57, 62]}
    assert chat["logprobs"]["content"][0] == {
        "token": "<3>", "logprob": -1.0, "bytes": [60, 51, 62], "top_logprobs": [entry],
    }  # fmt: skip
    assert (chat["token_ids"], chat["prompt_token_ids"]) == ([3, 4], [1, 2])
    text = whole_of(answer_of(CompletionAnswer, asked_for(**options), echo="seen"), *messages)["choices"][0]
    assert text["text"] == "seen<3><4>"
    assert text["logprobs"] == {
        "tokens": ["<3>", "<4>"],
        "token_logprobs": [-1.0, -9999.0],
        "top_logprobs": [{"<9>": -0.5, "<3>": -1.0}, {"<9>": -0.5, "<4>": -9999.0}],
        "text_offset": [4, 7],
    }
    streamed = events_of(answer_of(CompletionAnswer, asked_for(stream=True, **options), echo="seen"), *messages)
    assert [event["choices"][0]["text"] for event in streamed[:-1]] == ["seen", "<3><4>", ""]
    assert streamed[1]["choices"][0]["logprobs"] == text["logprobs"]
    assert streamed[1]["choices"][0]["token_ids"] == [3, 4]
    assert streamed[2]["choices"][0]["prompt_token_ids"] == [1, 2]


def test_echoed_log_probabilities_begin_with_the_prompts() -> None:
    scored = [pb.TokenLogprobs(logprob=-3.0, top_token_ids=[5], top_logprobs=[-0.25])]
    messages = [pb.GenerateResponse(prompt_logprobs=scored), said("<3>", 3, logprobs=(-1.0,)), end()]
    options: Any = {"echo": True, "echo_logprobs": True}
    whole = whole_of(answer_of(CompletionAnswer, asked_for(**options), echo="<1><2>"), *messages)
    assert whole["choices"][0]["text"] == "<1><2><3>"
    assert whole["choices"][0]["logprobs"] == {
        "tokens": ["<1>", "<2>", "<3>"],
        "token_logprobs": [None, -3.0, -1.0],
        "top_logprobs": [None, {"<5>": -0.25, "<2>": -3.0}, {"<9>": -0.5, "<3>": -1.0}],
        "text_offset": [0, 3, 6],
    }
    only = whole_of(answer_of(CompletionAnswer, asked_for(only_echo=True, **options), echo="<1><2>"), *messages)
    assert only["choices"][0]["text"] == "<1><2>"
    assert only["choices"][0]["logprobs"]["token_logprobs"] == [None, -3.0]
    assert (only["choices"][0]["finish_reason"], only["usage"]["completion_tokens"]) == ("length", 0)


def test_prompt_log_probabilities() -> None:
    scored = [pb.TokenLogprobs(logprob=-3.0, top_token_ids=[5], top_logprobs=[-0.25])]
    messages = [pb.GenerateResponse(prompt_logprobs=scored), said("a"), end()]
    whole = whole_of(answer_of(CompletionAnswer, asked_for()), *messages)
    assert whole["choices"][0]["prompt_logprobs"] == [
        None,
        {
            "5": {"logprob": -0.25, "rank": 1, "decoded_token": "<5>"},
            "2": {"logprob": -3.0, "rank": None, "decoded_token": "<2>"},
        },
    ]


def test_calls_of_tools() -> None:
    messages = [said("Let me see."), said(" \n" + CALL[:20]), said(CALL[20:]), said(CALL), end()]
    *events, _ = events_of(answer_of(ChatAnswer, asked_for(stream=True), tools=True), *messages)
    deltas = [event["choices"][0]["delta"] for event in events]
    assert deltas[:2] == [{"role": "assistant", "content": ""}, {"content": "Let me see."}]
    calls = [call for delta in deltas for call in delta.get("tool_calls", ())]
    assert [(call["index"], call["function"]) for call in calls] == [
        (place, {"name": "f", "arguments": '{"a": 1}'}) for place in (0, 1)
    ]
    assert len({call["id"] for call in calls}) == 2
    assert events[-1]["choices"][0]["finish_reason"] == "tool_calls"
    choice = whole_of(answer_of(ChatAnswer, asked_for(), tools=True), *messages)["choices"][0]
    assert choice["message"]["content"] == "Let me see."
    assert [call["function"]["name"] for call in choice["message"]["tool_calls"]] == ["f", "f"]
    assert choice["finish_reason"] == "tool_calls"
    plain = whole_of(answer_of(ChatAnswer, asked_for()), said(CALL), end())["choices"][0]
    assert plain["message"] == {"role": "assistant", "content": CALL, "refusal": None}
    cut_off = whole_of(answer_of(ChatAnswer, asked_for(), tools=True), said(CALL[:20]), end(LENGTH))["choices"][0]
    assert (cut_off["message"]["content"], cut_off["finish_reason"]) == (CALL[:20], "length")


def test_reasoning_is_apart_from_the_text() -> None:
    messages = [said("<think>"), said("Hm", 5, 6), said(" so"), said("</think>"), said("\n\nYes."), end()]
    *events, _ = events_of(answer_of(ChatAnswer, asked_for(stream=True, include_usage=True), tools=True), *messages)
    deltas = [event["choices"][0]["delta"] for event in events[:-1]]
    assert "".join(delta.get("reasoning_content", "") for delta in deltas) == "Hm so"
    assert "".join(delta.get("content", "") for delta in deltas) == "Yes."
    whole = whole_of(answer_of(ChatAnswer, asked_for(), tools=True), *messages)
    message = whole["choices"][0]["message"]
    assert (message["reasoning_content"], message["reasoning"], message["content"]) == ("Hm so", "Hm so", "Yes.")
    assert whole["usage"]["completion_tokens_details"] == {"reasoning_tokens": 5}
    hidden = whole_of(answer_of(ChatAnswer, asked_for(include_reasoning=False), tools=True), *messages)
    assert "reasoning_content" not in hidden["choices"][0]["message"]


@given(st.lists(st.text(st.characters(exclude_categories=["Cs"]), max_size=5), min_size=1, max_size=10), st.booleans())
def test_any_text_comes_through_as_it_is(pieces: list[str], tools: bool) -> None:
    messages = [said(piece) for piece in pieces]
    *events, _ = events_of(answer_of(ChatAnswer, asked_for(stream=True), tools=tools), *messages, end())
    text = "".join(pieces)
    assert "".join(event["choices"][0]["delta"].get("content", "") for event in events) == text
    whole = whole_of(answer_of(ChatAnswer, asked_for(), tools=tools), *messages, end())
    assert whole["choices"][0]["message"]["content"] == text


# --------------------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("error", "status", "code", "param", "retry_after"),
    [
        (InvalidRequest("sampling.max_tokens", "too many"), 400, "invalid_value", "max_completion_tokens", None),
        (InvalidRequest("sampling.structured.regex", "bad"), 400, "invalid_value", "response_format", None),
        (InvalidRequest("", "bad"), 400, "invalid_value", None, None),
        (UnknownModel("none", "model"), 404, "model_not_found", "model", None),
        (UnknownRequest("none", "response_id"), 404, "not_found", "response_id", None),
        (Overloaded("later", retry_after_s=2.5), 429, "rate_limit_exceeded", None, "3"),
        (Overloaded("later", retry_after_s=math.inf), 429, "rate_limit_exceeded", None, "1"),
        (Overloaded("never", "max_tokens", permanent=True), 400, "request_too_large", "max_completion_tokens", None),
        (Unavailable("nobody"), 503, "unavailable", None, "1"),
        (Draining("stopping"), 503, "unavailable", None, "1"),
        (DeadlineExceeded("late"), 504, "deadline_exceeded", None, None),
        (ServiceError("broken"), 500, "internal_error", None, None),
    ],
)
def test_errors(error: ServiceError, status: int, code: str, param: str | None, retry_after: str | None) -> None:
    answer = error_answer(error, {"max_tokens": "max_completion_tokens", "structured": "response_format"})
    body = json.loads(answer.body)["error"]
    assert (answer.status, body["code"], body["param"]) == (status, code, param)
    assert answer.headers.get("retry-after") == retry_after
    assert error.message in body["message"]


def test_fields_have_their_clients_names() -> None:
    names = {"text": "prompt", "request_id": "x-request-id"}
    assert client_field("text", names) == "prompt"
    assert client_field("messages[0].content", names) == "messages[0].content"
    assert client_field("response_format.type", names) == "response_format.type"
    assert client_field("sampling.structured", names) == "structured"


# -------------------------------------------------------------------------------------------------- merging


async def _counting(
    name: bytes, count: int, ended: list[bytes], fails: bool = False
) -> AsyncGenerator[Sequence[bytes]]:
    try:
        for number in range(count):
            await asyncio.sleep(0)
            yield [name + b"%d" % number]
        if fails:
            raise Unavailable("gone")
    finally:
        ended.append(name)


async def test_streams_are_merged_each_in_its_order() -> None:
    ended: list[bytes] = []
    got = [
        item async for item in merged([_counting(b"a", 5, ended), _counting(b"b", 0, ended), _counting(b"c", 9, ended)])
    ]
    assert [message for number, (message,) in got if number == 0] == [b"a%d" % count for count in range(5)]
    assert [message for number, (message,) in got if number == 2] == [b"c%d" % count for count in range(9)]
    assert sorted(ended) == [b"a", b"b", b"c"]


@pytest.mark.parametrize("num_streams", [1, 3])
async def test_one_that_fails_ends_all_and_so_does_closing(num_streams: int) -> None:
    ended: list[bytes] = []
    streams = [_counting(b"%d" % number, 1000, ended) for number in range(num_streams - 1)]
    with pytest.raises(Unavailable):
        async for _ in merged([*streams, _counting(b"f", 3, ended, fails=True)]):
            pass
    assert len(ended) == num_streams
    ended.clear()
    messages = merged([_counting(b"%d" % number, 1000, ended) for number in range(num_streams)])
    await anext(messages)
    await messages.aclose()
    assert len(ended) == num_streams, "those that had begun are closed, and all had"
