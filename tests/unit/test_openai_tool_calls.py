"""Calls of tools in a text: what is one, what is not, and that pieces do not matter."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.frontend.openai.tool_calls import CLOSE, OPEN, ToolCall, ToolCallParser


def parse(*pieces: str) -> list[str | ToolCall]:
    """Neighbouring texts joined."""
    parser = ToolCallParser()
    found = [item for piece in pieces for item in parser.push(piece)] + parser.finish()
    assert parser.num_calls == sum(isinstance(item, ToolCall) for item in found)
    joined: list[str | ToolCall] = []
    for item in found:
        if isinstance(item, str) and joined and isinstance(joined[-1], str):
            joined[-1] += item
        else:
            joined.append(item)
    return joined


def call_of(name: str, **arguments: object) -> str:
    return OPEN + "\n" + json.dumps({"name": name, "arguments": arguments}) + "\n" + CLOSE


def test_text_calls_and_text_between() -> None:
    text = "Let me see.\n" + call_of("find", kind="fox") + "\n" + call_of("say") + " done \n"
    assert parse(text) == ["Let me see.", ToolCall("find", '{"kind": "fox"}'), ToolCall("say", "{}"), "done \n"]


def test_text_is_out_as_soon_as_it_can_be_no_tag() -> None:
    parser = ToolCallParser()
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
        OPEN + '[{"name": "f"}]' + CLOSE,
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
    assert parse(said + call_of("f")) == [said, ToolCall("f", "{}")]


def test_an_end_within_a_string_is_none() -> None:
    text = OPEN + json.dumps({"name": "write", "arguments": {"text": f"a {CLOSE} b"}}) + CLOSE
    assert parse(text) == [ToolCall("write", json.dumps({"text": f"a {CLOSE} b"}))]


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


@pytest.mark.parametrize(
    ("text", "arguments"),
    [
        ('{"name": "f", "arguments": {"a": "b', '{"a": "b'),
        ('\n{"name": "f", "arguments": {"a": [1, ', '{"a": [1, '),
        ('\n{"name": "f", "arguments": ', ""),
        ('\n{"name": "f", "arguments": {}}\n</tool_', "{}"),
    ],
)
def test_a_forced_call_that_is_cut_off_is_a_call(text: str, arguments: str) -> None:
    parser = ToolCallParser(forced=True)
    assert parser.push(OPEN + text) + parser.finish() == [ToolCall("f", arguments)]
    assert ToolCallParser(forced=True).push("no call") == ["no call"]
