"""Calls of tools in what a model says, as it says it. Pure.

The form is the one that Hermes and Qwen models write, and others after them: <tool_call>{"name": ..., "arguments":
{...}}</tool_call>. What is not quite that stays text, to the letter.
"""

import json
import re
from dataclasses import dataclass

OPEN, CLOSE = "<tool_call>", "</tool_call>"


def _no_number(name: str) -> float:
    raise ValueError(f"{name} is no JSON")


_BEGUN = re.compile(r'\s*\{"name": "([^"]*)", "arguments": (.*)', re.DOTALL)
"""A call whose form was forced, and which is not complete."""
_DECODER = json.JSONDecoder(strict=False, parse_constant=_no_number)


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One that was made."""

    name: str
    arguments: str
    """JSON, as a rule of an object."""


class _CutOff(Exception):
    """What looks like the end of a call is inside of a string."""


class ToolCallParser:
    """Of one choice. Text that may belong to a call is held back; whitespace next to a call is dropped.

    What comes out depends on the text alone, and not on the pieces it came in. Where calls are `forced`, one that is
    cut off by a limit is a call with what there is of its arguments.
    """

    def __init__(self, forced: bool = False) -> None:
        self._forced = forced
        self._held = ""
        self._opening: str | None = None
        """Within a call: what stood before its content, in case it is none."""
        self._seen = 0
        """Of the content: how much of it has no end that was not tried."""
        self._after_call = False
        self.num_calls = 0

    def push(self, text: str) -> list[str | ToolCall]:
        """What is certain now."""
        self._held += text
        found: list[str | ToolCall] = []
        while self._step(found):
            pass
        return found

    def finish(self) -> list[str | ToolCall]:
        """No more text: what was held back. A call whose end was not said counts where it is complete."""
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
        """Whether there may be more to find."""
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
        if call is None:  # the tag was only spoken of, and the end may be that of another one
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
    """None for what is no call. Raises _CutOff where it ends within a string."""
    content = content.strip()
    try:
        value, end = _DECODER.raw_decode(content)
    except json.JSONDecodeError as error:
        if error.msg.startswith("Unterminated string"):
            raise _CutOff from None
        return None
    except (ValueError, RecursionError):  # a number or a nesting that no reader takes
        return None
    if end < len(content) or not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return None
    arguments = value.get("arguments", value.get("parameters", {}))
    return ToolCall(
        value["name"], arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    )


def _overlap(text: str, tag: str) -> int:
    """Length of the longest end of `text` that begins `tag`, and is not all of it."""
    return next((n for n in range(min(len(text), len(tag) - 1), 0, -1) if text.endswith(tag[:n])), 0)
