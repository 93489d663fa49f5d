"""Bodies at random, valid and damaged: readers accept and refuse as the OpenAPI description says."""

import json
from copy import deepcopy
from typing import Any

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.errors import InvalidRequest
from router.frontend.anthropic.messages import read_messages, read_prompt
from router.frontend.http.body.fields import BodyReader, IgnoredFields, typed
from router.frontend.http.errors import Caller
from router.frontend.http_app import describe
from router.frontend.openai.chat import read_chat
from router.frontend.openai.completions import read_completion, read_text, read_tokens
from router.frontend.openai.embeddings import read_classify, read_embeddings, read_rerank, read_score
from router.frontend.openai.responses.responses import read_response

READERS: dict[str, BodyReader[Any, Any]] = {
    "/v1/completions": read_completion,
    "/v1/chat/completions": read_chat,
    "/v1/responses": read_response,
    "/v1/messages": read_messages,
    "/v1/embeddings": read_embeddings,
    "/v1/score": read_score,
    "/v1/rerank": read_rerank,
    "/classify": read_classify,
    "/v1/messages/count_tokens": read_prompt,
    "/v1/responses/input_tokens": read_response,
    "/tokenize": read_text,
    "/detokenize": read_tokens,
}
DESCRIPTION = describe(READERS)
SCHEMAS = DESCRIPTION["components"]["schemas"]
TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
FLOATS = st.floats(allow_nan=False, allow_infinity=False).filter(lambda number: not number.is_integer())
"""Without whole ones, which JSON Schema has as integers and no reader here."""
SCALARS = st.none() | st.booleans() | st.integers(-(1 << 70), 1 << 70) | FLOATS | TEXTS
JSON = st.recursive(SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3))
ITEM_FIELDS = ("role", "content", "name", "call_id", "arguments", "output", "id", "function", "mode")
ITEMS = st.dictionaries(st.sampled_from(ITEM_FIELDS), st.sampled_from(["user", "assistant", "f", None, []]), max_size=5)
MAX_DEPTH = 5
TYPES = (
    *("text", "refusal", "image_url", "input_audio", "file", "input_text", "input_image", "input_file", "summary_text"),
    *("image", "document", "tool_result", "thinking", "tool_use", "redacted_thinking", "function", "allowed_tools"),
    *("message", "function_call", "custom_tool_call", "function_call_output", "reasoning", "item_reference"),
)
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}},
    {"type": "function", "function": {"name": "g", "strict": True, "mood": "good"}},
    {"type": "function", "name": "f", "description": "d", "parameters": None},
    {"type": "custom", "name": "f", "input_schema": {}, "format": {"type": "grammar"}},
    {"name": "f", "input_schema": {"type": "object"}, "cache_control": {"type": "ephemeral"}},
    {"type": "web_search"},
]
LIKELY: dict[str, st.SearchStrategy[Any]] = {
    "type": st.sampled_from(TYPES),
    "tools": st.lists(st.sampled_from(TOOLS).map(deepcopy), max_size=3),
    "url": st.sampled_from(["https://a.example/b.png", "data:image/png;base64,AAAA", "ftp://a"]),
    "file_data": st.sampled_from(["data:image/png;base64,AAAA", "data:text/plain;base64,AAAA"]),
    "data": st.sampled_from(["AAAA", "%", ""]),
}
"""Values of fields of which a random one is seldom of use."""


def valid(schema: dict[str, Any], depth: int = 0) -> st.SearchStrategy[Any]:
    """Values of a schema; lists at MAX_DEPTH are empty."""
    if "$ref" in schema:
        return st.deferred(lambda: valid(SCHEMAS[schema["$ref"].rpartition("/")[2]], depth + 1))
    if "anyOf" in schema:
        return st.one_of([valid(each, depth) for each in schema["anyOf"]])
    if "enum" in schema:
        return st.sampled_from(schema["enum"])
    match schema.get("type"):
        case "array":
            return st.lists(valid(schema["items"], depth + 1), max_size=0 if depth > MAX_DEPTH else 3)
        case "object" if "properties" in schema:
            fields, required = schema["properties"], schema.get("required", ())
            optional = sorted(fields.keys() - required)
            some = st.sets(st.sampled_from(optional), max_size=4) if optional else st.just(set())

            def of(name: str) -> st.SearchStrategy[Any]:
                likely = LIKELY.get(name) if "enum" not in json.dumps(fields[name]) else None
                return valid(fields[name], depth) if likely is None else likely

            return some.flatmap(lambda names: st.fixed_dictionaries({name: of(name) for name in [*required, *names]}))
        case "object" if schema == {"type": "object"}:
            typed_items = st.tuples(ITEMS, st.sampled_from(TYPES)).map(lambda made: made[0] | {"type": made[1]})
            return st.dictionaries(TEXTS, JSON, max_size=3) | ITEMS | typed_items
        case "object":
            values = schema.get("additionalProperties", {})
            return st.dictionaries(TEXTS, valid(values, depth + 1) if values else JSON, max_size=3)
        case "integer":
            return st.integers(schema.get("minimum"), schema.get("maximum"))
        case "number":
            least, most = schema.get("exclusiveMinimum"), schema.get("maximum")
            return st.floats(least, most, exclude_min=least is not None, allow_nan=False, allow_infinity=False)
        case kind:
            return {"string": TEXTS, "boolean": st.booleans(), "null": st.none(), None: JSON}[kind]


@st.composite
def bodies(draw: st.DrawFn) -> tuple[str, Any]:
    """A path and a body of its schema, in which up to three values may be replaced, removed or added."""
    path = draw(st.sampled_from(sorted(READERS)))
    body = draw(valid(SCHEMAS[READERS[path].body.__name__]))
    for _ in range(draw(st.integers(0, 3))):
        places: list[tuple[Any, Any]] = []
        _add_places(body, places)
        if not places:
            break
        parent, key = draw(st.sampled_from(places))
        change = draw(st.sampled_from(("replace", "remove", "add")))
        if change == "replace":
            parent[key] = draw(JSON)
        elif change == "remove":
            del parent[key]
        elif isinstance(parent, dict):
            parent["x-" + draw(TEXTS)] = draw(JSON)
    return path, body


def _add_places(value: Any, places: list[tuple[Any, Any]]) -> None:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, each in items:
        places.append((value, key))
        _add_places(each, places)


def outcome(read: Any, *args: Any) -> Any:
    """What a reader made, with the fields that it ignored; or its refusal."""
    ignored = IgnoredFields()
    try:
        made = read(*args[:2], ignored, *args[2:])
    except InvalidRequest as error:
        return error.field, error.message
    return getattr(made, "requests", made), list(ignored.names)


@given(bodies())
def test_readers_do_as_the_schemas_say(asked: tuple[str, Any]) -> None:
    path, body = asked
    kind = READERS[path].body
    schema = {"$ref": f"#/components/schemas/{kind.__name__}", "components": DESCRIPTION["components"]}
    is_valid = jsonschema.Draft202012Validator(schema).is_valid(body)
    try:
        typed(body, kind, "", IgnoredFields())
        refused = False
    except InvalidRequest as error:
        refused = bool(error.field) or not isinstance(body, dict)
    assert refused is not is_valid


@given(bodies())
def test_bytes_are_read_as_their_values_are(asked: tuple[str, Any]) -> None:
    path, body = asked
    reader, caller = READERS[path], Caller("t", "r")
    raw = json.dumps(body).encode()
    assert outcome(reader.of_bytes, raw, caller, 1 << 16) == outcome(reader, json.loads(raw), caller)


@given(bodies(), st.data())
def test_damaged_bytes_are_refused_by_the_typed_error(asked: tuple[str, Any], data: st.DataObject) -> None:
    path, body = asked
    raw = bytearray(json.dumps(body, ensure_ascii=False).encode())
    place = data.draw(st.integers(0, len(raw) - 1))
    raw[place:] = data.draw(st.binary(max_size=3)) + raw[place + data.draw(st.integers(0, 3)) :]
    outcome(READERS[path].of_bytes, bytes(raw), Caller("t", "r"), 1 << 16)


COUNT = "must be an integer at least -2147483648 and at most 2147483647"
CHAT = '{"messages":[{"role":"user","content":"hi"}]'


@pytest.mark.parametrize(
    ("raw", "field", "message"),
    [
        (CHAT + ',"max_tokens":"5"}', "max_tokens", f'{COUNT}, not "5"'),
        (CHAT + ',"max_tokens":5.0}', "max_tokens", f"{COUNT}, not 5.0"),
        (CHAT + ',"timeout_ms":-1}', "timeout_ms", "must be a number above 0 and at most 2147483648, not -1"),
        (CHAT + ',"temperature":1e400}', "temperature", "is too large"),
        (CHAT + ',"temperature":1' + "0" * 400 + "}", "temperature", "is too large"),
        (CHAT + ',"stop":["a",1]}', "stop[1]", "must be a string, not 1"),
        (CHAT + ',"stop":{}}', "stop", "must be a string or a list of string, not {}"),
        (CHAT + ',"stream":1}', "stream", "must be true or false, not 1"),
        (CHAT + ',"logit_bias":{"1":"x"}}', "logit_bias", 'each value must be a number, not {"1": "x"}'),
        (CHAT + ',"prompt_cache_retention":"1h"}', "prompt_cache_retention",
         'must be one of 24h, in-memory, in_memory, not "1h"'),
        (CHAT[:-1] + ',{"role":"critic"}]}', "messages[1].role",
         'must be one of user, assistant, tool, system, developer, not "critic"'),
        (CHAT[:-1] + ',{"content":"a"}]}', "messages[1].role", "is missing"),
        (CHAT + ',"unread":1,"n":true}', "n", f"{COUNT}, not true"),
        (CHAT + ',"n":1,"n":null,"x":"\ud83d"}', "", None),
        (CHAT + ',"x":NaN}', "", None),
        (CHAT + ',"x":' + "[" * 100_000, "", None),
        (CHAT + ',"x":[' + "1," * 70_000 + "1]}", "", "the body holds more than 65536 JSON values"),
        (CHAT + "} 1", "", None),
        ('["a"]', "", "the body must be a JSON object"),
    ],
)  # fmt: skip
def test_a_refusal_names_the_field_and_its_limit(raw: str, field: str, message: str | None) -> None:
    """The wording is the same for all APIs; None: msgspec's."""
    with pytest.raises(InvalidRequest) as caught:
        read_chat.of_bytes(raw.encode("utf-8", "surrogatepass"), Caller("t", "r"), IgnoredFields(), 1 << 16)
    assert caught.value.field == field
    assert message in (None, caught.value.message)


def test_of_a_field_that_comes_twice_the_last_counts() -> None:
    raw = CHAT + ',"n":5,"user":1,"n":2,"max_tokens":3,"max_tokens":null}'
    (request,) = read_chat.of_bytes(raw.encode(), Caller("t", "r"), IgnoredFields(), 1 << 16).requests
    assert (request.sampling.n, request.sampling.HasField("max_tokens")) == (2, False)
