"""The OpenAPI description of the HTTP API, made by running each reader on a body that notes what is read."""

from collections.abc import Callable, Mapping
from importlib.metadata import version
from typing import Any

from router.frontend.http.body.fields import INT64, Fields, IgnoredFields
from router.frontend.http.caller import Caller

TOKEN_ID = {"type": "integer", "minimum": 0, "maximum": (1 << 32) - 1}
ERROR = {"description": "The error, with its type and the field at fault.", "content": {"application/json": {}}}


Reader = Callable[[Fields, Caller], object]
USER = [{"role": "user", "content": "Hello"}]
POSTED: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "/v1/completions": ("Complete a text.", {"prompt": "Hello"}),
    "/v1/chat/completions": ("Answer messages.", {"messages": USER}),
    "/v1/responses": ("Answer input items, with a stored conversation.", {"input": "Hello"}),
    "/v1/messages": ("Answer messages, in Anthropic's form.", {"messages": USER, "max_tokens": 16}),
    "/v1/embeddings": ("Return the embeddings of texts.", {"input": "Hello"}),
    "/v1/score": ("Return the similarity of texts.", {"text_1": "Hello", "text_2": ["Hallo"]}),
    "/v1/rerank": ("Rank documents by a query.", {"query": "Hello", "documents": ["Hallo"]}),
    "/classify": ("Return the labels of texts.", {"input": "Hello"}),
    "/v1/messages/count_tokens": ("Count the tokens of messages.", {"messages": USER}),
    "/v1/responses/input_tokens": ("Count the tokens of input items.", {"input": "Hello"}),
    "/tokenize": ("Return the token ids of a text.", {"prompt": "Hello"}),
    "/detokenize": ("Return the text of token ids.", {"tokens": [1]}),
}
"""Paths that take a body: what they do, and the smallest valid body, whose fields are the required ones."""
GOT: Mapping[str, str] = {
    "/v1/models": "The served models.",
    "/v1/models/{name}": "One served model.",
    "/v1/responses/{name}": "A stored response.",
    "/v1/usage": "Tokens by day, tenant and model.",
    "/health": "Whether the process lives.",
    "/ping": "The same, at SageMaker's path.",
    "/ready": "Whether the router takes requests.",
    "/load": "The number of requests under way at this router.",
    "/version": "Tandem's version.",
}
"""Paths of GET, with what they return."""


class _NotingFields(Fields):
    """Fields that note their types as a reader takes them."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        super().__init__(dict(values), ignored=IgnoredFields())
        self.properties: dict[str, dict[str, Any]] = {}

    def _note(self, name: str, kind: Mapping[str, Any]) -> None:
        if name not in self.properties or not self.properties[name]:
            self.properties[name] = {**kind}

    def peek(self, name: str) -> Any:
        self._note(name, {})
        return super().peek(name)

    def given(self, name: str) -> bool:
        self._note(name, {})
        return super().given(name)

    def take(self, name: str) -> Any:
        self._note(name, {})
        return super().take(name)

    def text(self, name: str, required: bool = False) -> str:
        self._note(name, {"type": "string"})
        return super().text(name, required)

    def boolean(self, name: str, default: bool = False) -> bool:
        self._note(name, {"type": "boolean"})
        return super().boolean(name, default)

    def objects(self, name: str) -> list[Any]:
        self._note(name, {"type": "array", "items": {"type": "object"}})
        return super().objects(name)

    def nested(self, name: str) -> Fields | None:
        self._note(name, {"type": "object"})
        return super().nested(name)

    def integer(self, name: str, low: int = -INT64, high: int = INT64 - 1) -> int | None:
        self._note(name, {"type": "integer", "minimum": low, "maximum": high})
        return super().integer(name, low, high)

    def number(self, name: str) -> float | None:
        self._note(name, {"type": "number"})
        return super().number(name)

    def strings(self, name: str) -> list[str]:
        self._note(name, {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]})
        return super().strings(name)

    def token_ids(self, name: str) -> list[int]:
        self._note(name, {"type": "array", "items": TOKEN_ID})
        return super().token_ids(name)

    def biases(self, name: str) -> dict[int, float]:
        self._note(name, {"type": "object", "additionalProperties": {"type": "number"}})
        return super().biases(name)


def describe(readers: Mapping[str, Reader]) -> dict[str, Any]:
    """Return the description of all paths; `readers` has the reader of each path that takes a body."""
    paths: dict[str, Any] = {}
    for path, (about, example) in POSTED.items():
        paths[path] = {"post": _operation(about, readers[path], example)}
    for path, about in GOT.items():
        names = [part[1:-1] for part in path.split("/") if part.startswith("{")]
        parameters = [{"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in names]
        answer = {"description": about, "content": {"application/json": {}}}
        operation = {"summary": about, "parameters": parameters, "responses": {"200": answer, "default": ERROR}}
        paths.setdefault(path, {})["get"] = operation
    return {
        "openapi": "3.1.0",
        "info": {"title": "Tandem", "version": version("tandem-serving")},
        "paths": paths,
        "components": {"securitySchemes": {"key": {"type": "http", "scheme": "bearer"}}},
        "security": [{}, {"key": []}],
    }


def _operation(about: str, read: Reader, example: Mapping[str, Any]) -> dict[str, Any]:
    fields = _NotingFields(example)
    read(fields, Caller("", "example"))
    properties = dict(sorted(fields.properties.items()))
    schema = {"type": "object", "properties": properties, "required": sorted(example)}
    body = {"application/json": {"schema": schema, "example": dict(example)}}
    content: dict[str, Any] = {"application/json": {"schema": {"type": "object"}}}
    if "stream" in properties:
        content["text/event-stream"] = {"schema": {"type": "string"}}
    return {
        "summary": about,
        "requestBody": {"required": True, "content": body},
        "responses": {"200": {"description": "The answer.", "content": content}, "default": ERROR},
    }
