"""Grammar of a forced tool call.

Pure.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cluster.errors import InvalidRequest

OPEN, CLOSE = "<tool_call>", "</tool_call>"
NO_TOKENS: Mapping[str, int] = {}
ANY_ARGUMENTS = {"type": "object"}
COMPACT = {"x-guidance": {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}}
"""llguidance's options for compact JSON in the models' own style; otherwise an uncertain model may write whitespace
until `max_tokens`."""
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")


@dataclass(frozen=True, slots=True)
class Function:
    """A tool that may be called."""

    name: str
    parameters: dict[str, Any] | None
    """JSON schema of its arguments; None: any."""


def call_grammar(functions: Sequence[Function], single: bool, added_tokens: Mapping[str, int] = NO_TOKENS) -> str:
    """Return the grammar, in llguidance's Lark, of a call of one of the functions, or of several unless `single`.

    The text has Hermes' form. `added_tokens` are the tokenizer's added tokens by their text: llguidance takes one in
    angle brackets for special, and no text of a grammar matches it. Raises InvalidRequest for an invalid name.
    """
    rules = ["start: call" if single else 'start: call ("\\n" call)*']
    rules.append("call: " + " | ".join(f"call_{number}" for number in range(len(functions))))
    for number, function in enumerate(functions):
        if not _NAME.fullmatch(function.name):
            limits = "1 to 64 letters, digits, underscores, dots and hyphens"
            raise InvalidRequest(
                f"tools[{number}].function.name", f"must be {limits}, so that a call of the tool can be forced"
            )
        before = f'\n{{"name": "{function.name}", "arguments": '
        schema = COMPACT | (ANY_ARGUMENTS if function.parameters is None else function.parameters)
        inside = f'{json.dumps(before)} arguments_{number} "}}\\n"'
        rules.append(f"call_{number}: {mark(OPEN, added_tokens)} {inside} {mark(CLOSE, added_tokens)}")
        rules.append(f"arguments_{number}: %json {json.dumps(schema)}")
    return "\n".join(rules)


def mark(text: str, added_tokens: Mapping[str, int]) -> str:
    """Return a mark in a grammar: the added token of this text, or the text."""
    token_id = added_tokens.get(text)
    return json.dumps(text) if token_id is None else f"<[{token_id}]>"
