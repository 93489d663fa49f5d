"""The OpenAPI description of the HTTP API, made of the structs that its bodies are read into."""

from collections.abc import Mapping
from importlib.metadata import version
from typing import Any

import msgspec

from router.frontend.http.body.fields import BodyReader

ERROR = {"description": "The error, with its type and the field at fault.", "content": {"application/json": {}}}
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
"""Paths that take a body: what they do, and the smallest valid body."""
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


def describe(readers: Mapping[str, BodyReader[Any, Any]]) -> dict[str, Any]:
    """Return the description of all paths; `readers` has the reader of each path that takes a body."""
    paths: dict[str, Any] = {}
    bodies = [readers[path].body for path in POSTED]
    _, schemas = msgspec.json.schema_components(bodies, ref_template="#/components/schemas/{name}")
    for schema in schemas.values():
        if schema.get("additionalProperties") is False:
            del schema["additionalProperties"]  # other fields are ignored, and named in the answer
    for (path, (about, example)), body in zip(POSTED.items(), bodies, strict=True):
        paths[path] = {"post": _operation(about, body, schemas, example)}
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
        "components": {"schemas": schemas, "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}}},
        "security": [{}, {"key": []}],
    }


def _operation(about: str, kind: type, schemas: Mapping[str, Any], example: Mapping[str, Any]) -> dict[str, Any]:
    schema = {"$ref": f"#/components/schemas/{kind.__name__}"}
    body = {"application/json": {"schema": schema, "example": dict(example)}}
    content: dict[str, Any] = {"application/json": {"schema": {"type": "object"}}}
    if "stream" in schemas[kind.__name__]["properties"]:
        content["text/event-stream"] = {"schema": {"type": "string"}}
    return {
        "summary": about,
        "requestBody": {"required": True, "content": body},
        "responses": {"200": {"description": "The answer.", "content": content}, "default": ERROR},
    }
