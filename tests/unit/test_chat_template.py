"""What chat templates are given, and what of it is refused."""

import json
from pathlib import Path
from typing import Any

import pytest

from engine.model.model_dir import ModelDir
from protos import inference_pb2 as pb
from router.models.prompts.chat_template import ChatTemplate, chars_of, check_chat_fields
from support.refusals import refusal_of

SHOWS = (
    "{{ messages | tojson }}|{{ tools | tojson }}|{{ mood }}{{ bos_token }}{% if add_generation_prompt %}>{% endif %}"
)
PLAIN = "{% for message in messages %}{{ message.role }}:{{ message.content }};{% endfor %}"
TOOL = {"type": "function", "function": {"name": "f"}}


def asking(**fields: Any) -> pb.GenerateRequest:
    return pb.GenerateRequest(**{"messages": [pb.ChatMessage(role="user", content="hello")]} | fields)


def shown(request: pb.GenerateRequest) -> tuple[Any, Any, str]:
    messages, tools, rest = ChatTemplate(SHOWS, {"bos_token": "<s>"}).render(request).split("|")
    return json.loads(messages), json.loads(tools), rest


def test_messages_have_what_was_said_and_no_more() -> None:
    call = pb.ToolCall(id="c", name="f", arguments='{"a": 1}')
    messages = [
        pb.ChatMessage(role="user", content="hello", name="ann"),
        pb.ChatMessage(role="assistant", tool_calls=[call, pb.ToolCall(name="g")]),
        pb.ChatMessage(role="tool", content="2", tool_call_id="c"),
    ]
    request = asking(messages=messages, tools=[json.dumps(TOOL)], chat_template_kwargs='{"mood": "good"}')
    seen, tools, rest = shown(request)
    assert seen == [
        {"role": "user", "content": "hello", "name": "ann"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [
                {"id": "c", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}},
                {"id": "", "type": "function", "function": {"name": "g", "arguments": {}}},
            ],
        },
        {"role": "tool", "content": "2", "tool_call_id": "c"},
    ]
    assert (tools, rest) == ([TOOL], "good<s>>")
    assert shown(asking())[1:] == (None, "<s>>"), "no tools are none, not an empty list"
    assert chars_of(request) == len("hello2fg") + len(call.arguments) + len(json.dumps(TOOL))


def test_a_developer_is_a_system_to_who_knows_none() -> None:
    request = asking(messages=[pb.ChatMessage(role="developer", content="x")])
    assert ChatTemplate(PLAIN, {}).render(request) == "system:x;"
    assert ChatTemplate("{# developer #}" + PLAIN, {}).render(request) == "developer:x;"


CALLS = "{% for message in messages %}{% for call in message.tool_calls %}{{ CALL }};{% endfor %}{% endfor %}"


@pytest.mark.parametrize("text", ['{"a": "b', "1", '["a"]', "no json", "[" * 100_000])
@pytest.mark.parametrize(
    ("source", "is_object"),
    [("call.function.arguments | tojson", False), ("call.function.arguments.items() | list | tojson", True)],
)
def test_arguments_that_are_no_object_are_read_as_they_are(source: str, is_object: bool, text: str) -> None:
    """As of a call that was cut off, which clients send back."""
    calls = [pb.ToolCall(name="f", arguments=text), pb.ToolCall(name="g", arguments='{"a": 1}')]
    messages = [pb.ChatMessage(role="assistant", tool_calls=calls)]
    rendered = ChatTemplate(CALLS.replace("CALL", source), {}).render(asking(messages=messages))
    broken, whole = rendered.removesuffix(";").split(";")
    assert json.loads(whole) == ([["a", 1]] if is_object else {"a": 1})
    assert json.loads(broken) == ([["arguments", text]] if is_object else text)


def test_of_two_templates_the_one_with_tools_gets_them(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    templates = [{"name": "default", "template": PLAIN}, {"name": "tool_use", "template": "{{ tools | length }}"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": templates}))
    template = ChatTemplate.of(ModelDir.open(tmp_path))
    assert template.render(asking()) == "user:hello;"
    assert template.render(asking(tools=["{}", "{}"])) == "2"


@pytest.mark.parametrize(
    ("field", "fields"),
    [
        ("tools", {"tools": ["{}"] * 129}),
        ("tools", {"tools": [json.dumps({"x": "y" * 262_144})]}),
        ("tools[1]", {"tools": ["{}", "[]"]}),
        ("tools[0]", {"tools": ["[" * 100_000]}),
        ("chat_template_kwargs", {"chat_template_kwargs": "x"}),
        ("chat_template_kwargs", {"chat_template_kwargs": "[]"}),
        ("chat_template_kwargs", {"chat_template_kwargs": json.dumps({"x": "y" * 16_384})}),
        ("chat_template_kwargs", {"chat_template_kwargs": '{"chat_template": "x"}'}),
        ("chat_template_kwargs", {"chat_template_kwargs": '{"messages": []}'}),
        ("chat_template_kwargs", {"chat_template_kwargs": '{"bos_token": "x"}'}),
    ],
)
def test_refusals_name_their_field(field: str, fields: dict[str, Any]) -> None:
    with refusal_of(field):
        ChatTemplate(SHOWS, {"bos_token": "<s>"}).render(asking(**fields))


def test_tools_need_a_place_and_messages() -> None:
    with refusal_of("tools", match="does not support tools"):
        ChatTemplate(PLAIN, {}).render(asking(tools=["{}"]))
    for name, value in (("tools", ["{}"]), ("chat_template_kwargs", "{}")):
        with refusal_of(name):
            check_chat_fields(pb.GenerateRequest(**{"text": "x", name: value}))  # type: ignore[arg-type]
