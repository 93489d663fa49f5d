"""The socket by which the process of files and batches asks: lines of batches, and whether the router is stopping."""

import json
from collections.abc import Mapping
from typing import Any

from starlette.types import Receive, Scope, Send

from cluster.errors import ServiceError, Unauthenticated
from cluster.process.life import Drain
from router.batches.link import HEALTH, LINE, Link, OnBehalf, is_key
from router.frontend.http.endpoint import Endpoint
from router.frontend.http.errors import CALLER, Caller, HttpRefusal, error_answer, openai_form
from router.frontend.http.exchange import Exchange
from router.security.api_keys import ApiKeys


class LineApplication:
    """ASGI application that answers a line as its endpoint answers anybody, with the rights of who made the batch."""

    def __init__(self, endpoints: Mapping[str, Endpoint[Any, Any]], link: Link, keys: ApiKeys, drain: Drain) -> None:
        self._endpoints = endpoints
        self._link = link
        self._keys = keys
        self._drain = drain

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange, path = Exchange(scope, receive, send), scope["path"]
        endpoint = self._endpoints.get(path)
        try:
            if not is_key(exchange.headers.get("authorization"), self._link.key):
                raise Unauthenticated("is not that of this router's batches", "authorization")
            if path == HEALTH:
                await exchange.send_json(json.dumps({"draining": self._drain.draining}).encode())
                return
            if endpoint is None:
                raise HttpRefusal(404, "not_found", f"{path[:200]} is not for lines")
            line = OnBehalf.model_validate_json(exchange.headers[LINE])
            principal = self._keys.named(line.key)
            request_id = exchange.headers["x-request-id"]
            scope[CALLER] = Caller(principal.tenant_for(line.tenant), request_id, principal, line.deadline_s)
        except ServiceError as error:
            await exchange.fail(error_answer(error, {}, endpoint.error_form if endpoint else openai_form))
            return
        await endpoint(scope, receive, send)
