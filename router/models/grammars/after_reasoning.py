"""Structured output that follows reasoning: a grammar of free reasoning, its end, and then the required form. Pure."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field

from cluster.errors import InvalidRequest
from engine.sampling.structured_output import FIELD
from protos import inference_pb2 as pb
from router.models.grammars.forced_calls import mark


@dataclass(frozen=True, slots=True)
class ReasoningMarks:
    """Marks around a model's reasoning."""

    opening: str
    closing: str
    added_tokens: Mapping[str, int] = field(default_factory=dict)
    """The tokenizer's added tokens by their text: no text of a grammar matches one."""


def after_reasoning(form: pb.StructuredOutput, marks: ReasoningMarks, begun: bool) -> pb.StructuredOutput:
    """Return a form that allows reasoning before the given one; `begun`: the prompt opened it already.

    Raises InvalidRequest for a grammar of the client's own, which cannot be a part of another one.
    """
    if marks.closing not in marks.added_tokens:
        thought = f"thought[suffix={json.dumps(marks.closing)}]: /(?s:.*)/"
        rest = "thought"
    else:
        thought = "thought: /(?s:.*)/"
        rest = f"thought {mark(marks.closing, marks.added_tokens)}"
    opening = mark(marks.opening, marks.added_tokens)
    start = f"start: {rest} SPACE body" if begun else f"start: ({opening} {rest})? SPACE body"
    return pb.StructuredOutput(grammar="\n".join((start, thought, r"SPACE: /\s{0,4}/", *_body(form))))


def _body(form: pb.StructuredOutput) -> list[str]:
    """Return the rules of the form, from `body` on."""
    if form.HasField("json_schema"):
        return [f"body: %json {form.json_schema}"]
    if form.json_object:
        return ['body: %json {"type": "object"}']
    if form.HasField("regex"):
        pattern = form.regex.replace("\\/", "/").replace("/", "\\x2F").replace("\n", "\\n")
        return [f"body: /{pattern}/"]
    if form.choice:
        return ["body: " + " | ".join(json.dumps(choice) for choice in form.choice)]
    first, *others = form.grammar.split("\n")
    if not first.startswith(CALLS):
        message = 'a grammar cannot follow reasoning: switch that off, as by reasoning_effort "none"'
        raise InvalidRequest(f"{FIELD}.grammar", message)
    return [first.replace("start:", "body:", 1), *others]


CALLS = "start: call"
"""Beginning of a grammar of forced calls (`forced_calls.py`)."""
