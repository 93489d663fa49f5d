"""Reading of JSON bodies into the structs of their APIs.

Every mistake is an InvalidRequest that names the field and what it must be. A field that no struct has is ignored, and
named once in the answer, unless its loss would change the answer's meaning (REFUSED).

Bodies that a client compressed. Pure.
"""

import json
import re
import zlib
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Annotated, Any, Generic, TypeVar, cast

import msgspec
import msgspec.inspect as inspect

from cluster.errors import InvalidRequest
from router.frontend.http.errors import Caller, HttpRefusal

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
_NUMBER = re.compile(r"\[\d+\]")
_TOO_LARGE = ("Number out of range", "Integer value out of range")
_MISSING = re.compile(r"Object missing required field `(.*?)`")
_AT = re.compile(r" - at `(?:key` in `)?\$\.?(.*)`$", re.DOTALL)
_STEP = re.compile(r"\[(\d+|\.\.\.)\]|([^.\[]+)")
_KINDS: Mapping[type[inspect.Type], str] = {
    inspect.StrType: "a string",
    inspect.BoolType: "true or false",
    inspect.ListType: "a list",
    inspect.StructType: "an object",
    inspect.DictType: "an object",
}
_BodyT = TypeVar("_BodyT")
_RequestT = TypeVar("_RequestT")
_ModelT = TypeVar("_ModelT")


class Model(msgspec.Struct, forbid_unknown_fields=True, gc=False):
    """Object of a body; `null` counts as absent where a field may be absent."""


Count = Annotated[int, msgspec.Meta(ge=-INT32, le=INT32 - 1)]
Positive = Annotated[int, msgspec.Meta(ge=1, le=INT32 - 1)]
TokenId = Annotated[int, msgspec.Meta(ge=0, le=(1 << 32) - 1)]
Texts = str | list[str]
"""A text, or a list of texts."""
Inputs = str | list[str | TokenId | list[TokenId]]
"""A text, token ids, or a list of either."""


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

    def unread(self, where: str, name: str, value: Any) -> None:
        """Note a field of the object at `where` that nobody reads.

        Raises InvalidRequest for one that asks for something which would be lost, and where fields are strict.
        """
        neutral, path = REFUSED.get(name), at(where, name)
        if value is None or (neutral and any(type(value) is type(one) and value == one for one in neutral)):
            return
        if neutral is not None or self.strict:
            raise InvalidRequest(path, "is not supported")
        self.add(path)


class BodyReader(Generic[_BodyT, _RequestT]):
    """Reader of one API's bodies."""

    def __init__(self, body: type[_BodyT], make: Callable[[_BodyT, Caller, IgnoredFields], _RequestT]) -> None:
        """Create the reader; `make` makes a request of a `body`, and may raise InvalidRequest."""
        self.body: Any = body
        self._make = make
        self._decoder = msgspec.json.Decoder(body)

    def of_bytes(self, raw: bytes, caller: Caller, ignored: IgnoredFields, max_values: int) -> _RequestT:
        """Read a body of at most so many JSON values.

        Raises InvalidRequest naming the field at fault.
        """
        _check_values(raw, max_values)
        try:
            body = self._decoder.decode(raw)
        except (ValueError, RecursionError) as error:  # it has a fault, or fields that nobody reads: these are named
            if str(error).startswith(_TOO_LARGE):
                raise _refusal(str(error), None, _info(self.body), "") from None
            return self(parse_object(raw, max_values), caller, ignored)
        return self._made(body, caller, ignored)

    def __call__(self, values: Any, caller: Caller, ignored: IgnoredFields | None = None) -> _RequestT:
        """Read a body that was parsed.

        Raises InvalidRequest naming the field at fault.
        """
        ignored = ignored or IgnoredFields()
        try:
            body = _typed_without_unread(values, self.body, "", ignored)
        except RecursionError:
            raise _too_deep() from None
        return self._made(body, caller, ignored)

    def _made(self, body: _BodyT, caller: Caller, ignored: IgnoredFields) -> _RequestT:
        try:
            return self._make(body, caller, ignored)
        except RecursionError:
            raise _too_deep() from None


def typed(values: Any, kind: type[_ModelT], path: str, ignored: IgnoredFields) -> _ModelT:
    """Return the parsed JSON at `path` as a struct; fields that it does not have are noted.

    Raises InvalidRequest naming the field at fault.
    """
    try:
        return msgspec.convert(values, kind)
    except msgspec.ValidationError:
        return _typed_without_unread(values, kind, path, ignored)


def _typed_without_unread(values: Any, kind: type[_ModelT], path: str, ignored: IgnoredFields) -> _ModelT:
    info, unread = _info(cast(Any, kind)), list[tuple[str, str, Any]]()
    for is_deep in (False, True):  # most of these fields are at the top, and the rest takes longer
        known = _known(values, info, path, unread, is_deep)
        try:
            model = msgspec.convert(known, kind)
            break
        except msgspec.ValidationError as error:
            if is_deep:
                raise _refusal(str(error), known, info, path) from None
            unread.clear()
    for where, name, value in unread:
        ignored.unread(where, name, value)
    return model


def parse_object(body: bytes, max_values: int) -> dict[str, Any]:
    """Parse a JSON object of at most so many values.

    Raises InvalidRequest for anything else, and for invalid text inside.
    """
    _check_values(body, max_values)
    try:
        values = msgspec.json.decode(body)
    except RecursionError:
        raise _too_deep() from None
    except ValueError as error:
        raise InvalidRequest("", f"the body is not JSON: {error}") from None
    if not isinstance(values, dict):
        raise InvalidRequest("", "the body must be a JSON object")
    return values


def inputs_of(inputs: Inputs, path: str) -> list[str | list[int]]:
    """Return each text or list of token ids.

    Raises InvalidRequest.
    """
    if isinstance(inputs, str):
        return [inputs]
    kinds = set(map(type, inputs))
    if kinds == {int}:
        return [inputs]  # type: ignore[list-item]  # all of them are integers
    if kinds == {str} or (kinds == {list} and all(inputs)):
        return inputs  # type: ignore[return-value]  # none of them is an integer
    raise InvalidRequest(path, "must be a text, a list of token ids, or a list of either, and not empty")


def texts_of(texts: Texts | None) -> list[str]:
    """Return each text; none where the field is absent."""
    return [texts] if isinstance(texts, str) else texts or []


def given(body: object, names: Sequence[str]) -> dict[str, Any]:
    """Return the fields of a body that are there, of those with these names."""
    return {name: value for name in names if (value := getattr(body, name)) is not None}


def needed(value: _ModelT | None, path: str) -> _ModelT:
    """Return the field at `path`, which may not be absent.

    Raises InvalidRequest.
    """
    if value is None:
        raise InvalidRequest(path, "is missing")
    return value


def at(path: str, name: str) -> str:
    """Return the path of a field of the object at `path`, empty at the top."""
    return f"{path}.{name}" if path and name else path or name


def shown(value: Any) -> str:
    """Return a value for a message, shortened."""
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= MAX_SHOWN_CHARS else f"{text[:MAX_SHOWN_CHARS]} ..."


def _check_values(body: bytes, max_values: int) -> None:
    # Each value but the first follows one of these bytes. Inside texts they count, too: only then is the limit checked
    # without texts, which takes longer.
    if _num_separators(body) > max_values and _num_separators(_TEXT.sub(b"", body)) > max_values:
        raise InvalidRequest("", f"the body holds more than {max_values} JSON values")


def _num_separators(body: bytes) -> int:
    return body.count(b",") + body.count(b"[") + body.count(b"{")


def _too_deep() -> InvalidRequest:
    return InvalidRequest("", "the body is nested too deeply")


# --------------------------------------------------------------------------------- faults, and fields that nobody reads


@cache
def _info(kind: type) -> inspect.Type:
    return inspect.type_info(kind)


@cache
def _fields(struct: type) -> Mapping[str, inspect.Type]:
    info = _info(struct)
    assert isinstance(info, inspect.StructType), "it is the type of one"
    return {field.encode_name: field.type for field in info.fields}


@cache
def _nested(struct: type) -> Mapping[str, inspect.Type]:
    return {name: info for name, info in _fields(struct).items() if _has_structs(info)}


def _has_structs(info: inspect.Type) -> bool:
    return any(
        isinstance(each, inspect.StructType) or (isinstance(each, inspect.ListType) and _has_structs(each.item_type))
        for each in _alternatives(info)
    )


def _alternatives(info: inspect.Type) -> tuple[inspect.Type, ...]:
    return info.types if isinstance(info, inspect.UnionType) else (info,)


def _struct_of(values: Mapping[str, Any], info: inspect.Type) -> inspect.StructType | None:
    """Return the struct that an object is, as its tag says; None: there is none."""
    for each in _alternatives(info):
        if isinstance(each, inspect.StructType) and (each.tag is None or values.get(each.tag_field or "") == each.tag):
            return each
    return None


def _known(value: Any, info: inspect.Type, path: str, unread: list[tuple[str, str, Any]], is_deep: bool) -> Any:
    """Return parsed JSON without the fields that its structs do not have; these are added to `unread`."""
    if isinstance(value, list):
        items = next((each.item_type for each in _alternatives(info) if isinstance(each, inspect.ListType)), None)
        if items is not None:
            return [_known(each, items, f"{path}[{place}]", unread, is_deep) for place, each in enumerate(value)]
    if not isinstance(value, dict) or (struct := _struct_of(value, info)) is None:
        return value
    fields, known = _fields(struct.cls), value
    if struct.forbid_unknown_fields and not value.keys() <= fields.keys():
        known = {name: each for name, each in value.items() if name in fields or name == struct.tag_field}
    if is_deep and (nested := [name for name in known if name in _nested(struct.cls)]):
        within = {name: _known(known[name], fields[name], at(path, name), unread, is_deep) for name in nested}
        known = {name: within.get(name, each) for name, each in known.items()}
    unread += ((path, name, each) for name, each in value.items() if name not in known)
    return known


def _refusal(fault: str, value: Any, info: inspect.Type, path: str) -> InvalidRequest:
    """Return the error of a fault that msgspec names."""
    found = _AT.search(fault)
    place = found[1] if found else ""
    if missing := _MISSING.match(fault):
        return InvalidRequest(at(at(path, place), missing[1]), "is missing")
    if fault.startswith(_TOO_LARGE):
        return InvalidRequest(at(path, place.partition("[...]")[0]), "is too large")
    what = ""
    for number, name in _STEP.findall(place):
        options = _alternatives(info)
        if number == "...":
            place = place.partition("[...]")[0]  # one of the values of a map, whose key is unknown
            info, what = next(each.value_type for each in options if isinstance(each, inspect.DictType)), "each value "
            break
        if number:
            value = value[int(number)]
            info = next(each.item_type for each in options if isinstance(each, inspect.ListType))
            continue
        struct = _struct_of(value, info)
        value = value[name]
        if struct is None or name == struct.tag_field:
            tags = tuple(each.tag for each in options if isinstance(each, inspect.StructType))
            info = inspect.LiteralType(tags)
        else:
            info = _fields(struct.cls)[name]
    full = f"{path}{place}" if place.startswith("[") else at(path, place)
    called = " or ".join(dict.fromkeys(filter(None, map(_called, _alternatives(info)))))
    return InvalidRequest(full, f"{what}must be {called}, not {shown(value)}")


def _called(info: inspect.Type) -> str:
    """Return what a value of a type is, with its limits; empty for null."""
    if isinstance(info, inspect.NoneType):
        return ""
    if isinstance(info, inspect.LiteralType):
        return f"one of {', '.join(map(str, info.values))}"
    if isinstance(info, inspect.ListType) and not _has_structs(info):
        return f"a list of {' or '.join(_called(each).removeprefix('a ') for each in _alternatives(info.item_type))}"
    if isinstance(info, inspect.IntType | inspect.FloatType):
        limits = [f"at least {info.ge}"] if info.ge is not None else []
        limits += [f"above {info.gt:g}"] if info.gt is not None else []
        limits += [f"at most {info.le}"] if info.le is not None else []
        return " ".join(
            ["an integer" if isinstance(info, inspect.IntType) else "a number", " and ".join(limits)]
        ).strip()
    return _KINDS.get(type(info), "valid")


HEADER = "content-encoding"
KNOWN: Mapping[str, str] = {"gzip": "gzip", "x-gzip": "gzip", "deflate": "deflate"}
"""Encodings that are read, by their names in the header."""


def encoding_of(headers: Mapping[str, str]) -> str:
    """Return a body's encoding: gzip, deflate, or empty for none.

    Raises HttpRefusal, status 415, for any other one.
    """
    encoding = headers.get(HEADER, "").strip().lower()
    if encoding in ("", "identity"):
        return ""
    if encoding not in KNOWN:
        message = f"{encoding[:80]!r} is not supported: send gzip, deflate, or no encoding"
        raise HttpRefusal(415, "unsupported_content_encoding", message, HEADER)
    return KNOWN[encoding]


def refuse_encoding(headers: Mapping[str, str]) -> None:
    """Raise HttpRefusal, status 415, for a body in any encoding."""
    if (encoding := encoding_of(headers)) != "":
        message = f"{encoding!r} is not supported for uploads: send the file without an encoding"
        raise HttpRefusal(415, "unsupported_content_encoding", message, HEADER)


def inflated(body: bytes, encoding: str, max_bytes: int) -> bytes:
    """Return the content of a compressed body.

    No more than `max_bytes` and one byte of it is ever made, so the caller finds out that it is too large. Raises
    InvalidRequest for a body that is not in this encoding, or not whole.
    """
    inflater = zlib.decompressobj(_window_bits(body, encoding))
    try:
        content = inflater.decompress(body, max_bytes + 1)
    except zlib.error as error:
        raise _bad(encoding, str(error)) from None
    if len(content) > max_bytes:
        return content
    if not inflater.eof:
        raise _bad(encoding, "the compressed body is incomplete")
    if inflater.unused_data:
        raise _bad(encoding, "the request has bytes after the end of the compressed body")
    return content


def _window_bits(body: bytes, encoding: str) -> int:
    """Return zlib's parameter: gzip's header, zlib's, or none, which some clients take `deflate` to mean."""
    if encoding == "gzip":
        return 16 + zlib.MAX_WBITS
    has_header = len(body) > 1 and body[0] & 0x0F == 8 and int.from_bytes(body[:2]) % 31 == 0
    return zlib.MAX_WBITS if has_header else -zlib.MAX_WBITS


def _bad(encoding: str, reason: str) -> HttpRefusal:
    return HttpRefusal(400, "invalid_value", f"the body is not in {encoding}: {reason}", HEADER)
