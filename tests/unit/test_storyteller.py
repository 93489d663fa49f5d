"""The demo model: its chat template stays stable from turn to turn, and calls that a client forces end soon."""

import json

import pytest
from llguidance import LLMatcher

from engine.model.model_dir import ModelDir
from protos import inference_pb2 as pb
from router.models.prompts.chat_template import ChatTemplate
from support.storyteller_writer import ADD, PERSON, STORIES, Writer, calls_in, said
from support.storyteller_writer import WEATHER as ASKED_WEATHER
from tandem.storyteller import STORYTELLER

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


@pytest.fixture(scope="module")
def writer() -> Writer:
    return Writer()


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


def test_forced_calls_and_json_end_within_64_tokens(writer: Writer) -> None:
    for tool, temperature in ((ASKED_WEATHER, 0.0), (ADD, 0.0), (STORIES, 0.7)):
        prompt = writer.prompt(said("Tell me a story about a fox."), [tool])
        answer = writer.write(prompt, writer.grammar([tool]), temperature)
        assert answer.ended, answer.text
        ((name, arguments),) = calls_in(answer.text)
        assert name == tool["function"]["name"]
        assert set(arguments) >= set(tool["function"]["parameters"]["required"])
    schema = json.dumps(PERSON)
    grammar = LLMatcher.grammar_from_json_schema(schema)
    answer = writer.write(writer.prompt(said("Give me a person as JSON.")), grammar)
    assert answer.ended
    assert set(json.loads(answer.text)) >= {"name", "age"}


def test_a_free_call_copies_the_prompt(writer: Writer) -> None:
    answer = writer.write(writer.prompt(said("What is the weather in Paris?"), [ASKED_WEATHER]))
    assert calls_in(answer.text) == [("get_weather", {"city": "Paris"})]


def test_tags_of_calls_are_tokens_that_stay_in_the_text() -> None:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(MODEL / "tokenizer.json"))
    text = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
    ids = tokenizer.encode(f"{text}<|end|>", add_special_tokens=False).ids
    assert (ids[0], ids[-2]) == (tokenizer.token_to_id("<tool_call>"), tokenizer.token_to_id("</tool_call>"))
    assert tokenizer.decode(ids) == text
    assert tokenizer.get_vocab_size(with_added_tokens=True) == 2048
    assert tokenizer.encode("2048", add_special_tokens=False).tokens == ["2", "0", "4", "8"]
