"""Parser of tool calls in a model's output, incremental.

Pure.

The form is that of Hermes, Qwen and later models: <tool_call>{"name": ..., "arguments": {...}}</tool_call>. Text that
is not exactly a call stays unchanged.
"""

import json
import re
from dataclasses import dataclass

OPEN, CLOSE = "<tool_call>", "</tool_call>"


def _no_number(name: str) -> float:
    raise ValueError(f"{name} is no JSON")


_BEGUN = re.compile(r'\s*\{"name": "([^"]*)", "arguments": (.*)', re.DOTALL)
"""A forced call that is not complete."""
_DECODER = json.JSONDecoder(strict=False, parse_constant=_no_number)


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A tool call."""

    name: str
    arguments: str
    """Arguments as JSON, usually an object."""


class _CutOff(Exception):
    """The end marker of a call turned out to be inside a string."""


class ToolCallParser:
    """Parser of one choice.

    Text that may belong to a call is held back; whitespace next to a call is dropped.

    The result depends on the text alone, and not on its pieces. A `forced` call that a limit cuts off counts as a call
    with the arguments so far.
    """

    def __init__(self, forced: bool = False) -> None:
        self._forced = forced
        self._held = ""
        self._opening: str | None = None
        """Text before the content of the present call, in case it is none."""
        self._seen = 0
        """Length of the content in which every end marker was tried."""
        self._after_call = False
        self.num_calls = 0

    def push(self, text: str) -> list[str | ToolCall]:
        """Return the text and calls that are now certain."""
        self._held += text
        found: list[str | ToolCall] = []
        while self._step(found):
            pass
        return found

    def finish(self) -> list[str | ToolCall]:
        """End the text; return the part held back.

        A call without its end marker counts where it is complete.
        """
        held, self._held = self._held, ""
        if self._opening is None:
            return [held] if held else []
        opening, self._opening = self._opening, None
        content = held[: len(held) - _overlap(held, CLOSE)]
        try:
            call = _read(content)
        except _CutOff:
            call = None
        if call is None and self._forced and (begun := _BEGUN.match(content)):
            call = ToolCall(begun[1], begun[2])
        if call is None:
            return [opening + held]
        self.num_calls += 1
        return [call]

    def _step(self, found: list[str | ToolCall]) -> bool:
        """Take one step; return whether there may be more to find."""
        return self._outside(found) if self._opening is None else self._inside(self._opening, found)

    def _outside(self, found: list[str | ToolCall]) -> bool:
        if self._after_call:
            self._held = self._held.lstrip()
        at = self._held.find(OPEN)
        text = self._held[: at if at >= 0 else len(self._held) - _overlap(self._held, OPEN)]
        certain = text.rstrip()
        if certain:
            found.append(certain)
            self._after_call = False
        if at < 0:
            self._held = self._held[len(certain) :]
            return False
        self._opening = text[len(certain) :] + OPEN
        self._held, self._seen = self._held[at + len(OPEN) :], 0
        return True

    def _inside(self, opening: str, found: list[str | ToolCall]) -> bool:
        at = self._held.find(CLOSE, self._seen)
        if at < 0:
            self._seen = max(self._seen, len(self._held) - len(CLOSE) + 1)
            return False
        end = at + len(CLOSE)
        try:
            call = _read(self._held[:at])
        except _CutOff:
            self._seen = end
            return True
        if call is None:  # the tag was only mentioned, and the end may be that of another call
            again = self._held.find(OPEN, 0, at)
            end = end if again < 0 else again
            found.append(opening + self._held[:end])
        else:
            found.append(call)
            self.num_calls += 1
        self._after_call = call is not None
        self._opening, self._held = None, self._held[end:]
        return True


def _read(content: str) -> ToolCall | None:
    """Parse a call; None for anything else.

    Raises _CutOff where it ends within a string.
    """
    content = content.strip()
    try:
        value, end = _DECODER.raw_decode(content)
    except json.JSONDecodeError as error:
        if error.msg.startswith("Unterminated string"):
            raise _CutOff from None
        return None
    except (ValueError, RecursionError):  # a number or a nesting that no reader accepts
        return None
    if end < len(content) or not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return None
    arguments = value.get("arguments", value.get("parameters", {}))
    return ToolCall(
        value["name"], arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    )


def _overlap(text: str, tag: str) -> int:
    """Return the length of the longest suffix of `text` that is a proper prefix of `tag`."""
    return next((n for n in range(min(len(text), len(tag) - 1), 0, -1) if text.endswith(tag[:n])), 0)
