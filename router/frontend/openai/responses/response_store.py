"""Conversations of the Responses API that go on by `previous_response_id`, in memory or, for all routers, in Redis.

POST /v1/responses/input_tokens: the tokens of a response's prompt, earlier turns included.

Paths below /v1/responses: GET and DELETE of {id}, GET {id}/input_items, and the refusal of all others.
"""

import asyncio
import json
import logging
import sys
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from google.protobuf.json_format import MessageToDict, ParseDict
from starlette.exceptions import HTTPException

from cluster.errors import InvalidRequest, Unavailable, UnknownRequest
from cluster.network.redis_link import RedisFailure, RedisLink
from protos import inference_pb2 as pb
from router.admission.arrivals import Arrivals
from router.frontend.http.body.media import named_media
from router.frontend.http.endpoint import EndpointContext, Hooks, JsonEndpoint
from router.frontend.http.errors import Caller, HttpRefusal, caller_of
from router.frontend.openai.responses.responses import NAMES, ResponsesRequest, complete, read_response, refer
from router.frontend.openai.responses.responses_answer import (
    RESPONSE,
    ResponsesAnswer,
    error_form,
    item_id,
    response_of_item,
)
from router.security.api_keys import ApiKeys

log = logging.getLogger(__name__)


KEPT_S = 86_400
"""Seconds for which Redis keeps a response."""
MAX_REFERRED = 64
"""Responses to whose items one input may refer: each is read from the store as a whole."""
LIMIT_S = 1.0
"""Time limit of a call of Redis in seconds."""
_SET = "redis.call('SET', KEYS[1], ARGV[1], 'EX', ARGV[2]) return 1"
_GET = "return redis.call('GET', KEYS[1])"
_DELETE = "return redis.call('DEL', KEYS[1])"


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """One response, and the conversation up to its end."""

    response: dict[str, Any]
    input_items: list[Any]
    messages: list[dict[str, Any]]
    """Messages in JSON, without instructions, which belong to one response only."""

    def to_json(self) -> str:
        return json.dumps([self.response, self.input_items, self.messages], ensure_ascii=False)

    def named_input_items(self) -> list[dict[str, Any]]:
        """Return the items of the response's own input, each with an id."""
        name = self.response["id"].removeprefix(RESPONSE)
        return [{"id": item_id("item_", name, number)} | item for number, item in enumerate(self.input_items)]

    def item(self, wanted: str) -> dict[str, Any] | None:
        """Return an item of the response's input or output; None where there is none of this id."""
        items: list[dict[str, Any]] = [*self.response["output"], *self.named_input_items()]
        return next((item for item in items if item["id"] == wanted), None)

    @classmethod
    def of_json(cls, text: str | bytes) -> "StoredResponse":
        return cls(*json.loads(text))


class ResponseStore(ABC):
    """Responses by tenant and id."""

    @abstractmethod
    async def put(self, tenant: str, name: str, stored: StoredResponse) -> None:
        """Keep a response.

        Raises Unavailable.
        """

    @abstractmethod
    async def get(self, tenant: str, name: str) -> StoredResponse | None:
        """Return a tenant's response, or None.

        Raises Unavailable.
        """

    @abstractmethod
    async def delete(self, tenant: str, name: str) -> bool:
        """Forget a response; return whether it was there.

        Raises Unavailable.
        """

    @abstractmethod
    async def close(self) -> None:
        """Close the connection, if there is one."""


class MemoryResponses(ResponseStore):
    """Store of one router. The responses used longest ago go first."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._kept: OrderedDict[tuple[str, str], str] = OrderedDict()
        self.num_bytes = 0
        """Bytes of all texts, as kept."""

    async def put(self, tenant: str, name: str, stored: StoredResponse) -> None:
        self._drop((tenant, name))
        text = await asyncio.to_thread(stored.to_json)
        self._kept[tenant, name] = text
        self.num_bytes += _size(text)
        while self.num_bytes > self._max_bytes:
            self._drop(next(iter(self._kept)))

    async def get(self, tenant: str, name: str) -> StoredResponse | None:
        if (text := self._kept.get((tenant, name))) is None:
            return None
        self._kept.move_to_end((tenant, name))
        return await asyncio.to_thread(StoredResponse.of_json, text)

    async def delete(self, tenant: str, name: str) -> bool:
        return self._drop((tenant, name))

    async def close(self) -> None:
        self._kept.clear()
        self.num_bytes = 0

    def _drop(self, key: tuple[str, str]) -> bool:
        text = self._kept.pop(key, None)
        self.num_bytes -= 0 if text is None else _size(text)
        return text is not None


def _size(text: str) -> int:
    """Return the memory of a text: a byte for each character of base64, and up to four for one of other texts."""
    return sys.getsizeof(text)


class RedisResponses(ResponseStore):
    """Store of all routers of a cluster, under CLUSTER_NAME:response:TENANT:ID, for KEPT_S."""

    def __init__(self, url: str, cluster_name: str, max_bytes: int) -> None:
        """Prepare the connection; a response above `max_bytes` is not kept.

        Raises StartError for an invalid URL.
        """
        self._link = RedisLink(url, LIMIT_S)
        self._prefix = f"{cluster_name}:response"
        self._max_bytes = max_bytes

    async def put(self, tenant: str, name: str, stored: StoredResponse) -> None:
        text = await asyncio.to_thread(stored.to_json)
        if _size(text) <= self._max_bytes:
            await self._run(_SET, tenant, name, [text, KEPT_S])

    async def get(self, tenant: str, name: str) -> StoredResponse | None:
        stored = await self._run(_GET, tenant, name, [])
        return None if stored is None else await asyncio.to_thread(StoredResponse.of_json, stored)

    async def delete(self, tenant: str, name: str) -> bool:
        return bool(await self._run(_DELETE, tenant, name, []))

    async def close(self) -> None:
        await self._link.close()

    async def _run(self, script: str, tenant: str, name: str, arguments: Sequence[str | int]) -> Any:
        try:
            return await self._link.run(script, [f"{self._prefix}:{len(tenant)}:{tenant}:{name}"], arguments)
        except RedisFailure as error:
            raise Unavailable(f"stored responses cannot be reached: {error}") from error


class ResponseHooks(Hooks[ResponsesRequest, ResponsesAnswer]):
    """Lookup of the conversation before a response, and its keeping afterwards."""

    def __init__(self, store: ResponseStore) -> None:
        self._store = store

    async def before(self, api_request: ResponsesRequest, caller: Caller) -> None:
        if api_request.references:
            refer(api_request, await self._referred(api_request.references, caller.tenant))
            if not api_request.previous_id:
                complete(api_request, [])
        if not api_request.previous_id:
            return
        earlier = await self._store.get(caller.tenant, api_request.previous_id)
        if earlier is None:
            message = f"{api_request.previous_id[:80]!r} is not kept here, or no longer"
            raise HttpRefusal(400, "previous_response_not_found", message, "previous_response_id")
        messages = earlier.messages
        has_media = any("parts" in message for message in messages)  # large ones are read on a thread
        complete(api_request, await asyncio.to_thread(_messages, messages) if has_media else _messages(messages))

    def ready(self, api_request: ResponsesRequest) -> None:
        if api_request.is_stored:
            api_request.kept_messages = [_copied(message) for message in api_request.requests[0].messages]

    async def _referred(self, references: Mapping[int, str], tenant: str) -> dict[int, Any]:
        """Return the items of these ids, by the same places.

        Raises Unavailable, and InvalidRequest for one that is not kept, or for too many responses.
        """
        names = dict.fromkeys(map(response_of_item, references.values()))
        if len(names) > MAX_REFERRED:
            raise InvalidRequest("input", f"may refer to items of {MAX_REFERRED} responses at most, not {len(names)}")
        of_name = {name: await self._store.get(tenant, name) for name in names if name}
        items = {}
        for place, wanted in references.items():
            stored = of_name.get(response_of_item(wanted))
            item = None if stored is None else stored.item(wanted)
            if item is None:
                message = f"item {wanted[:80]!r} is not kept here, or no longer"
                raise HttpRefusal(404, "item_not_found", message, f"input[{place}].id")
            items[place] = item
        return items

    async def after(self, api_request: ResponsesRequest, caller: Caller, answer: ResponsesAnswer) -> None:
        if not api_request.is_stored:
            return
        kept = api_request.kept_messages
        own = (api_request.requests[0].messages if kept is None else kept)[1 if api_request.instructions else 0 :]
        said = [*own, *answer.messages()]
        messages = _values(said) if kept is None else await asyncio.to_thread(_values, said)
        stored = StoredResponse(answer.object(), api_request.input_items, messages)
        try:
            await self._store.put(caller.tenant, answer.id, stored)
        except Unavailable as error:  # the answer itself is complete; a later turn is told
            log.warning("%s", error)


def _messages(values: Sequence[dict[str, Any]]) -> list[pb.ChatMessage]:
    return [ParseDict(value, pb.ChatMessage()) for value in values]


def _values(messages: Sequence[pb.ChatMessage]) -> list[dict[str, Any]]:
    return [MessageToDict(message, preserving_proto_field_name=True) for message in messages]


def _copied(message: pb.ChatMessage) -> pb.ChatMessage:
    copied = pb.ChatMessage()
    copied.CopyFrom(message)
    return copied


def input_token_counter(context: EndpointContext, hooks: ResponseHooks) -> JsonEndpoint[ResponsesRequest]:
    """Return the application of the path."""

    async def count(api_request: ResponsesRequest, caller: Caller) -> dict[str, Any]:
        await hooks.before(api_request, caller)
        (request,) = api_request.requests
        with named_media(request.messages, api_request.media):
            num_tokens = await context.queries.num_prompt_tokens(request, caller.principal)
        return {"object": "response.input_tokens", "input_tokens": num_tokens}

    return JsonEndpoint(context, read_response, count, error_form, NAMES)


def add_stored_responses(app: FastAPI, store: ResponseStore, keys: ApiKeys, arrivals: Arrivals) -> None:
    """Add the paths, whose calls are charged; errors are the application's."""

    def charged(request: Request) -> str:
        tenant = caller_of(request.headers, keys).tenant
        arrivals.charge(tenant)
        return tenant

    async def found(request: Request) -> StoredResponse:
        stored = await store.get(charged(request), request.path_params["name"])
        if stored is None:
            raise _unknown(request)
        return stored

    async def one(request: Request) -> Response:
        return JSONResponse((await found(request)).response)

    async def input_items(request: Request) -> Response:
        items = (await found(request)).named_input_items()
        ends = {"first_id": items[0]["id"], "last_id": items[-1]["id"]} if items else {"first_id": "", "last_id": ""}
        return JSONResponse({"object": "list", "data": items, "has_more": False, **ends})

    async def delete(request: Request) -> Response:
        name = request.path_params["name"]
        if not await store.delete(charged(request), name):
            raise _unknown(request)
        return JSONResponse({"id": name, "object": "response", "deleted": True})

    for path, answer, method in (
        ("/v1/responses/{name}", one, "GET"),
        ("/v1/responses/{name}", delete, "DELETE"),
        ("/v1/responses/{name}/input_items", input_items, "GET"),
    ):
        app.router.add_route(path, answer, methods=[method])


def refuse_other_paths(app: FastAPI) -> None:
    """Answer 404 at all other paths, of whatever method; to be called when all paths are added."""

    async def refuse(request: Request) -> Response:
        raise HTTPException(404, "is not offered here")

    app.router.add_route("/v1/responses/{path:path}", refuse, methods=["GET", "POST", "PUT", "PATCH", "DELETE"])


def _unknown(request: Request) -> UnknownRequest:
    return UnknownRequest(f"{request.path_params['name'][:80]!r} is not kept here, or no longer", "response_id")
