"""Reading of a JSON body field by field.

Every mistake is an InvalidRequest that names the field. A field that nobody reads is ignored, and named once in the
answer, unless its loss would change the answer's meaning (REFUSED).
"""

import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from cluster.errors import InvalidRequest

REFUSED: Mapping[str, tuple[Any, ...]] = {
    "add_generation_prompt": (True,),
    "add_special_tokens": (True,),
    "allowed_token_ids": ([],),
    "audio": (),
    "bad_words": ([],),
    "beam_width": (),
    "best_of": (1,),
    "chat_template": (),
    "continue_final_message": (False,),
    "documents": ([],),
    "early_stopping": (False,),
    "echo": (False,),
    "function_call": ("none",),
    "functions": ([],),
    "include_stop_str_in_output": (False,),
    "frequency_penalty": (0, 0.0),
    "length_penalty": (1, 1.0),
    "logit_bias": ({},),
    "logits_processors": ([],),
    "media_io_kwargs": ({},),
    "min_tokens": (0,),
    "mm_processor_kwargs": ({},),
    "modalities": (["text"],),
    "n": (1,),
    "presence_penalty": (0, 0.0),
    "prompt_embeds": (),
    "response_format": ({"type": "text"},),
    "return_tokens_as_token_ids": (False,),
    "stop": ([],),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "truncate_prompt_tokens": (-1,),
    "use_beam_search": (False,),
    "web_search_options": (),
    # structured output, nested
    "disable_additional_properties": (False,),
    "structural_tag": (),
    "whitespace_pattern": (),
}
"""Fields whose silent loss would change an answer's meaning, with the values that ask for nothing.

This counts where an API does not read them.
"""
MAX_IGNORED = 16
"""Ignored fields that are named."""
INT32, INT64 = 1 << 31, 1 << 63
MAX_SHOWN_CHARS = 80

_TEXT = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"', re.DOTALL)
_ESCAPED_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
_NUMBER = re.compile(r"\[\d+\]")
_T = TypeVar("_T")


def parse_object(body: bytes, max_values: int) -> dict[str, Any]:
    """Parse a JSON object of at most so many values.

    Raises InvalidRequest for anything else, and for invalid text inside.
    """
    # Each value but the first follows one of these bytes. Inside texts they count, too: only then is the limit checked
    # without texts, which takes longer.
    if _num_separators(body) > max_values and _num_separators(_TEXT.sub(b"", body)) > max_values:
        raise InvalidRequest("", f"the body holds more than {max_values} JSON values")
    try:
        values = json.loads(body, parse_constant=_no_number)
        if _ESCAPED_SURROGATE.search(body):
            json.dumps(values, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise InvalidRequest("", "the body has an unpaired surrogate, which is not a character") from None
    except (ValueError, RecursionError) as error:
        raise InvalidRequest("", f"the body is not JSON: {error}") from None
    if not isinstance(values, dict):
        raise InvalidRequest("", "the body must be a JSON object")
    return values


def _num_separators(body: bytes) -> int:
    return body.count(b",") + body.count(b"[") + body.count(b"{")


def _no_number(name: str) -> float:
    raise ValueError(f"{name} is not JSON")


class IgnoredFields:
    """Names of the fields of one body that had no effect."""

    def __init__(self, strict: bool = False) -> None:
        """Create the collection; a `strict` one refuses every field instead."""
        self.strict = strict
        self.names: dict[str, None] = {}
        """Paths without numbers, in order, at most MAX_IGNORED."""

    def add(self, path: str) -> None:
        name = _NUMBER.sub("[]", path)[:MAX_SHOWN_CHARS]
        if len(self.names) < MAX_IGNORED and name.isascii() and name.isprintable():
            self.names[name] = None


class Fields:
    """Fields of one object, each taken once.

    A `null` field counts as absent.
    """

    def __init__(self, values: Any, where: str = "", ignored: IgnoredFields | None = None) -> None:
        """Wrap an object at path `where`, empty at the top.

        Raises InvalidRequest unless `values` is an object.
        """
        self.ignored = IgnoredFields() if ignored is None else ignored
        if not isinstance(values, dict):
            raise InvalidRequest(where, f"must be an object, not {shown(values)}")
        self._values = {name: value for name, value in values.items() if value is not None}
        self._where = where

    def path(self, name: str) -> str:
        return f"{self._where}.{name}" if self._where else name

    def given(self, name: str) -> bool:
        """Return whether the field is there and not taken yet."""
        return name in self._values

    def peek(self, name: str) -> Any:
        """Return a field without taking it; None where it is absent."""
        return self._values.get(name)

    def take(self, name: str) -> Any:
        """Take a field; None where it is absent."""
        return self._values.pop(name, None)

    def refuse(self, name: str, message: str) -> InvalidRequest:
        return InvalidRequest(self.path(name), message)

    def rest(self) -> str:
        """Take all remaining fields together, as JSON."""
        rest, self._values = self._values, {}
        return json.dumps(rest, ensure_ascii=False)

    def text(self, name: str, required: bool = False) -> str:
        """Take a text; empty where it is absent."""
        return self._typed(name, str, "a string", required) or ""

    def boolean(self, name: str, default: bool = False) -> bool:
        """Take a boolean."""
        value = self._typed(name, bool, "true or false", False)
        return default if value is None else value

    def objects(self, name: str) -> list[Any]:
        """Take a list of any values; empty where it is absent."""
        return self._typed(name, list, "a list", False) or []

    def nested(self, name: str) -> "Fields | None":
        """Take an object within this one."""
        values = self.take(name)
        return None if values is None else self.at(name, values)

    def required(self, name: str) -> "Fields":
        """Take an object within this one that must be there."""
        if (nested := self.nested(name)) is None:
            raise self.refuse(name, "is missing")
        return nested

    def at(self, name: str, values: Any) -> "Fields":
        """Wrap an object that was taken from this one."""
        return Fields(values, self.path(name), self.ignored)

    def integer(self, name: str, low: int = -INT64, high: int = INT64 - 1) -> int | None:
        """Take an integer within [low, high]."""
        value = self.take(name)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.refuse(name, f"must be an integer, not {shown(value)}")
        if not low <= value <= high:
            raise self.refuse(name, f"must be {low} to {high}, not {shown(value)}")
        return value

    def number(self, name: str) -> float | None:
        value = self.take(name)
        return None if value is None else self._number(name, value)

    def strings(self, name: str) -> list[str]:
        """Take a list of strings, or one string; empty where it is absent."""
        value = self.take(name)
        if isinstance(value, str):
            return [value]
        if value is None:
            return []
        if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
            raise self.refuse(name, "must be a string or a list of strings")
        return value

    def token_ids(self, name: str) -> list[int]:
        """Take a list of uint32; empty where it is absent."""
        value = self.take(name)
        if value is None:
            return []
        if not are_token_ids(value):
            raise self.refuse(name, "must be a list of token ids, integers from 0")
        token_ids: list[int] = value
        return token_ids

    def prompts(self, name: str) -> list[str | list[int]]:
        """Take prompts: a text, a list of texts, token ids, or a list of token id lists."""
        value = self.take(name)
        if isinstance(value, str):
            return [value]
        if isinstance(value, list) and value:
            if are_token_ids(value):
                return [value]
            if all(isinstance(each, str) for each in value) or all(each and are_token_ids(each) for each in value):
                return value
        raise self.refuse(name, "must be a text, a list of token ids, or a list of either, and not empty")

    def schema(self, name: str) -> dict[str, Any]:
        """Take a JSON schema that must be there."""
        schema = self.take(name)
        if not isinstance(schema, dict):
            raise self.refuse(name, f"must be a JSON schema, not {shown(schema)}")
        return schema

    def biases(self, name: str) -> dict[int, float]:
        """Take a map from token ids, which JSON has as strings, to numbers."""
        biases = self.take(name)
        if biases is None:
            return {}
        if not isinstance(biases, dict):
            raise self.refuse(name, f"must be an object from token ids to numbers, not {shown(biases)}")
        for token_id in biases:
            if not (token_id.isascii() and token_id.isdigit() and len(token_id) <= 10 and int(token_id) < 1 << 32):
                raise self.refuse(name, f"{shown(token_id)} is not a token id")
        return {int(token_id): self._number(name, bias) for token_id, bias in biases.items()}

    def finish(self) -> None:
        """Note all remaining fields as ignored.

        Raises InvalidRequest for one that asks for something which would be lost, and where fields are strict.
        """
        for name, value in self._values.items():
            neutral = REFUSED.get(name)
            if neutral is not None and any(type(value) is type(one) and value == one for one in neutral):
                continue
            if neutral is not None or self.ignored.strict:
                raise self.refuse(name, "is not supported")
            self.ignored.add(self.path(name))

    def _number(self, name: str, value: Any) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.refuse(name, f"must be a number, not {shown(value)}")
        try:
            number = float(value)
        except OverflowError:
            number = math.inf
        if not math.isfinite(number):
            raise self.refuse(name, "is too large")
        return number

    def _typed(self, name: str, kind: type[_T], called: str, required: bool) -> _T | None:
        value = self.take(name)
        if value is None and not required:
            return None
        if not isinstance(value, kind):
            raise self.refuse(name, f"must be {called}, not {shown(value)}")
        return value


def are_token_ids(value: Any) -> bool:
    """Return whether a value is a list of uint32, fast enough for a million."""
    if not isinstance(value, list) or not set(map(type, value)) <= {int}:  # a bool has another type
        return False
    return not value or (min(value) >= 0 and max(value) < 1 << 32)


def shown(value: Any) -> str:
    """Return a value for a message, shortened."""
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= MAX_SHOWN_CHARS else f"{text[:MAX_SHOWN_CHARS]} ..."


def one_of(fields: Fields, name: str, known: Sequence[str]) -> str | None:
    """Take a string that must be one of `known`; None where it is absent."""
    if not fields.given(name):
        return None
    value = fields.text(name)
    if value not in known:
        raise fields.refuse(name, f"must be one of {', '.join(known)}, not {shown(value)}")
    return value


def must_be_one_of(fields: Fields, name: str, known: Sequence[str]) -> str:
    """Take a string that must be there and be one of `known`."""
    if (value := one_of(fields, name, known)) is None:
        raise fields.refuse(name, "is missing")
    return value
