"""From OpenAI's bodies to ours: each field, each refusal."""

import json
from collections.abc import Callable
from typing import Any

import pytest

from cluster.errors import InvalidRequest
from protos import inference_pb2 as pb
from router.frontend.anthropic.messages import read_prompt
from router.frontend.http.body.fields import MAX_IGNORED, REFUSED, IgnoredFields, parse_object
from router.frontend.http.errors import Caller, caller_of
from router.frontend.openai.chat import read_chat
from router.frontend.openai.completions import read_completion
from router.frontend.openai.request import ApiRequest
from router.frontend.openai.responses.responses import read_response
from router.security.api_keys import ApiKeys
from support.refusals import refusal_of

CALLER = Caller("somebody", "r-1")
USER: Any = {"role": "user", "content": "hello"}
TOOL: Any = {"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object"}}}


def completion(**body: Any) -> ApiRequest:
    return read_completion({"model": "m", "prompt": "hello"} | body, CALLER)


def chat(**body: Any) -> ApiRequest:
    return read_chat({"model": "m", "messages": [USER]} | body, CALLER)


def sampling_of(asked: ApiRequest) -> pb.Sampling:
    (request,) = asked.requests
    return request.sampling


def test_a_completion_with_everything() -> None:
    asked = completion(
        max_tokens=5, temperature=0.5, top_p=0.9, top_k=-1, min_p=0.1, seed=-1, n=2, stop="end", stop_token_ids=[7],
        logit_bias={"3": -100}, presence_penalty=1, frequency_penalty=-1, repetition_penalty=1.1, min_tokens=2,
        ignore_eos=True, logprobs=4, prompt_logprobs=1, priority=3, cache_salt="s", session_id="t", max_ttft_ms=9,
        prompt_cache_key="k", timeout_ms=1500, receipt=True, return_token_ids=True, echo=False, user="u",
        metadata={"a": "b"},
    )  # fmt: skip
    (request,) = asked.requests
    expected = pb.Sampling(
        max_tokens=5, temperature=0.5, top_p=0.9, top_k=0, min_p=0.1, seed=2**64 - 1, n=2, stop=["end"],
        stop_token_ids=[7], logit_bias={3: -100.0}, presence_penalty=1, frequency_penalty=-1, repetition_penalty=1.1,
        min_tokens=2, ignore_eos=True, logprobs=4, prompt_logprobs=1,
    )  # fmt: skip
    assert request == pb.GenerateRequest(
        model="m", text="hello", sampling=expected, priority=-3, tenant="somebody", session_id="t", request_id="r-1",
        cache_salt="s", max_ttft_ms=9.0, prompt_cache_key="k",
    )  # fmt: skip
    assert (asked.deadline_s, asked.receipt, asked.token_ids, asked.choices_per_prompt) == (1.5, True, True, 2)


def test_defaults_are_those_of_openai() -> None:
    assert sampling_of(completion()) == pb.Sampling(max_tokens=16)
    assert sampling_of(chat()) == pb.Sampling(), "the router's own"
    assert sampling_of(completion(temperature=None, n=None, stop=None)) == pb.Sampling(max_tokens=16)


@pytest.mark.parametrize(
    ("prompt", "expected"), [("a", ["a"]), (["a", "b"], ["a", "b"]), ([1, 2], [[1, 2]]), ([[1, 2], [3]], [[1, 2], [3]])]
)
def test_prompts_in_their_four_forms(prompt: Any, expected: list[Any]) -> None:
    asked = completion(prompt=prompt)
    assert [list(one.token_ids) or one.text for one in asked.requests] == expected
    suffixes = [""] if len(expected) == 1 else ["-0", "-1"]
    assert [one.request_id for one in asked.requests] == [f"r-1{suffix}" for suffix in suffixes]


def test_a_chat_with_tools_and_their_answers() -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    messages = [
        {"role": "developer", "content": [{"type": "text", "text": "be "}, {"type": "text", "text": "brief"}]},
        USER | {"name": "ann"},
        {"role": "assistant", "content": None, "tool_calls": [call], "refusal": None, "annotations": []},
        {"role": "tool", "tool_call_id": "c1", "content": "2"},
    ]
    asked = chat(messages=messages, tools=[TOOL], tool_choice="auto", chat_template_kwargs={"enable_thinking": False})
    (request,) = asked.requests
    assert list(request.messages) == [
        pb.ChatMessage(role="developer", content="be brief"),
        pb.ChatMessage(role="user", content="hello", name="ann"),
        pb.ChatMessage(role="assistant", tool_calls=[pb.ToolCall(id="c1", name="f", arguments='{"a": 1}')]),
        pb.ChatMessage(role="tool", tool_call_id="c1", content="2"),
    ]
    assert [json.loads(tool) for tool in request.tools] == [TOOL]
    assert json.loads(request.chat_template_kwargs) == {"enable_thinking": False}
    assert request.parse_output


def test_null_content_of_an_assistant_and_of_a_tool_is_empty() -> None:
    """Agents send it after refusals and for empty results, in all three APIs."""
    said = {"role": "assistant", "content": None}
    result = {"role": "tool", "tool_call_id": "c1", "content": None}
    expected = [
        pb.ChatMessage(role="user", content="hello"),
        pb.ChatMessage(role="assistant"),
        pb.ChatMessage(role="tool", tool_call_id="c1"),
    ]
    assert list(chat(messages=[USER, said, result]).requests[0].messages) == expected
    output = {"type": "function_call_output", "call_id": "c1", "output": None}
    response = read_response({"input": [USER, said, output]}, CALLER)
    assert list(response.requests[0].messages) == expected
    block = {"type": "tool_result", "tool_use_id": "c1", "content": None}
    turns = [USER, said, {"role": "user", "content": [block]}]
    assert list(read_prompt({"messages": turns}, CALLER)[0].messages) == expected


@pytest.mark.parametrize("role", ["user", "system", "developer"])
def test_null_content_of_anybody_else_is_refused(role: str) -> None:
    for read, name in ((read_chat, "messages[0]"), (read_response, "input[0]")):
        with refusal_of(f"{name}.content"):
            read({name.partition("[")[0]: [{"role": role, "content": None}]}, CALLER)


def test_what_tool_choice_does() -> None:
    def read(**body: Any) -> tuple[str, bool]:
        (request,) = chat(tools=[TOOL], **body).requests
        return request.tool_choice, request.single_tool_call

    assert read(tool_choice="none") == ("none", False)
    assert read(parallel_tool_calls=False) == ("", True)
    assert read(tool_choice="required", parallel_tool_calls=True) == ("required", False)
    named = {"type": "function", "function": {"name": "f"}}
    assert read(tool_choice=named) == ("f", False)
    assert chat(tools=[TOOL], tool_choice=named).names["structured"] == "tools"


def test_reasoning_of_earlier_turns_and_the_effort_of_this_one() -> None:
    said = {"role": "assistant", "content": "2", "reasoning_content": "1 + 1", "reasoning": "1 + 1"}
    (request,) = chat(messages=[USER, said, USER], reasoning_effort="low").requests
    assert request.messages[1] == pb.ChatMessage(role="assistant", content="2", reasoning="1 + 1")
    assert request.reasoning_effort == "low"


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "json_object"}}, pb.StructuredOutput(json_object=True)),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "null"}}}},
            pb.StructuredOutput(json_schema='{"type": "null"}'),
        ),
        ({"structured_outputs": {"json": "{}"}}, pb.StructuredOutput(json_schema="{}")),
        (
            {"structured_outputs": {"json": {"type": "null"}, "disable_any_whitespace": True}},
            pb.StructuredOutput(json_schema='{"type": "null", "x-guidance": {"whitespace_flexible": false}}'),
        ),
        ({"structured_outputs": {"choice": ["a", "b"]}}, pb.StructuredOutput(choice=["a", "b"])),
        ({"guided_regex": "a+"}, pb.StructuredOutput(regex="a+")),
        ({"guided_grammar": "start: x"}, pb.StructuredOutput(grammar="start: x")),
        ({"guided_json": {"type": "null"}}, pb.StructuredOutput(json_schema='{"type": "null"}')),
    ],
)
def test_forms_of_the_output(given: dict[str, Any], expected: pb.StructuredOutput | None) -> None:
    sampling = sampling_of(chat(**given))
    assert (sampling.structured if sampling.HasField("structured") else None) == expected


BAD_CHATS: list[tuple[str, dict[str, Any]]] = [
    ("messages", {"messages": []}),
    ("messages[0]", {"messages": ["hello"]}),
    ("messages[0].role", {"messages": [{"content": "x"}]}),
    ("messages[0].role", {"messages": [{"role": "critic", "content": "x"}]}),
    ("messages[0].content", {"messages": [{"role": "user"}]}),
    ("messages[0].content[1].type", {"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}, {}]}]}),
    ("messages[0].tool_call_id", {"messages": [{"role": "tool", "content": "x"}]}),
    ("messages[0].tool_calls[0].function", {"messages": [{"role": "assistant", "tool_calls": [{"id": "1"}]}]}),
    ("messages[0].audio", {"messages": [{"role": "assistant", "content": "x", "audio": {"id": "1"}}]}),
    ("tools[0].type", {"tools": [{}]}),
    ("tools[0].function.name", {"tools": [{"type": "function", "function": {}}]}),
    ("tools[0].function.parameters", {"tools": [{"type": "function", "function": {"name": "f", "parameters": "x"}}]}),
    ("tool_choice", {"tool_choice": "required"}),
    ("tool_choice", {"tools": [TOOL], "tool_choice": "often"}),
    ("top_logprobs", {"top_logprobs": 2}),
    ("logprobs", {"logprobs": 2}),
    ("max_completion_tokens", {"max_tokens": 1, "max_completion_tokens": 2}),
    ("functions", {"functions": [{"name": "f"}]}),
    ("modalities", {"modalities": ["text", "audio"]}),
    ("response_format.type", {"response_format": {"type": "yaml"}}),
    ("response_format.json_schema", {"response_format": {"type": "json_schema"}}),
    ("response_format.json_schema.schema", {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}}),
    ("structured_outputs", {"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}}),
    (
        "structured_outputs.disable_any_whitespace",
        {"structured_outputs": {"regex": "a", "disable_any_whitespace": True}},
    ),
    ("structured_outputs.whitespace_pattern", {"structured_outputs": {"regex": "a", "whitespace_pattern": "b"}}),
]


@pytest.mark.parametrize(("field", "change"), BAD_CHATS)
def test_a_bad_chat_names_its_field(field: str, change: dict[str, Any]) -> None:
    with refusal_of(field):
        chat(**change)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", "5"),
        ("max_tokens", True),
        ("max_tokens", 2**31),
        ("temperature", "hot"),
        ("temperature", 10**400),
        ("seed", 2**63),
        ("stop[0]", [1]),
        ("stop_token_ids[0]", [-1]),
        ("logit_bias", {"x": 1}),
        ("logit_bias", {"١": 1}),
        ("logit_bias", {"1": "x"}),
        ("logprobs", True),
        ("stream", 1),
        ("prompt", None),
        ("prompt", []),
        ("prompt", ["a", 1]),
        ("prompt", [[1], []]),
        ("prompt", ["a"] * 257),
        ("n", 2000),
        ("priority", -(2**31)),
        ("timeout_ms", 0),
        ("stream_options", {"include_usage": True}),
        ("best_of", 2),
        ("suffix", "x"),
        ("echo", "x"),
    ],
)
def test_a_bad_completion_names_its_field(field: str, value: Any) -> None:
    with refusal_of(field):
        completion(**{field.partition("[")[0]: value})


def test_a_prompt_may_be_scored_and_nothing_said() -> None:
    asked = completion(prompt=[1, 2], echo=True, logprobs=3, max_tokens=0)
    sampling = sampling_of(asked)
    assert (sampling.prompt_logprobs, sampling.logprobs, sampling.max_tokens) == (3, 3, 1)
    assert asked.echo
    assert asked.echo_logprobs
    assert asked.only_echo
    for options in ({"logprobs": 0}, {"max_tokens": 0}):
        with pytest.raises(InvalidRequest, match="echo: cannot be streamed with logprobs or max_tokens 0"):
            completion(echo=True, stream=True, **options)


def test_what_asks_for_nothing_is_accepted() -> None:
    for name, values in REFUSED.items():
        for value in values:
            completion(**{name: value})


@pytest.mark.parametrize("read", [completion, chat])
def test_what_is_not_known_is_ignored_and_named(read: Callable[..., ApiRequest]) -> None:
    body = {
        "model": "m",
        "prompt": "a",
        "messages": [USER | {"mood": "good"}] * 2,
        "user": "u",
        "verbosity": "low",
        "\n": 1,
    }
    body.pop("messages" if read is completion else "prompt")
    reader = read_completion if read is completion else read_chat
    ignored = IgnoredFields()
    reader(body, CALLER, ignored)
    own = [] if read is completion else ["messages[].mood"]
    assert list(ignored.names) == [*own, "user", "verbosity"]
    with pytest.raises(InvalidRequest, match="is not supported"):
        reader(body, CALLER, IgnoredFields(strict=True))


def test_only_so_many_ignored_fields_are_named() -> None:
    ignored = IgnoredFields()
    read_completion({"prompt": "a"} | {f"x{number}": 1 for number in range(100)}, CALLER, ignored)
    assert len(ignored.names) == MAX_IGNORED


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"1",
        b'{"a": NaN}',
        b'{"a": "\\ud800"}',
        b'{"\\uDfff": 1}',
        b"\xff",
        b"[" * 100_000,
        b"9" * 5000,
    ],
)
def test_a_body_that_is_no_object(body: bytes) -> None:
    with pytest.raises(InvalidRequest):
        parse_object(body, 1000)


def test_pairs_of_surrogates_are_characters() -> None:
    assert parse_object(b'{"a": "\\ud83d\\ude00"}', 1000) == {"a": "\U0001f600"}


def test_who_asks() -> None:
    assert caller_of({"x-tenant": "t", "x-request-id": "r"}, ApiKeys()) == Caller("t", "r")
    assert caller_of({}, ApiKeys()).request_id != caller_of({}, ApiKeys()).request_id
    for header, value in (("x-tenant", "x" * 257), ("x-request-id", "a\tb"), ("x-request-id", "é")):
        with refusal_of(header):
            caller_of({header: value}, ApiKeys())


@pytest.mark.parametrize("name", ["a\r\nset-cookie: b", "é", "\x00", "x" * 257, "😀"])
def test_a_request_id_that_is_no_header_is_refused(name: str) -> None:
    """It comes back as one: a line's end in it would begin another."""
    with refusal_of("request_id"):
        read_completion({"prompt": "a", "request_id": name}, CALLER)


def test_a_prompt_cache_key_is_read_by_each_api() -> None:
    for asked in (
        completion(prompt_cache_key="k"),
        chat(prompt_cache_key="k"),
        read_response({"model": "m", "input": "hello", "prompt_cache_key": "k"}, CALLER),
    ):
        assert [request.prompt_cache_key for request in asked.requests] == ["k"]
    with refusal_of("prompt_cache_key"):
        completion(prompt_cache_key=3)
