"""Reasoning and tool calls in an output, by family: what is one, what is not, and that pieces do not matter."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.errors import StartError
from router.models.grammars.grammar_checker import CLOSE, OPEN
from router.models.output.call_reading import ToolCall
from router.models.output.output_format import AUTO, NONE, OutputFormat, OutputParser, Piece, Reasoning
from support.output_pieces import WEATHER, parse_with

HERMES = OutputFormat("hermes", NONE)


def hermes(forced: bool = False) -> OutputParser:
    parser = HERMES.parser(parses_calls=True, forced=forced)
    assert parser is not None
    return parser


def parse(*pieces: str) -> list[Piece]:
    return parse_with(hermes(), *pieces)


def call_of(name: str, **arguments: object) -> str:
    return OPEN + "\n" + json.dumps({"name": name, "arguments": arguments}) + "\n" + CLOSE


def test_text_calls_and_text_between() -> None:
    text = "Let me see.\n" + call_of("find", kind="fox") + "\n" + call_of("say") + " done \n"
    assert parse(text) == ["Let me see.", ToolCall("find", '{"kind": "fox"}'), ToolCall("say", "{}"), "done \n"]


def test_text_is_out_as_soon_as_it_can_be_no_tag() -> None:
    parser = hermes()
    assert parser.push("one < two <tool") == ["one < two"]
    assert parser.push("box> and") == [" <toolbox> and"]
    assert parser.push(" \n") == []
    assert parser.push(OPEN + '{"name": "f"}' + CLOSE[:-1]) == []
    assert parser.push(">") == [ToolCall("f", "{}")]


@pytest.mark.parametrize(
    "text",
    [
        OPEN + "no json" + CLOSE,
        OPEN + '{"arguments": {}}' + CLOSE,
        OPEN + '{"name": 3}' + CLOSE,
        OPEN + '{"name": "f"} and more' + CLOSE,
        OPEN + '{"name": "f", "arguments": {"a": NaN}}' + CLOSE,
        OPEN + "[" * 100_000 + CLOSE,
        OPEN + '{"name": "f", "argum',
        OPEN + '{"name": "f' + CLOSE,
        "a \n " + OPEN,
        CLOSE,
        "almost \n <tool_call",
        "  \n",
        "",
    ],
)
def test_what_is_no_call_stays_text_to_the_letter(text: str) -> None:
    assert parse(text) == ([text] if text else [])


def test_a_tag_that_is_only_spoken_of_hides_no_call() -> None:
    said = f"I use {OPEN} for it: "
    assert parse(said + call_of("f")) == [said.rstrip(), ToolCall("f", "{}")]


@pytest.mark.parametrize("end", ["", "\n", "</tool", CLOSE])
def test_a_complete_call_needs_no_end(end: str) -> None:
    assert parse("x " + OPEN + '{"name": "f", "parameters": {"a": 1}}' + end) == ["x", ToolCall("f", '{"a": 1}')]


def test_arguments_that_are_json_already_stay_as_they_are() -> None:
    assert parse(OPEN + '{"name": "f", "arguments": "{\\"a\\":1}"}' + CLOSE) == [ToolCall("f", '{"a":1}')]


PIECES = st.sampled_from(
    [
        OPEN,
        CLOSE,
        "<tool",
        "_call>",
        "</",
        "\n",
        " ",
        "text",
        '{"name": "f"}',
        '{"name": "g", "arguments": {"a": "',
        '"}}',
    ]
)


@given(st.lists(PIECES | st.text(max_size=3), max_size=14).map("".join), st.data())
def test_pieces_do_not_matter(text: str, data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.sets(st.integers(0, len(text)), max_size=20)))
    pieces = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    whole = parse(text)
    assert parse(*pieces) == whole
    assert parse(*text) == whole
    if not any(isinstance(item, ToolCall) for item in whole):
        assert "".join(map(str, whole)) == text, "without a call every character stays"
    tools = [json.dumps({"type": "function", "function": {"name": name}}) for name in "fg"]
    found = []
    for each in ([text], pieces, list(text)):
        parser = HERMES.parser(True, tools=tools)
        assert parser is not None
        found.append(parse_with(parser, *each))
    assert found[0] == found[1] == found[2]


PARIS = ToolCall("weather", '{"city": "Paris", "days": 3}')
ARGUMENTS = PARIS.arguments
FAMILIES: list[tuple[str, str, str, str, list[Piece]]] = [
    (
        "hermes",
        "qwen3",
        "<think>\n",
        'Hm\n so\n</think>\n\nLet me see.\n<tool_call>\n{"name": "weather", "arguments": '
        + ARGUMENTS
        + "}\n</tool_call>",
        [Reasoning("Hm\n so"), "Let me see.", PARIS],
    ),
    (
        "qwen3_coder",
        "qwen3",
        "<think>\n\n</think>\n\n",
        "<tool_call>\n<function=weather>\n<parameter=city>\nParis\n</parameter>\n<parameter=days>\n3\n</parameter>\n"
        "</function>\n</tool_call>",
        [PARIS],
    ),
    (
        "glm45",
        "glm45",
        "",
        "\n<think>Hm</think>\n<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Paris</arg_value>\n"
        "<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n</tool_call>",
        [Reasoning("Hm"), PARIS],
    ),
    (
        "kimi_k2",
        NONE,
        "",
        "Sure<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>"
        + ARGUMENTS
        + "<|tool_call_end|><|tool_call_begin|>functions.weather:1<|tool_call_argument_begin|>{}<|tool_call_end|>"
        "<|tool_calls_section_end|>",
        [
            "Sure",
            ToolCall("weather", ARGUMENTS, "functions.weather:0"),
            ToolCall("weather", "{}", "functions.weather:1"),
        ],
    ),
    (
        "deepseek_v3",
        "deepseek_r1",
        "",
        "Hm</think>Go<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n"
        + ARGUMENTS
        + "\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        [Reasoning("Hm"), "Go", PARIS],
    ),
    (
        "deepseek_v31",
        "deepseek_v3",
        "</think>",
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>weather<｜tool▁sep｜>"
        + ARGUMENTS
        + "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        [PARIS],
    ),
    (
        "openai",
        "openai_gptoss",
        "<|start|>assistant",
        "<|channel|>analysis<|message|>Hm<|end|><|start|>assistant<|channel|>commentary to=functions.weather "
        "<|constrain|>json<|message|>" + ARGUMENTS,
        [Reasoning("Hm"), PARIS],
    ),
    (
        "openai",
        "openai_gptoss",
        "<|start|>assistant",
        "<|channel|>analysis<|message|>Hm<|end|><|start|>assistant<|channel|>final<|message|>It is  sunny.",
        [Reasoning("Hm"), "It is  sunny."],
    ),
    (
        "mistral",
        "mistral",
        "",
        "[THINK]Hm[/THINK]Go[TOOL_CALLS]weather[ARGS]" + ARGUMENTS + "[TOOL_CALLS]weather[ARGS]{}",
        [Reasoning("Hm"), "Go", PARIS, ToolCall("weather", "{}")],
    ),
    (
        "mistral",
        NONE,
        "",
        '[TOOL_CALLS] [{"name": "weather", "arguments": ' + ARGUMENTS + '}, {"name": "weather", "arguments": {}}]',
        [PARIS, ToolCall("weather", "{}")],
    ),
    ("llama3_json", NONE, "", '{"name": "weather", "parameters": ' + ARGUMENTS + "}", [PARIS]),
    ("llama3_json", NONE, "", '<|python_tag|>{"name": "weather", "parameters": ' + ARGUMENTS + "}", [PARIS]),
    ("llama3_json", NONE, "", '{"colour": "red"}', ['{"colour": "red"}']),
]


@pytest.mark.parametrize(("calls", "reasoning", "before", "text", "expected"), FAMILIES)
@given(data=st.data())
def test_the_forms_of_families(
    calls: str, reasoning: str, before: str, text: str, expected: list[Piece], data: st.DataObject
) -> None:
    form = OutputFormat(calls, reasoning)

    def parser() -> OutputParser:
        begun = form.reasoning_marks[0] if form.opens_reasoning(before) else ""
        made = form.parser(True, begun, [WEATHER])
        assert made is not None
        return made

    cuts = sorted(data.draw(st.sets(st.integers(0, len(text)), max_size=12)))
    pieces = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert parse_with(parser(), *pieces) == expected


@pytest.mark.parametrize(
    ("template", "calls", "reasoning"),
    [
        ("<tool_call> <think>", "hermes", "qwen3"),
        ("<tool_call> <function=x> <parameter=y>", "qwen3_coder", NONE),
        ("<|channel|>final<|message|>", "openai", "openai_gptoss"),
        ("[TOOL_CALLS]", "mistral", NONE),
        ("anything", "hermes", NONE),
        ("", NONE, NONE),
    ],
)
def test_a_chat_template_shows_the_form(template: str, calls: str, reasoning: str) -> None:
    form = OutputFormat.of(AUTO, AUTO, template, None)
    assert (form.calls, form.reasoning) == (calls, reasoning)


def test_an_unknown_form_is_refused_by_name() -> None:
    with pytest.raises(StartError, match="tool_parser: unknown format 'hermess'; known are auto, deepseek_v3"):
        OutputFormat.of("hermess", AUTO, "", None)
    with pytest.raises(StartError, match="reasoning_parser"):
        OutputFormat.of(AUTO, "hermes", "", None)


def test_a_models_own_template_that_fails_leaves_the_text() -> None:
    own = {
        "start_anchor": "x",
        "fields": {
            "tool_calls": {
                "open": "<call>",
                "close": "</call>",
                "content": "json",
                "transform": {"function": "{content}"},
            },
            "content": {},
        },
    }
    form = OutputFormat.of(AUTO, AUTO, "", own)
    for text, expected in [
        ('a <call>{"name": "f"}</call>', ["a", ToolCall("f", "{}")]),
        ("a <call>no json</call> and more", ["a <call>no json</call> and more"]),
    ]:
        parser = form.parser(True)
        assert parser is not None
        assert parse_with(parser, text) == expected
        parser = form.parser(True)
        assert parser is not None
        assert parse_with(parser, *text) == expected


# --------------------------------------------------------------------------------------- answers that go on


FRAGMENTS = (OPEN, CLOSE, OPEN[:5], CLOSE[:7], "{", '{"name": 1}', "a b", " ", "\n", "<")


@given(begun=st.lists(st.sampled_from(FRAGMENTS)).map("".join), pieces=st.lists(st.sampled_from(FRAGMENTS)))
def test_what_goes_on_is_the_output_to_the_letter(begun: str, pieces: list[str]) -> None:
    parser = HERMES.parser(True, begun)
    assert parser is not None
    assert "".join(map(str, parse_with(parser, *pieces))) == "".join(pieces)


@pytest.mark.parametrize(
    ("calls", "reasoning", "begun", "text", "expected"),
    [
        ("hermes", "qwen3", "<think>Hm, ", "yes.</think>Sure", [Reasoning("yes."), "Sure"]),
        ("hermes", "qwen3", "<think>Hm</think>\n\nThe fox", " ran", [" ran"]),
        ("hermes", "qwen3", "The fox", " ran <think>a</think>b", [" ran", Reasoning("a"), "b"]),
        ("hermes", "qwen3", "Hm</th", "ink>x", ["ink>x"]),
        ("hermes", "qwen3", "<think>Hm</th", "ink>x", ["x"]),
        ("hermes", NONE, 'Ok <tool_call>{"name": "find", ', '"arguments": {}}</tool_call>', [ToolCall("find", "{}")]),
        ("hermes", NONE, "Ok <tool_call>{", "no call</tool_call>!", ["no call</tool_call>!"]),
        ("llama3_json", NONE, '{"name": "find", ', '"parameters": {}}', [ToolCall("find", "{}")]),
        ("deepseek_v3", "deepseek_r1", "The fox", " ran", [" ran"]),
        ("openai", "openai_gptoss", "<|channel|>final<|message|>The fox", " ran<|return|>", [" ran"]),
        ("mistral", "mistral", "[THINK]Hm", " yes[/THINK]Sure", [Reasoning(" yes"), "Sure"]),
    ],
)
def test_an_answer_that_goes_on_is_parsed_from_where_it_was(
    calls: str, reasoning: str, begun: str, text: str, expected: list[Piece]
) -> None:
    for pieces in ([text], list(text)):
        parser = OutputFormat(calls, reasoning).parser(True, begun)
        assert parser is not None
        assert parse_with(parser, *pieces) == expected
