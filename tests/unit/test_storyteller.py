"""The demo model: its chat template stays stable from turn to turn, and calls that a client forces end soon."""

import json
import random
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from engine.model.model_dir import ModelDir
from protos import inference_pb2 as pb
from router.models.prompts.chat_template import ChatTemplate
from tandem.storyteller import STORYTELLER

HOME = Path(__file__).parents[2] / "examples" / "storyteller"
MODEL = STORYTELLER
ASSISTANT = "<|assistant|>"
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the weather in a city.",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "description": "e.g. Paris"},
                "unit": {"type": "string", "enum": ["celsius", "fahrenheit"]},
            },
            "required": ["city"],
        },
    },
}
CALLS = [
    pb.ToolCall(id="1", name="get_weather", arguments='{"city": "Zürich"}'),
    pb.ToolCall(id="2", name="get_weather", arguments='{"city": "Rome", "unit": "celsius"}'),
]
CHAT = [
    pb.ChatMessage(role="user", content="What is the weather in Zürich and Rome?"),
    pb.ChatMessage(role="assistant", tool_calls=CALLS),
    pb.ChatMessage(role="tool", content="sunny", tool_call_id="1"),
    pb.ChatMessage(role="tool", content="rainy", tool_call_id="2"),
    pb.ChatMessage(role="assistant", content="Sunny in Zürich, rainy in Rome."),
    pb.ChatMessage(role="user", content="Tell me a story."),
    pb.ChatMessage(role="assistant", content="Once upon a time.", tool_calls=CALLS[:1]),
    pb.ChatMessage(role="tool", content="sunny", tool_call_id="1"),
]


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Import of a module of the example, whose modules find each other in their folder."""
    before = set(sys.modules)
    monkeypatch.syspath_prepend(str(HOME))

    def import_of(name: str) -> ModuleType:
        return __import__(name)

    yield import_of
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(HOME)):
            del sys.modules[name]


@pytest.fixture(scope="module")
def template() -> ChatTemplate:
    found = ChatTemplate.of(ModelDir.open(MODEL))
    assert found is not None
    return found


@pytest.mark.parametrize("system", [[], [pb.ChatMessage(role="system", content="Be brief.")]])
def test_a_prompt_is_a_prefix_of_the_next_turns(template: ChatTemplate, system: list[pb.ChatMessage]) -> None:
    chat = system + CHAT
    tools = [json.dumps(WEATHER)]
    for with_tools in ([], tools):
        prompts = [
            template.render(pb.GenerateRequest(messages=chat[:length], tools=with_tools))
            for length in range(1, len(chat) + 1)
        ]
        assert all(prompt.endswith(ASSISTANT) for prompt in prompts)
        for place, prompt in enumerate(prompts):
            for later in prompts[place + 1 :]:
                assert later.startswith(prompt.removesuffix(ASSISTANT))


def test_a_call_is_rendered_as_the_model_wrote_it(template: ChatTemplate) -> None:
    prompt = template.render(pb.GenerateRequest(messages=CHAT[:4], tools=[json.dumps(WEATHER)]))
    assert prompt == (
        '<|begin|><|system|>Tools:\nget_weather(city: string, unit?: "celsius" | "fahrenheit"): Get the weather in a'
        " city.<|end|><|user|>What is the weather in Zürich and Rome?<|end|><|assistant|><tool_call>\n"
        '{"name": "get_weather", "arguments": {"city": "Zürich"}}\n</tool_call>\n<tool_call>\n'
        '{"name": "get_weather", "arguments": {"city": "Rome", "unit": "celsius"}}\n</tool_call><|end|>'
        "<|tool|>sunny<|end|><|tool|>rainy<|end|><|assistant|>"
    )


def test_schemas_of_all_kinds_have_a_line(template: ChatTemplate) -> None:
    properties = {
        "a": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "b": {"$ref": "#/$defs/x"},
        "c": {"type": ["integer", "null"]},
        "d": {"type": "array", "items": {"type": "number"}},
        "e": {"type": "object", "properties": {"f": {"enum": [1, "x"]}}, "required": ["f"]},
        "g": {"type": "array"},
        "h": True,
    }
    tools = [
        {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": properties}}},
        {"type": "function", "function": {"name": "g"}},
    ]
    request = pb.GenerateRequest(
        messages=[pb.ChatMessage(role="user", content="Hi")], tools=[json.dumps(tool) for tool in tools]
    )
    listed = template.render(request).split("<|end|>")[0].split("\n")[1:]
    types = 'a?: string | null, b?: any, c?: integer | null, d?: [number], e?: {f: 1 | "x"}, g?: array, h?: any'
    assert listed == [f"f({types})", "g()"]


def test_the_corpus_shows_tools_as_the_template_does(template: ChatTemplate, module: Any) -> None:
    calls = module("calls")
    rng = random.Random(0)
    tools = [calls.pick_tool(rng) for _ in range(50)]
    texts = [json.dumps({"type": "function", "function": calls.function_of(tool)}) for tool in tools]
    prompt = template.render(pb.GenerateRequest(messages=[pb.ChatMessage(role="user", content="Hi")], tools=texts))
    assert prompt == f"<|begin|><|system|>{calls.listing(tools)}<|end|><|user|>Hi<|end|><|assistant|>"


def test_forced_calls_and_json_end_within_64_tokens(module: Any) -> None:
    evaluation = module("evaluate_calls")
    writer = evaluation.Writer(MODEL)
    for tool, temperature in ((evaluation.WEATHER, 0.0), (evaluation.ADD, 0.0), (evaluation.STORIES, 0.7)):
        prompt = writer.prompt(evaluation.said("Tell me a story about a fox."), [tool])
        answer = writer.write(prompt, writer.grammar([tool]), temperature)
        assert answer.ended, answer.text
        ((name, arguments),) = evaluation.calls_in(answer.text)
        assert name == tool["function"]["name"]
        assert set(arguments) >= set(tool["function"]["parameters"]["required"])
    schema = json.dumps(evaluation.PERSON)
    grammar = evaluation.LLMatcher.grammar_from_json_schema(schema)
    answer = writer.write(writer.prompt(evaluation.said("Give me a person as JSON.")), grammar)
    assert answer.ended
    assert set(json.loads(answer.text)) >= {"name", "age"}


def test_a_free_call_copies_the_prompt(module: Any) -> None:
    evaluation = module("evaluate_calls")
    writer = evaluation.Writer(MODEL)
    answer = writer.write(writer.prompt(evaluation.said("What is the weather in Paris?"), [evaluation.WEATHER]))
    assert evaluation.calls_in(answer.text) == [("get_weather", {"city": "Paris"})]


def test_tags_of_calls_are_tokens_that_stay_in_the_text(module: Any) -> None:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(MODEL / "tokenizer.json"))
    text = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
    ids = tokenizer.encode(f"{text}<|end|>", add_special_tokens=False).ids
    assert (ids[0], ids[-2]) == (tokenizer.token_to_id("<tool_call>"), tokenizer.token_to_id("</tool_call>"))
    assert tokenizer.decode(ids) == text
    assert tokenizer.get_vocab_size(with_added_tokens=True) == 2048
    assert tokenizer.encode("2048", add_special_tokens=False).tokens == ["2", "0", "4", "8"]
