"""JSON schemas in the form that llguidance can keep to: bounded whitespace, formats and keys. Pure.

llguidance allows any amount of whitespace, refuses formats that it does not know, and has no way to keep a key from
coming twice. Each of these is mended here, or refused.
"""

import json
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

WHITESPACE = r"[ \t]|\r?\n[ \t]{0,32}"
"""Whitespace between two parts of JSON: a space, or a line break with an indentation. Without a bound an uncertain
model may write whitespace until `max_tokens`."""
OPTIONS = "x-guidance"
"""Key of llguidance's options within a schema."""
FORMATS = frozenset(
    ("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri", "unknown")
)
"""Formats that llguidance keeps to. JSON Schema makes every other one an annotation."""
_PATTERN = f'"whitespace_pattern":{json.dumps(WHITESPACE)}'
ANY_OBJECT = f'{{"type":"object","{OPTIONS}":{{{_PATTERN}}}}}'
"""Schema of any JSON object."""
_ONE_SPACE = '"whitespace_flexible":false,"item_separator":", ?","key_separator":": ?"'
_MAPS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
_SINGLE = (
    "items",
    "additionalItems",
    "additionalProperties",
    "contains",
    "else",
    "if",
    "not",
    "propertyNames",
    "then",
    "unevaluatedItems",
    "unevaluatedProperties",
)
_LARK = re.compile(r'"(?:\\.|[^"\\\n])*"|//[^\n]*|/(?:\\.|[^/\\\n])+/|%json\s*')
"""Parts of a Lark grammar in which `%json` is text, and `%json` itself."""

Covers = Callable[[Sequence[str], str], bool]
"""Function of keys and a pattern that returns whether the pattern matches these keys only."""


class SchemaFault(ValueError):
    """A schema that no grammar here can keep to."""


def prepared_schema(text: str, covers: Covers) -> str:
    """Return a schema, as JSON, in the form for llguidance.

    Raises SchemaFault for a part that cannot be kept to, and ValueError for text that is no JSON.
    """
    return _json(_prepared(json.loads(text), covers))


def prepared_grammar(text: str, covers: Covers) -> str:
    """Return a grammar in llguidance's Lark with each of its schemas (`%json`) in the form for llguidance.

    Raises SchemaFault, and ValueError as above.
    """
    parts, at = [], 0
    while (match := _LARK.search(text, at)) is not None:
        parts.append(text[at : match.end()])
        at = match.end()
        if match[0].startswith("%json"):
            try:
                schema, end = json.JSONDecoder().raw_decode(text, at)
            except ValueError:
                continue  # its compiler reports errors
            parts.append(_json(_prepared(schema, covers)))
            at = end
    return "".join(parts) + text[at:]


def with_one_space(text: str) -> str:
    """Return a prepared schema or grammar that allows one space after a comma and a colon, and no other whitespace."""
    return text.replace(_PATTERN, _ONE_SPACE)  # as `_json` writes it; within a string its quotes would be escaped


def _json(schema: Any) -> str:
    """Return a schema as short JSON: it may have grown, and its length is limited.

    Raises ValueError for a number or a character that JSON has not.
    """
    text = json.dumps(schema, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    text.encode()
    return text


def _prepared(schema: Any, covers: Covers) -> Any:
    """Change a schema in place and return it."""
    if schema is True:
        schema = {}
    if not isinstance(schema, dict):
        return schema
    waiting = [schema]
    while waiting:  # no recursion: a schema may be nested deeply
        one = waiting.pop()
        if isinstance(form := one.get("format"), str) and form not in FORMATS:
            del one["format"]
        _check_least(one)
        _merge_covered(one, covers)
        waiting += _parts(one)
    options = schema.setdefault(OPTIONS, {})
    if isinstance(options, dict) and not {"whitespace_flexible", "whitespace_pattern"} & options.keys():
        options["whitespace_pattern"] = WHITESPACE
    return schema


def _parts(schema: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Return the schemas directly within one; values such as those of `enum` are none."""
    values: list[Any] = [schema.get(name) for name in _SINGLE]
    for name in _MAPS:
        if isinstance(named := schema.get(name), dict):
            values += named.values()
    for name in _LISTS:
        if isinstance(listed := schema.get(name), list):
            values += listed
    return (value for value in values if isinstance(value, dict))


def _check_least(schema: dict[str, Any]) -> None:
    """Check that an object with the smallest number of keys can have so many different ones.

    A key outside `properties` may come any number of times, and then counts once. Raises SchemaFault.
    """
    least = schema.get("minProperties")
    may_repeat = schema.get("additionalProperties") is not False or bool(_dict(schema, "patternProperties"))
    if isinstance(least, int) and may_repeat and least > len(_required(schema)) + 1:
        reason = "keys outside of properties may repeat: list keys in required"
        raise SchemaFault(f"minProperties {least} cannot be kept to, since {reason}")


def _merge_covered(schema: dict[str, Any], covers: Covers) -> None:
    """Move a pattern's schema to the properties where the pattern matches no other key.

    llguidance excludes the properties from the pattern's keys, and a model that begins one more key could not go on.
    """
    patterns, named = _dict(schema, "patternProperties"), _dict(schema, "properties")
    names = list(dict.fromkeys((*named, *_required(schema))))
    for pattern in list(patterns):
        matching = [name for name in names if _matches(pattern, name)]
        if matching and covers(matching, pattern):
            also = patterns.pop(pattern)
            for name in matching:
                named[name] = {"allOf": [named[name], also]} if name in named else also
            schema["properties"] = named
    if "patternProperties" in schema and not patterns:
        del schema["patternProperties"]


def _matches(pattern: str, name: str) -> bool:
    try:
        return re.search(pattern, name) is not None
    except re.error:
        return False  # its compiler reports errors


def _required(schema: dict[str, Any]) -> list[str]:
    required = schema.get("required")
    return list({name: None for name in required if isinstance(name, str)}) if isinstance(required, list) else []


def _dict(schema: dict[str, Any], name: str) -> dict[str, Any]:
    value = schema.get(name)
    return value if isinstance(value, dict) else {}
