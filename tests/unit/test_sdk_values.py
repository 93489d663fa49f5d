"""Statuses, reasons and codes of answers, compared with the types of OpenAI's and Anthropic's own clients."""

import json
from typing import Any, get_args

import anthropic.types
import anthropic.types.shared.error_type
import pytest
from openai.types import responses
from openai.types.chat import chat_completion
from pydantic import TypeAdapter

from cluster.errors import UnknownRequest
from protos import inference_pb2 as pb
from router.frontend.anthropic.answer import ERRORS, MessagesAnswer
from router.frontend.anthropic.messages import read_messages
from router.frontend.http.errors import Caller, error_answer
from router.frontend.http.generation import PromptInfo
from router.frontend.openai.answers import ChatAnswer
from router.frontend.openai.chat import read_chat
from router.frontend.openai.responses.response_store import MemoryResponses, ResponseHooks
from router.frontend.openai.responses.responses import read_response
from router.frontend.openai.responses.responses_answer import ResponsesAnswer
from router.models.output.output_format import OutputFormat
from router.models.output.token_texts import TokenForm

CALLER = Caller("", "r")
FORM = OutputFormat("hermes", "qwen3")
CALL = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
STOP, LENGTH = pb.FINISH_REASON_STOP, pb.FINISH_REASON_LENGTH
TEXTS = {"text": "hello", "reasoning": "<think>well", "call": f"hello {CALL}", "empty": ""}
USER = [{"role": "user", "content": "hi"}]


def served(forced: bool = False) -> PromptInfo:
    return PromptInfo("m", [1], "", lambda token_id: TokenForm.of(b"x"), lambda: FORM.parser(True, forced=forced))


def messages_of(text: str, reason: pb.FinishReason.ValueType) -> list[pb.GenerateResponse]:
    usage = pb.Usage(prompt_tokens=1, completion_tokens=1)
    return [
        pb.GenerateResponse(text=text, token_ids=[1]),
        pb.GenerateResponse(finish=pb.Finish(reason=reason, usage=usage, receipt=pb.Receipt(request_id="r"))),
    ]


def response_of(
    text: str, reason: pb.FinishReason.ValueType, forced: bool = False
) -> tuple[responses.Response, list[Any]]:
    """The whole response and its events, both checked by the client's types."""
    parts = []
    for _ in range(2):
        answer = ResponsesAnswer(read_response({"input": "hi"}, CALLER), "r")
        answer.begin(0, served(forced))
        parts.append((answer, b"".join(answer.chunk(0, message) for message in messages_of(text, reason))))
    adapter: TypeAdapter[Any] = TypeAdapter(responses.ResponseStreamEvent)
    lines = [line for line in parts[0][1].decode().split("\n") if line.startswith("data: ")]
    events = [adapter.validate_python(json.loads(line[6:])) for line in lines]
    return responses.Response.model_validate_json(parts[1][0].whole()), events


@pytest.mark.parametrize("reason", [STOP, LENGTH])
@pytest.mark.parametrize("name", TEXTS)
def test_responses_have_the_clients_statuses(name: str, reason: pb.FinishReason.ValueType) -> None:
    whole, events = response_of(TEXTS[name], reason)
    assert whole.status == ("incomplete" if reason == LENGTH else "completed")
    done = [event.item.status for event in events if event.type == "response.output_item.done"]
    assert done == [item.status for item in whole.output]  # type: ignore[union-attr]
    cut_off = reason == LENGTH and name in ("text", "reasoning")
    assert done[-1:] == ([] if name == "empty" else ["incomplete" if cut_off else "completed"])
    assert set(done[:-1]) <= {"completed"}, "only the last item is cut off"


def test_a_call_that_is_cut_off_is_incomplete() -> None:
    whole, events = response_of('<tool_call>\n{"name": "f", "arguments": {"a": ', LENGTH, forced=True)
    (item,) = whole.output
    assert (item.type, item.status) == ("function_call", "incomplete")
    assert [event.item.status for event in events if event.type == "response.output_item.done"] == ["incomplete"]


@pytest.mark.parametrize("reason", [STOP, LENGTH])
@pytest.mark.parametrize("name", TEXTS)
def test_chats_and_messages_have_the_clients_reasons(name: str, reason: pb.FinishReason.ValueType) -> None:
    chat = ChatAnswer(read_chat({"messages": USER}, CALLER), "r")
    message = MessagesAnswer(read_messages({"messages": USER, "max_tokens": 5}, CALLER), "r")
    for answer in (chat, message):
        answer.begin(0, served())
        for each in messages_of(TEXTS[name], reason):
            answer.absorb(0, each)
    chat_completion.ChatCompletion.model_validate_json(chat.whole())
    assert anthropic.types.Message.model_validate_json(message.whole()).stop_reason is not None


def test_errors_have_the_clients_codes() -> None:
    known = {*get_args(anthropic.types.shared.error_type.ErrorType), "request_too_large"}
    assert set(ERRORS.values()) <= known, "the last one is documented for status 413, but not typed"
    unknown = json.loads(error_answer(UnknownRequest("gone", "response_id"), {}).body)["error"]
    assert unknown["code"] != "model_not_found", "there is no model that was not found"


async def test_an_unknown_previous_response_has_openais_code() -> None:
    asked = read_response({"input": "hi", "previous_response_id": "resp_none"}, CALLER)
    with pytest.raises(Exception, match="resp_none") as caught:
        await ResponseHooks(MemoryResponses(1 << 20)).before(asked, CALLER)
    answer = error_answer(caught.value, asked.names)  # type: ignore[arg-type]
    said = json.loads(answer.body)["error"]
    assert (answer.status, said["code"], said["param"], said["type"]) == (
        400,
        "previous_response_not_found",
        "previous_response_id",
        "invalid_request_error",
    )
