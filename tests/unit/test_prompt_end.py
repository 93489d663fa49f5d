"""Where a chat's prompt ends: after a new answer's header, after the last message, or within it."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from engine.model.model_dir import ModelDir
from protos import inference_pb2 as pb
from router.frontend.anthropic.messages import read_prompt
from router.frontend.http.errors import Caller
from router.frontend.openai.chat import read_chat
from router.models.grammars.grammar_checker import ReasoningMarks
from router.models.output.output_format import OutputFormat
from router.models.output.output_plan import OutputPlan, PromptEnd, plan_output
from router.models.prompts.chat_template import ChatTemplate, check_chat_fields
from router.models.prompts.prompts import PromptEncoder
from support.refusals import refusal_of
from tandem.storyteller import STORYTELLER

CALLER = Caller("", "r")
USER = {"role": "user", "content": "hi"}
QWEN3 = """{%- for message in messages -%}
{%- if message.role == 'assistant' and loop.last -%}
{{- '<|im_start|>assistant\\n<think>\\n' + (message.reasoning_content or '') + '\\n</think>\\n\\n' + message.content -}}
{%- else -%}{{- '<|im_start|>' + message.role + '\\n' + message.content -}}{%- endif -%}
{{- '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}
{%- if enable_thinking is false -%}{{- '<think>\\n\\n</think>\\n\\n' -}}{%- endif -%}{%- endif -%}"""
HARMONY = """{%- for message in messages -%}
{{- '<|start|>' + message.role -}}
{{- ('<|channel|>final' if message.role == 'assistant' else '') + '<|message|>' + message.content + '<|end|>' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}<|start|>assistant{%- endif -%}"""
TRIMS = (
    "{% for message in messages %}[{{ message.role }}]{{ message.content | trim }}</s>{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
DROPS = "{% for message in messages %}{% if not loop.last %}{{ message.content }}{% endif %}{% endfor %}"


def chatting(*contents: str, **fields: Any) -> pb.GenerateRequest:
    """A chat whose roles take turns."""
    roles = ("user", "assistant") * len(contents)
    messages = [pb.ChatMessage(role=role, content=content) for role, content in zip(roles, contents, strict=False)]
    return pb.GenerateRequest(messages=messages, **fields)


def prompt_of(source: str, request: pb.GenerateRequest) -> str:
    return ChatTemplate(source, {}).render(request)


def test_the_three_ends_of_a_prompt() -> None:
    assert prompt_of(TRIMS, chatting("a", "b")) == "[user]a</s>[assistant]b</s>[assistant]"
    assert prompt_of(TRIMS, chatting("a", "b", no_generation_prompt=True)) == "[user]a</s>[assistant]b</s>"
    assert prompt_of(TRIMS, chatting("a", "b", continue_final_message=True)) == "[user]a</s>[assistant]b"
    assert prompt_of(TRIMS, chatting("a", "b", continue_final_message=True, no_generation_prompt=True)).endswith("t]b")
    assert prompt_of(TRIMS, chatting("a b ", continue_final_message=True)) == "[user]a b", "as transformers cuts it"


@pytest.fixture(scope="module")
def storyteller() -> tuple[PromptEncoder, Any]:
    return PromptEncoder(ModelDir.open(STORYTELLER)), PreTrainedTokenizerFast.from_pretrained(STORYTELLER)


TEXTS = st.text(st.sampled_from("ab .\n<|é\u2003"), min_size=1, max_size=12).filter(lambda text: bool(text.strip()))


@given(contents=st.lists(TEXTS, min_size=1, max_size=4), continues=st.booleans(), adds=st.booleans())
async def test_prompts_are_those_of_transformers(
    storyteller: tuple[PromptEncoder, Any], contents: list[str], continues: bool, adds: bool
) -> None:
    encoder, reference = storyteller
    adds = adds and not continues
    request = chatting(*contents, continue_final_message=continues, no_generation_prompt=not (adds or continues))
    chat = [{"role": message.role, "content": message.content} for message in request.messages]
    expected = reference.apply_chat_template(
        chat, add_generation_prompt=adds, continue_final_message=continues, return_dict=False
    )
    assert await encoder.encode(request) == expected


@pytest.mark.parametrize(
    ("source", "request_", "reason"),
    [
        (DROPS, chatting("a", "b", continue_final_message=True), "changes the end"),
        (
            TRIMS,
            pb.GenerateRequest(
                messages=[pb.ChatMessage(role="assistant", tool_calls=[pb.ToolCall(name="f")])],
                continue_final_message=True,
            ),
            "calls tools",
        ),
    ],
)
def test_a_message_that_cannot_go_on_is_refused(source: str, request_: pb.GenerateRequest, reason: str) -> None:
    with refusal_of("continue_final_message", match=reason):
        prompt_of(source, request_)


def test_ends_mean_nothing_without_messages() -> None:
    for name in ("continue_final_message", "no_generation_prompt"):
        with refusal_of(name):
            check_chat_fields(pb.GenerateRequest(text="x", **{name: True}))  # type: ignore[arg-type]


# ------------------------------------------------------------------------------------------------ begun answers


@pytest.mark.parametrize(
    ("source", "fields", "content", "begun"),
    [
        (QWEN3, {}, "The fox", "<think>\n\n</think>\n\nThe fox"),
        (QWEN3, {"chat_template_kwargs": '{"enable_thinking": false}'}, "The", "<think>\n\n</think>\n\nThe"),
        (HARMONY, {}, "The fox", "<|channel|>final<|message|>The fox"),
        (TRIMS, {}, "The fox", "The fox"),
        (TRIMS, {}, "<think>\nWell", "<think>\nWell"),
    ],
)
def test_what_a_prompt_has_of_the_answer(source: str, fields: Any, content: str, begun: str) -> None:
    request = chatting("a", content, continue_final_message=True, **fields)
    template = ChatTemplate(source, {})
    assert template.begun_answer(request, "<think>") == begun
    assert template.render(request).endswith(begun)


def planned(begun: str, reasoning: str = "qwen3", **sampling: Any) -> tuple[OutputPlan, pb.Sampling]:
    request = chatting("a", "b", continue_final_message=True, parse_output=True)
    request.sampling.CopyFrom(pb.Sampling(**sampling))
    form = OutputFormat("hermes", reasoning)
    return plan_output(request, form, PromptEnd("", begun), ReasoningMarks(*form.reasoning_marks))


def test_structured_output_follows_reasoning_only_where_it_is_open() -> None:
    wanted = pb.StructuredOutput(json_object=True)
    assert planned("The fox", structured=wanted)[1].structured == wanted
    assert planned("<think>a</think>b", structured=wanted)[1].structured == wanted
    assert planned("The fox", "deepseek_r1", structured=wanted)[1].structured == wanted
    assert "thought" in planned("<think>a", structured=wanted)[1].structured.grammar


# --------------------------------------------------------------------------------------------------- the APIs


@pytest.mark.parametrize(
    ("given_", "continues", "ends", "role"),
    [
        ({}, False, False, "assistant"),
        ({"add_generation_prompt": True}, False, False, "assistant"),
        ({"continue_final_message": False, "add_generation_prompt": None}, False, False, "assistant"),
        ({"add_generation_prompt": False}, False, True, "user"),
        ({"continue_final_message": True}, True, False, "user"),
        ({"continue_final_message": True, "add_generation_prompt": False}, True, False, "user"),
    ],
)
def test_a_chats_fields_are_vllms(given_: dict[str, Any], continues: bool, ends: bool, role: str) -> None:
    asked = read_chat({"messages": [USER]} | given_, CALLER)
    (request,) = asked.requests
    assert (request.continue_final_message, request.no_generation_prompt, asked.role) == (continues, ends, role)


@pytest.mark.parametrize(
    ("field", "given_"),
    [
        ("continue_final_message", {"continue_final_message": True, "add_generation_prompt": True}),
        ("continue_final_message", {"continue_final_message": "yes"}),
        ("add_generation_prompt", {"add_generation_prompt": 1}),
    ],
)
def test_both_ends_at_once_are_refused(field: str, given_: dict[str, Any]) -> None:
    with refusal_of(field):
        read_chat({"messages": [USER]} | given_, CALLER)


def message(*turns: tuple[str, Any]) -> pb.GenerateRequest:
    messages = [{"role": role, "content": content} for role, content in turns]
    return read_prompt({"messages": messages}, CALLER)[0]


def test_a_last_message_of_the_assistant_goes_on_in_messages() -> None:
    assert not message(("user", "a")).continue_final_message
    assert not message(("assistant", "a"), ("user", "b")).continue_final_message
    assert message(("user", "a"), ("assistant", "b")).continue_final_message
    thought = [{"type": "thinking", "thinking": "t", "signature": ""}, {"type": "text", "text": "b"}]
    assert message(("user", "a"), ("assistant", thought)).continue_final_message
    for nothing in ("", [], None):
        begun = message(("user", "a"), ("assistant", nothing))
        assert not begun.continue_final_message
        assert len(begun.messages) == 1, "an empty one begins a new answer"


@pytest.mark.parametrize(
    ("content", "field"),
    [
        ("The fox ", "messages[1].content"),
        ([{"type": "text", "text": "The"}, {"type": "text", "text": "fox\n"}], "messages[1].content"),
        ([{"type": "thinking", "thinking": "t"}], "messages[1].content"),
        ([{"type": "tool_use", "id": "1", "name": "f", "input": {}}], "messages[1]"),
    ],
)
def test_what_cannot_go_on_in_messages_is_refused(content: Any, field: str) -> None:
    with refusal_of(field):
        message(("user", "a"), ("assistant", content))
    message(("user", "a"), ("assistant", content), ("user", "b"))
