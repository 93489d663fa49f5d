"""The socket by which the process of files and batches asks: lines of batches, and whether the router is stopping.

Uploaded files as pictures, sounds and videos of requests.
"""

import json
import mimetypes
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, unquote

from starlette.types import Receive, Scope, Send

from cluster.errors import InvalidRequest, NotConfigured, ServiceError, Unauthenticated, Unavailable
from cluster.process.life import Drain
from protos import inference_pb2 as pb
from router.admission.arrivals import Arrival
from router.batches.link import HEALTH, LINE, Link, OnBehalf, is_key
from router.frontend.http.body.media import GivenMedium
from router.frontend.http.endpoint import Endpoint
from router.frontend.http.errors import CALLER, Caller, HttpRefusal, error_answer, openai_form
from router.frontend.http.exchange import Exchange
from router.frontend.openai_files.routes import on_behalf_of
from router.models.media import sources_of
from router.security.api_keys import ApiKeys
from router.validation import MEDIA_KINDS

if TYPE_CHECKING:
    from aiohttp import ClientResponse

    from router.batches.process import BatchesProcess


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


class UploadedMedia:
    """Files of the files API that requests name; a caller reads those that its paths show."""

    def __init__(self, max_bytes: int) -> None:
        """Create it; `max_bytes` is the largest size of one request's files together."""
        self._max_bytes = max_bytes
        self.batches: BatchesProcess | None = None
        """Process that has the files; None without `batches_folder`."""

    async def load(
        self, request: pb.GenerateRequest, media: Sequence[GivenMedium], caller: Caller, arrival: Arrival
    ) -> None:
        """Read the files that the request's last media name; their bytes count as those of its body.

        Raises InvalidRequest, HttpRefusal for an unknown file, NotConfigured and Unavailable.
        """
        if not any(each.file_id for each in media):
            return
        num_bytes = 0
        for source, given in zip(sources_of(request)[-len(media) :], media, strict=True):
            if not given.file_id:
                continue
            async with await self._found(given, caller) as file:
                size = int(file.headers["content-length"])
                num_bytes += size
                if num_bytes > self._max_bytes:
                    reason = f"files of a request may have {self._max_bytes} bytes at most together (max_body_mib)"
                    raise HttpRefusal(413, "request_too_large", reason, given.path)
                source.medium.kind = source.medium.kind or _kind(file, given)
                arrival.hold(size)
                source.medium.data = await self._content(file, given)

    async def _found(self, given: GivenMedium, caller: Caller) -> "ClientResponse":
        if self.batches is None:
            raise NotConfigured("batches_folder is not set: this router serves no files", given.path)
        path = f"/v1/files/{quote(given.file_id, safe='')}/content"
        file = await self.batches.call("GET", path, on_behalf_of(caller), {})
        if file.status == 404:
            file.release()
            raise HttpRefusal(404, "not_found", f"unknown file {given.file_id[:80]!r}", given.path)
        if file.status != 200:
            file.release()
            raise Unavailable(f"the file cannot be read: status {file.status}", given.path)
        return file

    async def _content(self, file: "ClientResponse", given: GivenMedium) -> bytes:
        assert self.batches is not None, "the file was found"
        try:
            return await self.batches.read(file)
        except Unavailable as error:
            raise Unavailable(error.message, given.path) from None


def _kind(file: "ClientResponse", given: GivenMedium) -> str:
    """Return what a file is, by its name; one without a known ending counts as a picture."""
    filename = unquote(file.headers["content-disposition"].rpartition("''")[2])
    guessed, _ = mimetypes.guess_type(filename)
    kind = (guessed or "image/").partition("/")[0]
    if kind not in MEDIA_KINDS:
        raise InvalidRequest(given.path, f"must be a picture, a sound or a video, not {guessed}")
    return kind
