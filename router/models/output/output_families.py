"""How families of models write reasoning and tool calls: fields of transformers' response templates. Data only.

Names are those of vLLM's --tool-call-parser and --reasoning-parser. A template's fields are described in
`transformers.utils.chat_parsing`. Fields named `tool_calls...` hold calls, `reasoning` holds reasoning, `content` is
text for the reader, and any other field is dropped. Without a `content` of its own a family has all other text as
content.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

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
