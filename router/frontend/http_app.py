"""The router's HTTP port: the paths of all APIs and the console, behind one check of keys.

The web server's own errors have OpenAI's form. The OpenAPI description is made of the structs that bodies are read
into. Imported only where there is such a port: FastAPI takes a fifth of a router's start.
"""

import time
from collections.abc import Mapping
from contextlib import AsyncExitStack
from dataclasses import asdict
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

import msgspec
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Receive, Scope, Send

from cluster.errors import InvalidRequest, ServiceError, UnknownModel
from cluster.network.tls import Credentials
from cluster.process.life import Drain
from router.admission.arrivals import Arrivals
from router.batches.link import ROUTER_SOCKET, Link
from router.config import RouterConfig
from router.frontend.anthropic.answer import MessagesAnswer, token_counter
from router.frontend.anthropic.answer import error_form as messages_error_form
from router.frontend.anthropic.messages import read_messages
from router.frontend.console.routes import add_console
from router.frontend.grpc_service import InferenceService
from router.frontend.http.body.fields import BodyReader
from router.frontend.http.endpoint import SPARE_VALUES, BodyLimits, Endpoint, EndpointContext, Hooks, JsonEndpoint
from router.frontend.http.errors import Caller, ErrorAnswer, caller_of, error_answer, error_of
from router.frontend.http.server import OpenAiServer, guarded, open_to_pages
from router.frontend.openai.answers import ChatAnswer, CompletionAnswer
from router.frontend.openai.chat import read_chat
from router.frontend.openai.completions import detokenizer_endpoint, read_completion, tokenizer_endpoint
from router.frontend.openai.embeddings import (
    ClassifyAnswer,
    EmbeddingRequest,
    EmbeddingsAnswer,
    RerankAnswer,
    ScoreAnswer,
    VectorAnswer,
    fit,
    read_classify,
    read_embeddings,
    read_rerank,
    read_score,
)
from router.frontend.openai.responses.response_store import (
    MemoryResponses,
    RedisResponses,
    ResponseHooks,
    ResponseStore,
    add_stored_responses,
    input_token_counter,
    refuse_other_paths,
)
from router.frontend.openai.responses.responses import read_response
from router.frontend.openai.responses.responses_answer import ResponsesAnswer
from router.frontend.openai.responses.responses_answer import error_form as responses_error_form
from router.frontend.openai_files.lines import LineApplication, UploadedMedia
from router.frontend.openai_files.routes import add_files_and_batches
from router.models.model_runtime import ModelRuntime
from router.models.model_runtimes import ModelRuntimes
from router.request_path.queries import Queries
from router.request_path.request_handler import RequestHandler
from router.security.api_keys import ApiKeys

if TYPE_CHECKING:
    from router.batches.process import BatchesProcess


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


class PoolingHooks(Hooks[EmbeddingRequest, VectorAnswer]):
    """Fitting of a request for vectors to what its model answers."""

    def __init__(self, models: ModelRuntimes) -> None:
        self._models = models

    async def before(self, api_request: EmbeddingRequest, caller: Caller) -> None:
        model, _ = self._models.only(caller.principal.models).asked_for(api_request.requests[0].model)
        if model is not None and (pooler := (model := model.shown()).pooler) is not None:
            fit(api_request, model.model_dir.labels if pooler.classifies else [])


def make_app(
    handler: RequestHandler,
    queries: Queries,
    models: ModelRuntimes,
    drain: Drain,
    keys: ApiKeys,
    config: RouterConfig,
    arrivals: Arrivals,
    registry: CollectorRegistry,
) -> FastAPI:
    """Create the application; `drain` holds requests in flight, gRPC ones included, and `registry` the metrics."""
    started_at = int(time.time())
    max_context = max(model.model_dir.max_context_tokens for model in models)
    limits = BodyLimits(config.max_body_mib << 20, max_context + SPARE_VALUES)
    files = UploadedMedia(limits.max_bytes)
    context = EndpointContext(
        handler,
        queries,
        drain,
        keys,
        arrivals,
        files,
        limits,
        config.default_deadline_s,
        config.strict_fields,
        config.sse_heartbeat_s,
    )
    responses, fitted = _open_responses(config), PoolingHooks(models)
    endpoints: dict[str, Endpoint[Any, Any]] = {
        "/v1/completions": Endpoint(context, read_completion, CompletionAnswer),
        "/v1/chat/completions": Endpoint(context, read_chat, ChatAnswer),
        "/v1/responses": Endpoint(
            context, read_response, ResponsesAnswer, responses_error_form, ResponseHooks(responses)
        ),
        "/v1/messages": Endpoint(context, read_messages, MessagesAnswer, messages_error_form),
        "/v1/embeddings": Endpoint(context, read_embeddings, EmbeddingsAnswer, hooks=fitted),
        "/v1/score": Endpoint(context, read_score, ScoreAnswer, hooks=fitted),
        "/v1/rerank": Endpoint(context, read_rerank, RerankAnswer, hooks=fitted),
        "/classify": Endpoint(context, read_classify, ClassifyAnswer, hooks=fitted),
    }
    for path in ("score", "rerank"):  # vLLM has these at both places
        endpoints[f"/{path}"] = endpoints[f"/v1/{path}"]
    app = _Application(endpoints)
    others: dict[str, JsonEndpoint[Any]] = {
        "/v1/messages/count_tokens": token_counter(context),
        "/v1/responses/input_tokens": input_token_counter(context, ResponseHooks(responses)),
        "/tokenize": tokenizer_endpoint(context),
        "/detokenize": detokenizer_endpoint(context),
    }
    app.state.responses = responses
    add_stored_responses(app, responses, keys, arrivals)
    app.state.batches = app.state.lines = None
    if config.batches_folder is not None:
        from router.batches.process import BatchesProcess  # imported late, because an unused import costs start time

        link = Link.of(config, config.id(), tuple(endpoints), limits.max_bytes, limits.max_values)
        app.state.batches = files.batches = BatchesProcess(link)
        app.state.lines = LineApplication(endpoints, link, keys, drain)
    add_files_and_batches(app, files.batches, keys, arrivals, drain)
    posted: dict[str, ASGIApp] = {**endpoints, **others}
    for path, application in posted.items():  # so that a method other than POST is refused as such
        app.router.add_route(path, application, methods=["POST"])  # type: ignore[arg-type] # an ASGI application
    app.description_of = describe({path: endpoint.read for path, endpoint in (endpoints | others).items()})

    def seen(request: Request) -> ModelRuntimes:
        """Return the models that the caller may see.

        Raises ServiceError.
        """
        return models.only(caller_of(request.headers, keys).principal.models)

    async def list_models(request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [_model(model, started_at) for model in seen(request).listed()]})

    async def one_model(request: Request) -> Response:
        name = request.path_params["name"]
        for model in seen(request).listed():
            if model.name == name:
                return JSONResponse(_model(model, started_at))
        return _response(error_answer(UnknownModel(f"{name!r} is not served here", "model"), {}))

    async def health(request: Request) -> Response:
        return JSONResponse({"status": "alive"})

    async def ready(request: Request) -> Response:
        has_workers = any(model.decode_workers() for model in models)
        is_ready = not drain.draining and (config.ready_without_workers or has_workers)
        body: dict[str, Any] = {"status": "ready" if is_ready else "draining" if drain.draining else "no decode worker"}
        if not keys.required:  # otherwise the models are visible only with a key for them
            body["decode_workers"] = {model.name: len(model.decode_workers()) for model in models}
        return JSONResponse(body, 200 if is_ready else 503)

    async def tell_usage(request: Request) -> Response:
        query = request.query_params
        days = query.get("days", "1")
        if not (days.isascii() and days.isdigit() and len(days) < 6):
            raise InvalidRequest("days", "must be a number of days")
        principal = caller_of(request.headers, keys).principal
        arrivals.charge(principal.tenant or "")
        totals = await queries.usage(int(days), query.get("tenant", ""), principal)
        return JSONResponse({"object": "list", "data": [asdict(total) for total in totals]})

    async def tell_load(request: Request) -> Response:
        caller_of(request.headers, keys)
        return JSONResponse({"server_load": drain.num_calls})

    async def tell_version(request: Request) -> Response:
        return JSONResponse({"version": version("tandem-serving")})

    async def tell_metrics(request: Request) -> Response:
        if not config.metrics_on_http_port:
            raise HTTPException(404, "metrics_on_http_port is not set: metrics are served at metrics_port")
        caller_of(request.headers, keys).principal.check_operator()
        encode, content_type = choose_encoder(request.headers.get("accept", ""))
        return Response(encode(registry), headers={"content-type": content_type})

    for path, answer in (
        ("/metrics", tell_metrics),
        ("/load", tell_load),
        ("/version", tell_version),
        ("/v1/usage", tell_usage),
        ("/v1/models", list_models),
        ("/v1/models/{name:path}", one_model),
        ("/health", health),
        ("/ping", health),
        ("/ready", ready),
    ):
        app.router.add_route(path, answer, methods=["GET"])
    refuse_other_paths(app)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(ServiceError, _service_error)
    return app


def _open_responses(config: RouterConfig) -> ResponseStore:
    """Return the store of responses.

    Raises StartError for an invalid `redis_url`.
    """
    max_bytes = config.responses_store_mib << 20
    if not config.redis_url:
        return MemoryResponses(max_bytes)
    return RedisResponses(config.redis_url, config.cluster_name, max_bytes)


class _Application(FastAPI):
    """Application that calls generating endpoints directly: FastAPI would add ten coroutines to each token."""

    def __init__(self, endpoints: Mapping[str, ASGIApp]) -> None:
        super().__init__(title="Tandem", redoc_url=None)
        self._endpoints = endpoints
        self.description_of: dict[str, Any] = {}
        """OpenAPI description, in place of FastAPI's own, which would be empty: FastAPI does not read the bodies."""

    def openapi(self) -> dict[str, Any]:
        return self.description_of

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope["path"] if scope["type"] == "http" and scope["method"] == "POST" else ""
        await self._endpoints.get(path, super().__call__)(scope, receive, send)


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException), "it is registered for these"
    what = f"{request.method} {request.url.path[:200]}: {error.detail}"
    return _response(error_of(error.status_code, what), error.headers)


async def _service_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ServiceError), "it is registered for these"
    return _response(error_answer(error, {}))


def _response(answer: ErrorAnswer, headers: Mapping[str, str] | None = None) -> Response:
    return Response(answer.body, answer.status, {**answer.headers, **(headers or {})}, "application/json")


def _model(model: ModelRuntime, started_at: int) -> dict[str, Any]:
    return {
        "id": model.name,
        "object": "model",
        "created": started_at,
        "owned_by": "tandem",
        "parent": model.base_model or None,
        "max_model_len": model.shown().model_dir.max_context_tokens,
    }


async def open_http(
    config: RouterConfig,
    port: int,
    credentials: Credentials | None,
    handler: RequestHandler,
    queries: Queries,
    models: ModelRuntimes,
    requests: Drain,
    keys: ApiKeys,
    inference: InferenceService,
    arrivals: Arrivals,
    parts: AsyncExitStack,
    registry: CollectorRegistry,
) -> OpenAiServer:
    """Start serving; `parts` closes what was started.

    Raises StartError.
    """
    http = OpenAiServer(config.host, port, credentials, config.max_connection_s, config.http_port_shared)
    app = make_app(handler, queries, models, requests, keys, config, arrivals, registry)
    add_console(app, keys, inference.status, queries.records)
    batches: BatchesProcess | None = app.state.batches
    if batches is not None:
        parts.push_async_callback(batches.close)
        lines = OpenAiServer(batches.folder / ROUTER_SOCKET, 0, setting="batches_link")
        parts.push_async_callback(lines.close)
        await lines.start(app.state.lines)
        await batches.start()
    responses: ResponseStore = app.state.responses
    parts.push_async_callback(responses.close)
    parts.push_async_callback(http.close)
    await http.start(open_to_pages(guarded(app, keys), config.cors_origins))
    return http
