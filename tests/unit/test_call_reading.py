"""Tool calls as they are generated: what of them is certain, and where they are cut off."""

import json

import pytest

from router.models.grammars.grammar_checker import CLOSE, OPEN
from router.models.output.call_reading import CallArguments, CallBegun, ToolCall
from router.models.output.output_format import NONE, OutputFormat, OutputParser
from support.output_pieces import WEATHER, parse_with

HERMES = OutputFormat("hermes", NONE)
NAMELESS, TOOL = "{}", json.dumps({"type": "function", "function": {"name": "f"}})


def parser_of(form: OutputFormat = HERMES, forced: bool = False, tools: tuple[str, ...] = (TOOL,)) -> OutputParser:
    parser = form.parser(True, tools=() if forced else tools, forced=forced)
    assert parser is not None
    return parser


@pytest.mark.parametrize(
    ("text", "arguments"),
    [
        ('{"name": "f", "arguments": {"a": "b', '{"a": "b'),
        ('\n{"name": "f", "arguments": {"a": [1, ', '{"a": [1, '),
        ('\n{"name": "f", "arguments": ', ""),
        ('\n{"name": "f", "arguments": {}}\n</tool_', "{}"),
        ('{"name": "f", "arguments": {"a": 1}', '{"a": 1}'),
        ('{"name": "f", "arguments": {"a": "b"}}' + CLOSE, '{"a": "b"}'),
    ],
)
@pytest.mark.parametrize("forced", [True, False])
def test_a_call_that_is_cut_off_is_a_call_of_which_this_is_known(text: str, arguments: str, forced: bool) -> None:
    for pieces in ([OPEN + text], list(OPEN + text)):
        parser = parser_of(forced=forced, tools=(NAMELESS, TOOL))
        is_cut = not arguments.endswith("}")
        assert parse_with(parser, *pieces) == [ToolCall("f", arguments, is_cut=is_cut)]
    assert parser_of(forced=True).push("no call") == ["no call"]


@pytest.mark.parametrize(
    ("family", "text"),
    [
        (
            "qwen3_coder",
            "<tool_call>\n<function=weather>\n<parameter=days>\n3\n</parameter>\n|<parameter=city>\nPar|is\n</parameter>\n"
            "|</function>\n</tool|_call>|",
        ),
        (
            "glm45",
            "<tool_call>weather\n<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n|<arg_key>city</arg_key>\n<arg_value>"
            "Par|is</arg_value>\n|</tool|_call>|",
        ),
    ],
)
def test_a_call_between_tags_that_is_cut_off_says_so(family: str, text: str) -> None:
    cuts = text.split("|")
    for count in range(1, len(cuts)):
        parser = parser_of(OutputFormat(family, NONE), tools=(WEATHER,))
        (call,) = parse_with(parser, *"".join(cuts[:count]))
        assert isinstance(call, ToolCall)
        is_cut = count <= 3
        assert (json.loads(call.arguments), call.is_cut) == (
            {"days": 3} | ({} if count < 3 else {"city": "Paris"}),
            is_cut,
        )


def test_arguments_come_as_they_are_generated() -> None:
    parser = parser_of()
    assert parser.push('Yes. <tool_call>\n{"name": "f", "argu') == ["Yes."]
    assert parser.push('ments": {"a": [') == [CallBegun("f"), CallArguments('{"a": [')]
    assert parser.push('1, "}') == [CallArguments('1, "}')]
    assert parser.push('\n\\"é"]}') == [CallArguments('\\n\\"é"]}')], "a line break within a string is escaped"
    assert parser.push("}\n</tool_call") == []
    assert parser.push(">") == [ToolCall("f", '{"a": [1, "}\\n\\"é"]}')]
    assert parser.push('<tool_call>{"name": "g", "arguments": {"a"') == [], "no tool of the request has this name"
    assert parser.push(": 1}}</tool_call>") == [ToolCall("g", '{"a": 1}')]


def test_a_call_that_was_begun_stays_one() -> None:
    parser = parser_of()
    text = '<tool_call>{"name": "f", "arguments": {"a": }} and more</tool_call>!'
    assert parse_with(parser, text) == [ToolCall("f", '{"a": }', is_cut=True), "!"]
