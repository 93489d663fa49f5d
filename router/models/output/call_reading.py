"""Reading of tool calls and reasoning: the forms of model families, and JSON arguments as they come.

`CALLS` and the tables beside it are data: how families write reasoning and tool calls, as fields of transformers'
response templates. Names are those of vLLM's --tool-call-parser and --reasoning-parser. A template's fields are
described in `transformers.utils.chat_parsing`. Fields named `tool_calls...` hold calls, `reasoning` holds reasoning,
`content` is text for the reader, and any other field is dropped. Without a `content` of its own a family has all other
text as content.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

MAX_HEADER_CHARS = 512
"""Characters before the arguments of a call; names have 64 at most."""
_HEADER = re.compile(r'\s*\{\s*"name"\s*:\s*"([^"\\]*)"\s*,\s*"(?:arguments|parameters)"\s*:\s*')
_SPACE = re.compile(r"\s*")


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A tool call that a model made."""

    name: str
    arguments: str
    """Arguments as JSON, usually an object."""
    id: str = ""
    """Id that the model itself gave; usually empty."""
    is_cut: bool = False
    """Whether the arguments are not complete: the output ended within the call, or the model wrote no JSON."""


@dataclass(frozen=True, slots=True)
class CallBegun:
    """Beginning of a tool call; its arguments follow, and then the whole call."""

    name: str
    id: str = ""


@dataclass(frozen=True, slots=True)
class CallArguments:
    """Further text of the arguments of a call that was begun."""

    text: str


CallPiece = CallBegun | CallArguments | ToolCall


def is_readable(field: Mapping[str, Any]) -> bool:
    """Return whether a field of a response template has calls with their arguments in JSON, one in each region."""
    function = field.get("transform", {}).get("function")
    arguments = function.get("arguments") if isinstance(function, dict) else function
    return field.get("content") == "text" and arguments == "{content}"


class CallReader:
    """Reader of one region that is a call, or turns out to be none.

    A call of a known tool begins with its arguments' brace. What follows counts as its arguments, whatever it is: the
    client has the beginning.
    """

    def __init__(self, is_known: Callable[[str], bool], name: str = "", call_id: str = "") -> None:
        """Begin; `name` is that of a form which has it before the region's text."""
        self._is_known = is_known
        self._header: re.Pattern[str] | None = _SPACE if name else _HEADER
        """Text before the arguments; None once these have begun, or never will."""
        self._name, self._id = name, call_id
        self._text = ""
        """Text of the region so far, as long as the header is awaited."""
        self.has_begun = False
        self._arguments: list[str] = []
        self._depth = 0
        self._in_string = self._is_escaped = False

    def push(self, text: str) -> list[CallPiece]:
        """Return the pieces that further text of the region makes certain."""
        if self.has_begun:
            return self._argue(text)
        if self._header is None:
            return []
        self._text += text
        match = self._header.match(self._text)
        rest = "" if match is None else self._text[match.end() :]
        if not rest:
            if len(self._text) > MAX_HEADER_CHARS:
                self._header = None
            return []
        self._header = None
        assert match is not None, "it has a rest"
        self._name = self._name or match[1]
        self.has_begun = rest[0] == "{" and self._is_known(self._name)
        return [CallBegun(self._name, self._id), *self._argue(rest)] if self.has_begun else []

    def finish(self) -> ToolCall | None:
        """Return the call at the region's end; None where it did not begin."""
        if self.has_begun:
            arguments = "".join(self._arguments)
            return ToolCall(self._name, arguments, self._id, not is_json(arguments))
        match = _HEADER.fullmatch(self._text) if self._header is _HEADER else None
        if match is None or not self._is_known(match[1]):
            return None
        return ToolCall(match[1], "", self._id, is_cut=True)

    def _argue(self, text: str) -> list[CallPiece]:
        """Return the part of a text that belongs to the object; behind its last brace nothing does."""
        taken: list[str] = []
        for character in text:
            if self._depth == 0 and (self._arguments or taken):
                break
            taken.append(self._read(character))
        added = "".join(taken)
        if not added:
            return []
        self._arguments.append(added)
        return [CallArguments(added)]

    def _read(self, character: str) -> str:
        """Return a character as JSON has it: models also write line breaks within strings."""
        if self._in_string:
            if character < " ":
                self._is_escaped = False
                return json.dumps(character)[1:-1]
            if self._is_escaped:
                self._is_escaped = False
            elif character == "\\":
                self._is_escaped = True
            elif character == '"':
                self._in_string = False
        elif character == '"':
            self._in_string = True
        elif character in "{[":
            self._depth += 1
        elif character in "}]":
            self._depth -= 1
        return character


def is_json(text: str) -> bool:
    """Return whether a text is JSON."""
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


def calls_of(value: Any, closing: Sequence[str]) -> list[ToolCall]:
    """Return the calls of a region; none where it is no call.

    An output's end may have cut off the `closing` text.
    """
    function, call_id = value.get("function"), value.get("id", "")
    if isinstance(function, str):
        function = _parsed(_without_part(function, closing))
    calls = function if isinstance(function, list) else [function]
    pieces: list[ToolCall] = []
    for call in calls:
        name = call.get("name") if isinstance(call, dict) else None
        if not isinstance(name, str) or not name:
            return []
        arguments = call.get("arguments", call.get("parameters", {}))
        if isinstance(arguments, str):
            arguments = _without_part(arguments, closing).strip()
            if arguments and _parsed(arguments) is None:
                return []
            pieces.append(ToolCall(name, arguments or "{}", call_id))
            continue
        try:
            pieces.append(ToolCall(name, json.dumps(arguments, ensure_ascii=False, allow_nan=False), call_id))
        except (ValueError, RecursionError):
            return []
    return pieces


def _parsed(text: str) -> Any:
    """Parse JSON, also with line breaks within strings; None for anything else."""
    try:
        return json.loads(text, strict=False)
    except (ValueError, RecursionError):
        return None


def _without_part(text: str, closing: Sequence[str]) -> str:
    """Cut off the beginning of a closing text at the end of `text`."""
    for mark in closing:
        for length in range(min(len(text), len(mark) - 1), 0, -1):
            if text.endswith(mark[:length]):
                return text[:-length]
    return text


Fields = Mapping[str, Mapping[str, Any]]
TEXT = {"content": "text", "content_args": {"strip": False}}
JSON = TEXT | {"repeats": True}
"""A call in JSON, which `output_format.py` parses: more leniently, and it tells what is no call."""
WHOLE = JSON | {"transform": {"function": "{content}"}}
"""A call that is one object with name and arguments."""
NAMED = JSON | {"transform": {"function": {"name": "{name}", "arguments": "{content}"}}}
"""A call whose name stands before its arguments."""
XML = {
    "content": "xml-inline",
    "repeats": True,
    "transform": {"function": {"name": "{name}", "arguments": "{content}"}},
}


@dataclass(frozen=True, slots=True)
class Family:
    """One form of output."""

    fields: Fields
    marks: tuple[str, ...] = ()
    """Texts that a chat template contains where its model writes this form."""
    is_special: bool = False
    """Whether its marks are special tokens, which an output's text has only on demand."""
    opens: bool = False
    """Whether reasoning begins with the output, although the template does not say so."""


def _think(opening: str, closing: str) -> Fields:
    return {"reasoning": TEXT | {"open": opening, "close": closing}}


_HARMONY: Fields = {
    "reasoning": TEXT
    | {"open_pattern": r"<\|channel\|>analysis<\|message\|>", "close": ["<|end|>", "<|return|>"], "repeats": True},
    "content": TEXT
    | {
        "open_pattern": r"<\|channel\|>(?:final|commentary)(?: ?<\|constrain\|>\w+)?<\|message\|>",
        "close": ["<|return|>", "<|end|>"],
        "repeats": True,
    },
}

CALLS: Mapping[str, Family] = {
    "qwen3_coder": Family(
        {
            "tool_calls": XML
            | {
                "open_pattern": r"<tool_call>\s*<function=(?P<name>[^>\n]+)>",
                "close_pattern": r"</function>\s*</tool_call>",
                "content_args": {
                    "tag_pattern": r"<parameter=(?P<key>[^>\n]+)>\n?(?P<value>.*?)\n?</parameter>",
                },
            }
        },
        ("<function=", "<parameter="),
    ),
    "glm45": Family(
        {
            "tool_calls": XML
            | {
                "open_pattern": r"<tool_call>\s*(?P<name>[^\s<{]+)\s*(?=<arg_key>|</tool_call>)",
                "close": "</tool_call>",
                "content_args": {
                    "tag_pattern": r"<arg_key>\s*(?P<key>.*?)\s*</arg_key>\s*<arg_value>(?P<value>.*?)</arg_value>",
                },
            }
        },
        ("<arg_key>",),
    ),
    "kimi_k2": Family(
        {
            "tool_calls": JSON
            | {
                "open_pattern": r"(?:<\|tool_calls_section_begin\|>\s*)?<\|tool_call_begin\|>\s*"
                r"(?P<id>(?:functions\.)?(?P<name>[\w.-]+):\d+)\s*<\|tool_call_argument_begin\|>",
                "close": "<|tool_call_end|>",
                "transform": {"id": "{id}", "function": {"name": "{name}", "arguments": "{content}"}},
            },
            "end_of_calls": {"open": "<|tool_calls_section_end|>"},
        },
        ("<|tool_calls_section_begin|>",),
        is_special=True,
    ),
    "deepseek_v3": Family(
        {
            "tool_calls": NAMED
            | {
                "open_pattern": r"(?:<｜tool▁calls▁begin｜>\s*)?<｜tool▁call▁begin｜>\w+<｜tool▁sep｜>"
                r"(?P<name>[^\n]+)\n```json\n",
                "close": "\n```<｜tool▁call▁end｜>",
            },
            "end_of_calls": {"open": "<｜tool▁calls▁end｜>"},
        },
        ("<｜tool▁calls▁begin｜>", "```json"),
        is_special=True,
    ),
    "deepseek_v31": Family(
        {
            "tool_calls": NAMED
            | {
                "open_pattern": r"(?:<｜tool▁calls▁begin｜>\s*)?<｜tool▁call▁begin｜>(?P<name>[^<\n]+)<｜tool▁sep｜>",
                "close": "<｜tool▁call▁end｜>",
            },
            "end_of_calls": {"open": "<｜tool▁calls▁end｜>"},
        },
        ("<｜tool▁calls▁begin｜>",),
        is_special=True,
    ),
    "openai": Family(
        {
            **_HARMONY,
            "tool_calls": NAMED
            | {
                "open_pattern": r"(?: to=functions\.(?P<name>[\w.-]+)<\|channel\|>commentary"
                r"|<\|channel\|>commentary to=functions\.(?P<name>[\w.-]+))"
                r"(?: ?(?:<\|constrain\|>)?json)?<\|message\|>",
                "close": ["<|call|>", "<|end|>"],
            },
        },
        ("<|channel|>", "<|message|>"),
        is_special=True,
    ),
    "mistral": Family(
        {
            "tool_calls": NAMED
            | {"open_pattern": r"\[TOOL_CALLS\](?P<name>[\w.-]+)\[ARGS\]", "close_pattern": r"(?=\[TOOL_CALLS\])"},
            "tool_calls_list": WHOLE | {"open_pattern": r"\[TOOL_CALLS\]\s*(?=\[)"},
        },
        ("[TOOL_CALLS]",),
        is_special=True,
    ),
    "llama3_json": Family(
        {"tool_calls": WHOLE | {"open_pattern": r"\A\s*(?=\{\s*\"(?:type|name)\")|<\|python_tag\|>"}},
        ("<|python_tag|>",),
        is_special=True,
    ),
    "hermes": Family({"tool_calls": WHOLE | {"open": "<tool_call>", "close": "</tool_call>"}}, ("<tool_call>",)),
}
"""Forms of tool calls; of several whose marks a template has, the first is meant."""
REASONING: Mapping[str, Family] = {
    "openai_gptoss": Family(_HARMONY, ("<|channel|>", "<|message|>"), is_special=True),
    "mistral": Family(_think("[THINK]", "[/THINK]"), ("[THINK]",), is_special=True),
    "deepseek_r1": Family(_think("<think>", "</think>"), opens=True),
    "qwen3": Family(_think("<think>", "</think>"), ("<think>",)),
    "gemma4": Family(_think("<|channel>thought\n", "<channel|>"), ("<|channel>",), is_special=True),
}
"""Forms of reasoning, likewise."""
SAME_CALLS: Mapping[str, str] = {
    "llama4_json": "llama3_json",
    "qwen3_xml": "qwen3_coder",
    "glm47": "glm45",
    "qwen3_json": "hermes",
}
"""Further names of vLLM's for the same forms of calls."""
SAME_REASONING: Mapping[str, str] = {"deepseek_v3": "qwen3", "glm45": "qwen3", "glm47": "qwen3", "kimi_k2": "qwen3"}
"""Further names of vLLM's for the same forms of reasoning."""
