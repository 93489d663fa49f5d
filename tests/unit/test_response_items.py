"""Ids of answers, stored responses, and items that refer to earlier ones."""

import json
from typing import Any

import pytest

from cluster.errors import InvalidRequest, ServiceError
from protos import inference_pb2 as pb
from router.frontend.anthropic.answer import MessagesAnswer
from router.frontend.anthropic.messages import read_messages
from router.frontend.http.body.fields import IgnoredFields
from router.frontend.http.errors import Caller, HttpRefusal
from router.frontend.http.generation import PromptInfo
from router.frontend.openai.answers import ChatAnswer, CompletionAnswer
from router.frontend.openai.chat import read_chat
from router.frontend.openai.completions import read_completion
from router.frontend.openai.embeddings import EmbeddingsAnswer, read_embeddings
from router.frontend.openai.responses.response_store import MAX_REFERRED, MemoryResponses, ResponseHooks
from router.frontend.openai.responses.responses import ResponsesRequest, read_response
from router.frontend.openai.responses.responses_answer import ResponsesAnswer
from router.models.output.output_format import OutputFormat
from router.models.output.token_texts import TokenForm
from support.refusals import refusal_of

CALLER = Caller("tenant", "the client's/own")
FORM = OutputFormat("hermes", "qwen3")
USER: Any = [{"role": "user", "content": "hi"}]
CALL = '<tool_call>\n{"name": "f", "arguments": {"a": '


def end(reason: pb.FinishReason.ValueType) -> pb.GenerateResponse:
    return pb.GenerateResponse(finish=pb.Finish(reason=reason, receipt=pb.Receipt(request_id="r")))


def form_of(token_id: int) -> TokenForm:
    return TokenForm.of(b"x")


class Site:
    """A store, and what the endpoint does around a generation whose text is given."""

    def __init__(self) -> None:
        self.store = MemoryResponses(1 << 20)
        self.hooks = ResponseHooks(self.store)

    async def respond(
        self, text: str, reason: pb.FinishReason.ValueType = pb.FINISH_REASON_STOP, **fields: Any
    ) -> tuple[ResponsesRequest, dict[str, Any]]:
        asked = read_response({"input": "hi"} | fields, CALLER)
        await self.hooks.before(asked, CALLER)
        answer = ResponsesAnswer(asked, asked.answer_id)
        answer.begin(0, PromptInfo("m", [1], "", form_of, lambda: FORM.parser(True, forced=True)))
        for message in (pb.GenerateResponse(text=text, token_ids=[1]), end(reason)):
            answer.absorb(0, message)
        await self.hooks.after(asked, CALLER, answer)
        return asked, json.loads(answer.whole())


async def test_a_clients_id_is_no_key_of_a_response() -> None:
    site = Site()
    answers = [(await site.respond(text))[1] for text in ("one", "two")]
    assert len({answer["id"] for answer in answers}) == 2
    for answer, text in zip(answers, ("one", "two"), strict=True):
        assert answer["id"].removeprefix("resp_").isalnum(), "it is one segment of a path"
        stored = await site.store.get("tenant", answer["id"])
        assert stored.response["output"][0]["content"][0]["text"] == text
        asked, _ = await site.respond("three", previous_response_id=answer["id"])
        assert [message.content for message in asked.requests[0].messages] == ["hi", text, "hi"]
        assert asked.requests[0].request_id == CALLER.request_id, "for tracing"


@pytest.mark.parametrize(
    ("read", "answer_of", "body"),
    [
        (read_chat, ChatAnswer, {"messages": USER}),
        (read_completion, CompletionAnswer, {"prompt": "hi"}),
        (read_messages, MessagesAnswer, {"messages": USER, "max_tokens": 5}),
        (read_embeddings, EmbeddingsAnswer, {"input": "hi"}),
    ],
)
def test_a_clients_id_is_no_id_of_an_answer(read: Any, answer_of: Any, body: dict[str, Any]) -> None:
    ids = []
    for _ in range(2):
        asked = read(dict(body), CALLER)
        assert asked.request_id == CALLER.request_id
        answer = answer_of(asked, asked.answer_id)
        answer.begin(0, PromptInfo("m", [1], "", form_of))
        message = end(pb.FINISH_REASON_STOP)
        message.embedding.append(1.0)
        answer.absorb(0, message)
        ids.append(json.loads(answer.whole())["id"])
    assert len(set(ids)) == 2
    assert not any(CALLER.request_id in name for name in ids)


async def test_a_call_that_was_cut_off_goes_on_in_later_turns() -> None:
    site = Site()
    _, cut = await site.respond(CALL, pb.FINISH_REASON_LENGTH)
    (item,) = cut["output"]
    assert (cut["status"], item["status"], item["arguments"]) == ("incomplete", "incomplete", '{"a": ')
    asked, _ = await site.respond("on", previous_response_id=cut["id"])
    (call,) = asked.requests[0].messages[1].tool_calls
    assert (call.name, call.arguments) == ("f", '{"a": ')
    asked, _ = await site.respond("on", input=[*USER, item, *USER])
    assert asked.requests[0].messages[1].tool_calls[0].arguments == '{"a": '


async def test_items_are_referred_to_by_id() -> None:
    site = Site()
    _, first = await site.respond("<think>Hm</think>Yes. " + CALL + "1}}\n</tool_call>", input=USER)
    stored = await site.store.get("tenant", first["id"])
    (question,) = stored.named_input_items()
    reasoning, text, call = first["output"]
    references = [{"type": "item_reference", "id": question["id"]}, {"id": reasoning["id"]}]
    references += [{"type": "item_reference", "id": each["id"]} for each in (text, call)]
    output = {"type": "function_call_output", "call_id": call["call_id"], "output": "2"}
    by_id, _ = await site.respond("x", input=[*references, output])
    in_full, _ = await site.respond("x", input=[*USER, reasoning, text, call, output])
    assert by_id.requests[0].messages == in_full.requests[0].messages
    assert [message.role for message in by_id.requests[0].messages] == ["user", "assistant", "tool"]
    assert by_id.input_items[2] == text
    on, _ = await site.respond("x", input=[{"id": text["id"]}], previous_response_id=first["id"])
    assert [message.content for message in on.requests[0].messages] == ["hi", "Yes.", "Yes."]


@pytest.mark.parametrize("wanted", ["msg_none", "a/b", f"msg_{'0' * 36}"])
async def test_an_unknown_item_is_refused(wanted: str) -> None:
    with pytest.raises(HttpRefusal) as caught:
        await Site().respond("x", input=[*USER, {"type": "item_reference", "id": wanted}])
    assert (caught.value.status, caught.value.field) == (404, "input[1].id")


async def test_another_tenants_item_is_unknown() -> None:
    site = Site()
    _, first = await site.respond("Yes.")
    asked = read_response({"input": [{"id": first["output"][0]["id"]}]}, CALLER)
    with pytest.raises(HttpRefusal):
        await site.hooks.before(asked, Caller("another", "r"))


async def test_references_are_bounded() -> None:
    items = [{"type": "item_reference", "id": f"msg_{number:032x}0000"} for number in range(MAX_REFERRED + 1)]
    with pytest.raises(InvalidRequest, match="64 responses at most, not 65"):
        await Site().respond("x", input=items)


@pytest.mark.parametrize("value", ["false", 0, "no"])
@pytest.mark.parametrize(
    ("read", "name", "body"),
    [(read_response, "store", {"input": "hi"}), (read_chat, "include_reasoning", {"messages": USER})],
)
def test_a_switch_is_true_or_false(read: Any, name: str, body: dict[str, Any], value: Any) -> None:
    with refusal_of(name, ServiceError, match="must be true or false"):
        read(body | {name: value}, CALLER)


async def test_a_response_is_stored_unless_it_may_not() -> None:
    site = Site()
    for fields, is_stored in (({}, True), ({"store": True}, True), ({"store": False}, False)):
        _, answer = await site.respond("x", **fields)
        assert (await site.store.get("tenant", answer["id"]) is not None) == is_stored


# ----------------------------------------------------------------------------------------------- tools


@pytest.mark.parametrize(
    ("form", "ignored"), [({"type": "text"}, []), ({"type": "grammar", "syntax": "regex"}, ["tools[].format"])]
)
def test_a_custom_tools_grammar_is_not_lost_silently(form: Any, ignored: list[str]) -> None:
    noted = IgnoredFields()
    read_response({"input": "hi", "tools": [{"type": "custom", "name": "patch", "format": form}]}, CALLER, noted)
    assert list(noted.names) == ignored


def named(*names: str, chat: bool) -> list[Any]:
    parts: list[dict[str, Any]] = [{"name": name} for name in names]
    return [{"type": "function"} | ({"function": part} if chat else part) for part in parts]


def choosing(chat: bool, **choice: Any) -> pb.GenerateRequest:
    inside = {"allowed_tools": choice} if chat else choice
    body = {"tools": named("f", "g", "h", chat=chat), "tool_choice": {"type": "allowed_tools"} | inside}
    read: Any = read_chat if chat else read_response
    request: pb.GenerateRequest = read(body | ({"messages": USER} if chat else {"input": "hi"}), CALLER).requests[0]
    return request


@pytest.mark.parametrize("chat", [False, True])
@pytest.mark.parametrize(("mode", "made"), [("auto", ""), ("required", "required")])
def test_only_allowed_tools_are_left(chat: bool, mode: str, made: str) -> None:
    request = choosing(chat, mode=mode, tools=named("h", "f", chat=chat))
    assert [json.loads(tool)["function"]["name"] for tool in request.tools] == ["h", "f"]
    assert request.tool_choice == made


@pytest.mark.parametrize("chat", [False, True])
@pytest.mark.parametrize(
    ("field", "choice"),
    [("mode", {"tools": ["f"]}), ("tools", {"mode": "auto"}), ("tools[0]", {"mode": "auto", "tools": ["x"]})],
)
def test_allowed_tools_that_mean_nothing_are_refused(chat: bool, field: str, choice: dict[str, Any]) -> None:
    tools = {"tools": named(*choice["tools"], chat=chat)} if "tools" in choice else {}
    with refusal_of(f"tool_choice.{'allowed_tools.' if chat else ''}{field}"):
        choosing(chat, **choice | tools)


@pytest.mark.parametrize(
    ("content", "is_error", "text"),
    [
        ("no such file", True, "Error: no such file"),
        ([{"type": "text", "text": "no such file"}], True, "Error: no such file"),
        ("ERROR: no such file", True, "ERROR: no such file"),
        (None, True, "Error"),
        ("fine", False, "fine"),
    ],
)
def test_a_tools_error_is_said_to_the_model(content: Any, is_error: bool, text: str) -> None:
    result = {"type": "tool_result", "tool_use_id": "c", "content": content, "is_error": is_error}
    body = {"messages": [{"role": "user", "content": [result]}], "max_tokens": 5}
    assert [message.content for message in read_messages(body, CALLER).requests[0].messages] == [text]
