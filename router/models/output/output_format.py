"""A model's output as text, reasoning and tool calls, in pieces as it is generated. Pure.

transformers' ResponseParser does the parsing; here are its templates, by model, and exact text where a call is none.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import Any, Protocol

from cluster.errors import StartError
from router.models.output.call_reading import (
    CALLS,
    REASONING,
    SAME_CALLS,
    SAME_REASONING,
    TEXT,
    CallPiece,
    CallReader,
    Family,
    Fields,
    calls_of,
    is_readable,
)

NONE = "none"
"""Name that switches a parser off."""
MIN_CLOSING_CHARS = 3
"""Characters of a closing mark at an output's end that are nothing else: `</` may begin any tag."""
AUTO = "auto"
"""Name that lets the chat template decide."""


@dataclass(frozen=True, slots=True)
class Reasoning:
    """A piece of reasoning."""

    text: str


Piece = str | Reasoning | CallPiece
"""A piece of an output; plain text is for the reader. A call may come in pieces, too, and then comes whole."""


class OutputParser(Protocol):
    """Parser of one choice's output.

    The pieces joined do not depend on how the text was cut.
    """

    num_reasoning: int
    """Tokens within reasoning so far."""

    def push(self, text: str, num_tokens: int = 0) -> list[Piece]:
        """Return the pieces that are now certain; `num_tokens` is how many tokens made the text."""
        ...

    def finish(self) -> list[Piece]:
        """End the output; return the remaining pieces."""
        ...


class OutputFormat:
    """Forms of one model's reasoning and calls."""

    def __init__(self, calls: str, reasoning: str, template: Mapping[str, Any] | None = None) -> None:
        """Join two forms by name, NONE for neither, or take a model's own response template.

        Raises StartError for an unknown name.
        """
        self.calls, self.reasoning = SAME_CALLS.get(calls, calls), SAME_REASONING.get(reasoning, reasoning)
        call_fields = _fields_of("tool_parser", CALLS, SAME_CALLS, self.calls)
        reasoning_fields = _fields_of("reasoning_parser", REASONING, SAME_REASONING, self.reasoning)
        families = [CALLS.get(self.calls), REASONING.get(self.reasoning)]
        self.keeps_special_tokens = any(family.is_special for family in families if family is not None)
        """Whether parsing needs special tokens in the text."""
        own = {} if template is None else _own_fields(template)
        if own:
            self.keeps_special_tokens = True
        self._with_calls = {**(own or {**call_fields, **reasoning_fields})}
        self._without_calls = {
            name: field for name, field in self._with_calls.items() if not name.startswith("tool_calls")
        }
        self._plain, self._calling = _Template(self._without_calls), _Template(self._with_calls)
        self._forced = _Template({**self._without_calls, **CALLS["hermes"].fields})
        self._opens = self.reasoning in REASONING and REASONING[self.reasoning].opens
        reasoned = self._without_calls.get("reasoning", {})
        self._opening, closing = _first_literal(reasoned, "open"), _first_literal(reasoned, "close")
        self.reasoning_marks = (self._opening, closing) if self._opening else ("", "")
        """Texts around reasoning; empty where these are not fixed ones."""

    @classmethod
    def of(
        cls, calls: str, reasoning: str, chat_template: str, response_template: Mapping[str, Any] | None
    ) -> "OutputFormat":
        """Return the format by name; AUTO: the model's response template, or the form that the chat template shows.

        Raises StartError.
        """
        if calls == AUTO and reasoning == AUTO and response_template is not None:
            return cls(NONE, NONE, response_template)
        if calls == AUTO:
            calls = _shown_by(CALLS, chat_template) or ("hermes" if chat_template else NONE)
        if reasoning == AUTO:
            reasoning = _shown_by(REASONING, chat_template) or NONE
        return cls(calls, reasoning)

    @property
    def has_reasoning(self) -> bool:
        return "reasoning" in self._without_calls

    def opens_reasoning(self, generation_prompt: str) -> bool:
        """Return whether an output begins within reasoning, after this end of its prompt."""
        return self._opens or self.is_in_reasoning(generation_prompt)

    def is_in_reasoning(self, text: str) -> bool:
        """Return whether a text ends within reasoning."""
        opening, closing = self.reasoning_marks
        return bool(opening) and text.rfind(opening) > text.rfind(closing)

    def parser(
        self, parses_calls: bool, begun: str = "", tools: Sequence[str] = (), forced: bool = False
    ) -> OutputParser | None:
        """Return a parser for one choice; None where all output is text.

        `begun` is the text of the answer before the output; the pieces have none of it, but for a call that it began.
        `tools` are the request's, as JSON: their schemas give arguments types where the form has none. `forced`: the
        output is held to calls of Hermes' form.
        """
        template = self._forced if forced else self._calling if parses_calls else self._plain
        if not template.fields:
            return None
        return _TemplateParser(template, begun, [json.loads(tool) for tool in tools], forced)


class _Template:
    """Response template, compiled at its first use."""

    def __init__(self, fields: Fields) -> None:
        self.fields = fields
        self.openings = {name: _literals(field, "open") for name, field in fields.items()}
        self.closings = {name: _literals(field, "close") for name, field in fields.items()}
        self.tagged = {name for name, field in fields.items() if field.get("content", "text") not in ("text", "json")}
        """Fields whose value says nothing of its end, as values between tags do not."""
        self.readable = {name for name, field in fields.items() if is_readable(field)}

    @cached_property
    def compiled(self) -> Any:
        from transformers.utils.chat_parsing.response_templates import load_response_template

        fields = {"content": TEXT, **self.fields}
        return load_response_template({"start_anchor_pattern": r"\A", "fields": fields})


class _TemplateParser:
    """Parser by a response template.

    Whitespace next to a call or to reasoning is dropped. Text that is not exactly a call stays unchanged.
    """

    def __init__(self, template: _Template, prefix: str, tools: Sequence[Any], forced: bool) -> None:
        self._parser: Any = _parser_class()(template.compiled, prefix=prefix, tools=list(tools))
        self._open, self._close = template.openings, template.closings
        self._readable, self._tagged = template.readable, template.tagged
        self._forced, self._names = forced, _names_of(tools)
        self._reader: CallReader | None = None
        """Reader of the present region, where it may be a call."""
        self._held = ""
        """Whitespace that is text only if more text of its region follows."""
        self._dropped = ""
        """Whitespace that was held when the present call began."""
        self._at_boundary = False
        """Whether leading whitespace is next to a call or to reasoning."""
        self._after_text = True
        """Whether the region before the next content is text as well."""
        self._crossed = False
        """Whether the output was anything but content so far."""
        self._in_reasoning = False
        """Whether the output's present end is reasoning."""
        self.num_reasoning = 0
        self._is_broken = False
        self._ended = False
        self._pieces(self._parser.initial_events)  # only the state after these counts, since the client has the text
        self._held = self._dropped = ""
        self._reader = None  # a call that the prompt began is given as a whole

    def push(self, text: str, num_tokens: int = 0) -> list[Piece]:
        if self._is_broken:
            return [text] if text else []
        was_in_reasoning = self._in_reasoning
        try:
            pieces = self._pieces(self._parser.feed(text))
        except (ValueError, KeyError, RecursionError):  # a model's own template may raise on what it cannot parse
            return self._rest()
        if was_in_reasoning or self._in_reasoning:
            self.num_reasoning += num_tokens
        return pieces

    def finish(self) -> list[Piece]:
        self._ended = True
        if self._is_broken:
            return []
        try:
            pieces = self._pieces(self._parser.finalize()[1])
        except (ValueError, KeyError, RecursionError):
            return self._rest()
        if not self._in_reasoning and not (self._crossed and self._at_boundary):
            self._add_text(self._held, pieces)
        return pieces

    def _rest(self) -> list[Piece]:
        """Give up parsing; return the rest of the output so far as text."""
        pieces = self._pieces(self._parser.events)
        self._is_broken, self._in_reasoning = True, False
        if self._end_call(pieces):
            return pieces
        return [*pieces, self._dropped + self._parser.unread]

    def _pieces(self, events: Sequence[Mapping[str, Any]]) -> list[Piece]:
        pieces: list[Piece] = []
        for event in events:
            field, kind = event["field"], event["type"]
            if kind == "region_open":
                self._enter(field)
                if field in self._readable:
                    captures = event["captures"]
                    self._reader = CallReader(self._is_known, captures.get("name", ""), captures.get("id", ""))
            elif field.startswith("tool_calls"):
                if kind == "region_close":
                    self._call(field, event, pieces)
                elif self._reader is not None:
                    pieces += self._reader.push(event["text"])
            elif kind == "region_chunk" and field in ("content", "reasoning"):
                self._say(event["text"], pieces)
            elif field == "reasoning":
                self._in_reasoning, self._held = False, ""
        return pieces

    def _enter(self, field: str) -> None:
        self._dropped, self._held = self._held, ""
        self._in_reasoning = field == "reasoning"
        if field == "content":
            self._at_boundary, self._after_text = not self._after_text, False
        else:
            self._at_boundary, self._after_text = True, False
            self._crossed = self._crossed or not field.startswith("tool_calls")

    def _say(self, text: str, pieces: list[Piece]) -> None:
        text = self._held + text
        if self._at_boundary and self._crossed:
            text = text.lstrip()
        certain = text.rstrip()
        self._held = text[len(certain) :]
        if certain:
            self._at_boundary = False
            pieces.append(Reasoning(certain) if self._in_reasoning else certain)

    def _is_known(self, name: str) -> bool:
        return name in self._names or (self._forced and bool(name))

    def _end_call(self, pieces: list[Piece]) -> bool:
        """Add the call that the present region began; return whether it began one."""
        reader, self._reader = self._reader, None
        call = reader.finish() if reader is not None and (reader.has_begun or self._ended) else None
        if call is None:
            return False
        self._crossed = True
        pieces.append(call)
        return True

    def _call(self, field: str, event: Mapping[str, Any], pieces: list[Piece]) -> None:
        if self._end_call(pieces):
            return
        closing = self._close.get(field, ()) if self._ended else ()
        value, raw = event["value"], self._dropped + event["raw"]
        calls = calls_of(value, closing)
        for opening in self._open.get(field, ()):  # a mark may only have been spoken of before the call
            if not calls and isinstance(value.get("function"), str) and opening in value["function"]:
                calls = calls_of(value | {"function": value["function"].rpartition(opening)[2]}, closing)
                if calls:
                    self._add_text(raw.rpartition(opening)[0].rstrip(), pieces)
        if calls:
            self._crossed = True
            if event["is_cut"] and field in self._tagged:
                calls[-1] = replace(calls[-1], is_cut=True)
            pieces += calls
            return
        self._after_text = True
        self._held = raw[len(raw.rstrip()) :]
        self._add_text(raw[: len(raw) - len(self._held)], pieces)

    def _add_text(self, text: str, pieces: list[Piece]) -> None:
        if text:
            pieces.append(text)


@cache
def _parser_class() -> type[Any]:
    """Return transformers' parser, extended by the raw text of each region."""
    from transformers.utils.chat_parsing import ResponseParser  # already imported by chat templates; slow otherwise

    class RawParser(ResponseParser):  # type: ignore[misc]  # transformers has no types
        _opened_at = 0
        _found: Any = None
        """Mark at which the present region ends; None where only the output's end ends it."""
        _begun_chars = 0
        """Characters before the output, which no event has."""
        events: list[Any]
        """Events of the present call, also where it raises."""

        @property
        def unread(self) -> str:
            """Text from the beginning of the present region on."""
            text: str = self._buffer[max(self._opened_at, self._begun_chars) :]
            return text

        def _consume_prefix(self, prefix: str) -> None:
            super()._consume_prefix(prefix)
            self._begun_chars = len(self._buffer)

        def _accumulate(self, events: Any, text: str) -> None:
            num_before, begun = len(events), text[: max(0, self._begun_chars - self._pos)]
            super()._accumulate(events, text)
            for event in events[num_before:]:
                if event["type"] == "region_chunk":
                    event["text"] = event["text"].removeprefix(begun)

        def _process(self, events: Any, eos: bool) -> None:
            self.events = events
            super()._process(events, eos)

        def _scan(self, watch: Any, eos: bool) -> Any:
            self._found, hold_start = super()._scan(watch, eos)
            return self._found, hold_start

        def _open_explicit(self, events: Any, field: Any, m: Any) -> None:
            self._opened_at = m.start()
            super()._open_explicit(events, field, m)
            events[-1]["captures"] = self._captures

        def _close_current(self, events: Any) -> None:
            closed, is_cut = len(events), self._found is None and not self._nearly_closed()
            super()._close_current(events)
            for event in events[closed:]:
                event["is_cut"] = is_cut
                event["raw"] = self._buffer[max(self._opened_at, self._begun_chars) : self._pos]

        def _nearly_closed(self) -> bool:
            """Return whether the output ends within the closing mark, at the mark's end, or in a region without one."""
            field = self._spec.fields.get(self._current)
            if field is None or field.close_re is None:
                return True
            match = field.close_re.search(self._buffer, self._opened_at, partial=True)
            return match is not None and match.end() - match.start() >= MIN_CLOSING_CHARS

    return RawParser


def _names_of(tools: Sequence[Any]) -> frozenset[str]:
    """Return the names of the tools that have one."""
    functions = [tool.get("function") for tool in tools if isinstance(tool, dict)]
    names = [function.get("name") for function in functions if isinstance(function, dict)]
    return frozenset(name for name in names if isinstance(name, str))


def _fields_of(setting: str, families: Mapping[str, Family], same: Mapping[str, str], name: str) -> Fields:
    if name == NONE:
        return {}
    if (family := families.get(name)) is None:
        known = ", ".join(sorted({NONE, AUTO, *families, *same}))
        raise StartError(setting, f"unknown format {name!r}; known are {known}")
    return family.fields


def _own_fields(template: Mapping[str, Any]) -> dict[str, Any]:
    """Return a model's own fields under our names."""
    return {_OURS.get(name, name): field for name, field in template["fields"].items()}


_OURS = {"reasoning_content": "reasoning", "thinking": "reasoning"}


def _shown_by(families: Mapping[str, Family], chat_template: str) -> str:
    """Return the first form whose marks the template has; empty where there is none."""
    for name, family in families.items():
        if family.marks and all(mark in chat_template for mark in family.marks):
            return name
    return ""


def _literals(field: Mapping[str, Any], key: str) -> tuple[str, ...]:
    value = field.get(key, ())
    return (value,) if isinstance(value, str) else tuple(value)


def _first_literal(field: Mapping[str, Any], key: str) -> str:
    return next(iter(_literals(field, key)), "")
