"""Tool calls in answers: streamed as they come, equal to the whole answer, and marked where they are cut off."""

import json
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai.types import responses
from pydantic import TypeAdapter

from cluster.errors import InvalidRequest
from protos import inference_pb2 as pb
from router.frontend.anthropic.answer import MessagesAnswer
from router.frontend.anthropic.messages import read_messages
from router.frontend.http.errors import Caller
from router.frontend.http.generation import Answer, PromptInfo
from router.frontend.openai.answers import ChatAnswer
from router.frontend.openai.chat import read_chat
from router.frontend.openai.responses.responses import read_response
from router.frontend.openai.responses.responses_answer import ResponsesAnswer
from router.models.grammars.grammar_checker import ReasoningMarks
from router.models.output.output_format import OutputFormat
from router.models.output.output_plan import OutputPlan, PromptEnd, plan_output
from router.models.output.token_texts import TokenForm
from router.models.prompts.chat_template import check_chat_fields
from router.request_path.parsed_stream import OutputParts

CALLER = Caller("", "r")
FORM = OutputFormat("hermes", "qwen3")
TOOLS = [json.dumps({"type": "function", "function": {"name": name}}) for name in ("f", "patch")]
USER: Any = [{"role": "user", "content": "hi"}]
STOP, LENGTH = pb.FINISH_REASON_STOP, pb.FINISH_REASON_LENGTH
F = '<tool_call>\n{"name": "f", "arguments": {"a": "bé{", "c": [1, 2]}}\n</tool_call>'
PATCH = '<tool_call>\n{"name": "patch", "arguments": {"input": "one\\ntwo"}}\n</tool_call>'
TEXT = f"<think>Hm</think>Let me see.\n{F}\n{PATCH}"
CUT = '<tool_call>\n{"name": "f", "arguments": {"a": "bé{", "c": [1, "un'
AT_CUT = '{"a": "bé{", "c": [1, "un'


def messages_of(pieces: Sequence[str], reason: pb.FinishReason.ValueType, stop: str) -> list[pb.GenerateResponse]:
    finish = pb.Finish(reason=reason, stop_match=stop, receipt=pb.Receipt(request_id="r"))
    return [*(pb.GenerateResponse(text=piece, token_ids=[1]) for piece in pieces), pb.GenerateResponse(finish=finish)]


def served() -> PromptInfo:
    return PromptInfo("m", [1], "", lambda token_id: TokenForm.of(b"x"), lambda: FORM.parser(True, tools=TOOLS))


def both(
    make: Callable[[], Answer], pieces: Sequence[str], reason: pb.FinishReason.ValueType, stop: str = ""
) -> tuple[Any, list[Any]]:
    """The whole answer, and the events of a stream."""
    whole, stream, events = make(), make(), b""
    for answer in (whole, stream):
        answer.begin(0, served())
    for message in messages_of(pieces, reason, stop):
        events += stream.chunk(0, message)
        whole.absorb(0, message)
    lines = [line[6:] for line in events.decode().split("\n") if line.startswith("data: ")]
    return json.loads(whole.whole()), [json.loads(line) for line in lines if line != "[DONE]"]


def chat() -> ChatAnswer:
    return ChatAnswer(read_chat({"messages": USER, "stop": "halt"}, CALLER), "r")


def message() -> MessagesAnswer:
    body = {"messages": USER, "max_tokens": 5, "stop_sequences": ["halt"]}
    return MessagesAnswer(read_messages(body, CALLER), "r")


def response() -> ResponsesAnswer:
    tools = [{"type": "custom", "name": "patch"}, {"type": "function", "name": "f"}]
    return ResponsesAnswer(read_response({"input": "hi", "tools": tools}, CALLER), "0" * 32)


def chat_calls(events: list[Any]) -> list[tuple[str, str]]:
    """Name and arguments of each call, put together as clients do."""
    calls: list[list[str]] = []
    ids = []
    for event in events:
        for call in event["choices"][0]["delta"].get("tool_calls", ()):
            if call["index"] == len(calls):
                calls.append([call["function"]["name"], ""])
                ids.append(call["id"])
            else:
                assert set(call) == {"index", "function"}
            calls[call["index"]][1] += call["function"]["arguments"]
    assert len(set(ids)) == len(ids)
    return [(name, arguments) for name, arguments in calls]


@given(st.data())
def test_a_stream_is_the_whole_answer_however_it_is_cut(data: st.DataObject) -> None:
    text, reason = TEXT, STOP
    if data.draw(st.booleans()):
        text, reason = TEXT[: data.draw(st.integers(0, len(TEXT)))], LENGTH
    cuts = sorted(data.draw(st.sets(st.integers(0, len(text)), max_size=12)))
    pieces = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]

    whole, events = both(chat, pieces, reason)
    (choice,) = whole["choices"]
    called = [
        (call["function"]["name"], call["function"]["arguments"]) for call in choice["message"].get("tool_calls", ())
    ]
    assert chat_calls(events) == called
    assert events[-1]["choices"][0]["finish_reason"] == choice["finish_reason"]
    assert choice["finish_reason"] == ("tool_calls" if reason == STOP else "length")

    whole, events = both(message, pieces, reason)
    blocks: list[Any] = []
    for event in events:
        if event["type"] == "content_block_start":
            blocks.append(event["content_block"] | {"json": ""})
        elif event["type"] == "content_block_delta" and event["delta"]["type"] == "input_json_delta":
            blocks[-1]["json"] += event["delta"]["partial_json"]
    assert [block["type"] for block in blocks] == [block["type"] for block in whole["content"]]
    for block, expected in zip(blocks, whole["content"], strict=True):
        if block["type"] == "tool_use" and block["json"].endswith("}"):
            assert json.loads(block["json"]) == expected["input"]
    assert whole["stop_reason"] == ("tool_use" if reason == STOP else "max_tokens")

    whole, events = both(response, pieces, reason)
    adapter: TypeAdapter[Any] = TypeAdapter(responses.ResponseStreamEvent)
    for event in events:
        adapter.validate_python(event)
    assert responses.Response.model_validate(events[-1]["response"]).status == whole["status"]
    built: dict[int, str] = {}
    for event in events:
        if event["type"] in ("response.function_call_arguments.delta", "response.custom_tool_call_input.delta"):
            built[event["output_index"]] = built.get(event["output_index"], "") + event["delta"]
    items = {place: item for place, item in enumerate(whole["output"]) if item["type"].endswith("_call")}
    assert built == {place: item["input" if "input" in item else "arguments"] for place, item in items.items()}
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert [item["status"] for item in done] == [item["status"] for item in whole["output"]]


def test_arguments_leave_before_their_call_is_complete() -> None:
    answers: list[Answer] = [chat(), message(), response()]
    for answer in answers:
        answer.begin(0, served())
        answer.chunk(0, pb.GenerateResponse(text='<tool_call>\n{"name": "f", "arguments": ', token_ids=[1]))
        first = answer.chunk(0, pb.GenerateResponse(text='{"a": "b', token_ids=[1])).decode()
        assert '"name":"f"' in first
        assert '{\\"a\\": \\"b' in first
        second = answer.chunk(0, pb.GenerateResponse(text="cd", token_ids=[1])).decode()
        assert '"cd"' in second
        assert '"f"' not in second


@pytest.mark.parametrize(
    ("reason", "stop", "in_chat", "in_message", "in_response"),
    [
        (LENGTH, "", "length", ("max_tokens", None), "incomplete"),
        (STOP, "halt", "stop", ("stop_sequence", "halt"), "completed"),
        (STOP, "", "stop", ("end_turn", None), "completed"),
    ],
)
def test_a_call_that_is_cut_off_is_not_announced_as_whole(
    reason: pb.FinishReason.ValueType, stop: str, in_chat: str, in_message: Any, in_response: str
) -> None:
    pieces = [CUT[:45], CUT[45:]]
    whole, events = both(chat, pieces, reason, stop)
    assert events[-1]["choices"][0]["finish_reason"] == whole["choices"][0]["finish_reason"] == in_chat
    assert chat_calls(events) == [("f", AT_CUT)]
    assert whole["choices"][0]["message"]["tool_calls"][0]["function"]["arguments"] == AT_CUT
    whole, events = both(message, pieces, reason, stop)
    assert (whole["stop_reason"], whole["stop_sequence"]) == in_message
    assert events[-2]["delta"] == {"stop_reason": in_message[0], "stop_sequence": in_message[1]}
    assert whole["content"][0]["input"] == {"a": "bé{", "c": [1]}, "as Anthropic's clients read the stream"
    whole, events = both(response, pieces, reason, stop)
    assert (whole["status"], whole["output"][0]["status"]) == (in_response, "incomplete")
    assert events[-2]["item"]["status"] == "incomplete"


def test_a_custom_tools_input_is_text_also_where_it_is_cut_off() -> None:
    whole, events = both(response, [PATCH[:60]], LENGTH)
    (item,) = whole["output"]
    assert (item["type"], item["input"], item["status"]) == ("custom_tool_call", "one\nt", "incomplete")
    deltas = [event["delta"] for event in events if event["type"] == "response.custom_tool_call_input.delta"]
    assert deltas == ["one\nt"]


# ------------------------------------------------------------------------------------------------------ gRPC


@pytest.mark.parametrize("streams", [False, True])
def test_parts_have_deltas_on_demand_and_whole_calls_always(streams: bool) -> None:
    parts, made = OutputParts(OutputPlan(FORM, True, True, tools=tuple(TOOLS)), streams), []
    for each in messages_of(["Yes.", F[:45], F[45:], CUT], LENGTH, ""):
        parts.add_to(each)
        made += each.parts
    deltas = [part.tool_call_delta for part in made if part.HasField("tool_call_delta")]
    calls = [part.tool_call for part in made if part.HasField("tool_call")]
    assert made[0].text == "Yes."
    assert calls == [
        pb.ToolCall(name="f", arguments='{"a": "bé{", "c": [1, 2]}'),
        pb.ToolCall(name="f", arguments=AT_CUT, incomplete=True),
    ]
    assert [delta.name for delta in deltas if delta.name] == (["f", "f"] if streams else [])
    joined = "".join(delta.arguments for delta in deltas)
    assert joined == ("".join(call.arguments for call in calls) if streams else "")


def test_deltas_need_parts() -> None:
    with pytest.raises(InvalidRequest, match="needs parse_output"):
        check_chat_fields(pb.GenerateRequest(messages=[pb.ChatMessage(role="user")], stream_tool_calls=True))
    with pytest.raises(InvalidRequest, match="needs messages"):
        check_chat_fields(pb.GenerateRequest(text="x", stream_tool_calls=True))


# ----------------------------------------------------------------------------------------------- forced calls


def planned(parameters: Any) -> pb.Sampling:
    tool = json.dumps({"type": "function", "function": {"name": "f", "parameters": parameters}})
    request = pb.GenerateRequest(messages=[pb.ChatMessage(role="user")], tools=[tool], tool_choice="required")
    return plan_output(request, FORM, PromptEnd(), ReasoningMarks("", ""))[1]


@pytest.mark.parametrize("kinds", ["string", "array", ["array", "null"], 7])
def test_a_forced_call_needs_an_objects_schema(kinds: Any) -> None:
    with pytest.raises(InvalidRequest) as caught:
        planned({"type": kinds})
    assert caught.value.field == "tools[0].function.parameters.type"


@pytest.mark.parametrize(
    "parameters", [{}, {"type": ["object", "null"]}, {"anyOf": [{"type": "string"}, {"type": "object"}]}]
)
def test_arguments_of_a_forced_call_are_an_object(parameters: Any) -> None:
    grammar = planned(parameters).structured.grammar
    schema = json.loads(grammar.split("%json ")[1])
    assert schema["type"] == "object"
