"""Calls of /v1/files and /v1/batches, which the router checks, charges and passes on."""

from collections.abc import AsyncGenerator
from typing import TYPE_CHECKING

from fastapi import FastAPI, Request
from fastapi.responses import Response, StreamingResponse

from cluster.errors import Draining, NotConfigured, ServiceError
from cluster.process.life import Drain
from router.admission.arrivals import Arrivals
from router.batches.link import OnBehalf
from router.frontend.http.errors import Caller, caller_of
from router.security.api_keys import ApiKeys

if TYPE_CHECKING:
    from aiohttp import ClientResponse

    from router.batches.process import BatchesProcess

CHUNK_BYTES = 256 << 10
ASKED = ("content-type", "content-length", "content-encoding")
"""Headers of a call that are passed on."""
ANSWERED = (
    *("content-type", "content-length", "content-disposition", "x-content-type-options"),
    *("retry-after", "retry-after-ms", "accept-encoding", "allow", "connection"),
)
"""Headers of an answer that are passed on; `connection` is there only where the client's should close, too."""


def add_files_and_batches(
    app: FastAPI, batches: "BatchesProcess | None", keys: ApiKeys, arrivals: Arrivals, drain: Drain
) -> None:
    """Add the paths; without `batches` they answer that batches_folder is not set."""

    async def answer(request: Request) -> Response:
        """Pass a call on; one that changes something is charged, and a stopping router refuses it."""
        try:
            caller = caller_of(request.headers, keys)
            if batches is None:
                raise NotConfigured("batches_folder is not set: this router serves no files and batches")
            if request.method in ("GET", "HEAD"):
                return await _passed(request, caller, batches)
            if drain.draining:
                raise Draining("this router was told to stop")
            with arrivals.arriving(caller.tenant):
                return await _passed(request, caller, batches)
        except ServiceError as error:
            await arrivals.pace.wait(error)
            raise

    for where, methods in (
        ("/v1/files", ["GET", "POST"]),
        ("/v1/files/{file_id}", ["GET", "DELETE"]),
        ("/v1/files/{file_id}/content", ["GET"]),
        ("/v1/batches", ["GET", "POST"]),
        ("/v1/batches/{batch_id}", ["GET"]),
        ("/v1/batches/{batch_id}/cancel", ["POST"]),
    ):
        app.router.add_route(where, answer, methods=methods)


def on_behalf_of(caller: Caller) -> OnBehalf:
    principal = caller.principal
    return OnBehalf(tenant=caller.tenant, key=principal.name, operator=principal.operator)


async def _passed(request: Request, caller: Caller, batches: "BatchesProcess") -> Response:
    query = request.scope["query_string"]
    path = request.scope["raw_path"].decode("latin-1") + (f"?{query.decode('latin-1')}" if query else "")
    headers = {name: request.headers[name] for name in ASKED if name in request.headers}
    body = request.stream() if request.method == "POST" else None
    reply = await batches.call(request.method, path, on_behalf_of(caller), headers, body)
    answered = {name: reply.headers[name] for name in ANSWERED if name in reply.headers}
    return StreamingResponse(_chunks(reply), reply.status, answered)


async def _chunks(answer: "ClientResponse") -> AsyncGenerator[bytes]:
    async with answer:
        async for chunk in answer.content.iter_chunked(CHUNK_BYTES):
            yield chunk
