"""HTTP paths of files and batches, as the router passes people's calls on.

A tenant sees what is its own; an operator, and everybody where there are no keys, sees all.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from typing import Any
from urllib.parse import quote

from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from batches.api.reading import PURPOSE, file_object, list_object, page_of, read_batch_form, read_page
from batches.api.upload import receive_file
from batches.service import Batches
from batches.state import Cancelled, FileInfo, Made, batch_object
from batches.storage.disk import BATCH_PREFIX, new_id
from batches.storage.file_store import BatchFolder, StoredFile
from cluster.errors import InvalidRequest, ServiceError, Unauthenticated, Unavailable
from router.batches.link import CALLER, OnBehalf, RouterLink
from router.frontend.http.body.fields import encoding_of, inflated, parse_object
from router.frontend.http.errors import HttpRefusal, error_answer

log = logging.getLogger(__name__)

MAX_BODY_BYTES = 64 << 10
MAX_VALUES = 1000
FILES_PAGE, BATCHES_PAGE = 10_000, 100
"""Largest number of items in a page."""
DEFAULT_BATCHES_PAGE = 20
CHUNK_BYTES = 1 << 20
ENDED = ("failed", "completed", "expired", "cancelled")


@dataclass(frozen=True, slots=True)
class _Call:
    """One call of a path."""

    request: Request
    caller: OnBehalf
    batches: Batches

    @property
    def tenant(self) -> str:
        return self.caller.tenant

    @property
    def sees(self) -> str | None:
        """Tenant whose files and batches the caller sees; None for all."""
        return None if self.caller.operator else self.caller.tenant

    async def file(self) -> StoredFile:
        """Return the file that the path names.

        Raises HttpRefusal.
        """
        file_id = self.request.path_params["file_id"]
        file = await asyncio.to_thread(self.batches.files.find, file_id, self.sees)
        if file is None:
            raise _not_found("file", file_id)
        return file

    async def batch(self) -> BatchFolder:
        """Return the batch that the path names.

        Raises HttpRefusal.
        """
        batch_id = self.request.path_params["batch_id"]
        batch = await asyncio.to_thread(self.batches.batches.find, batch_id, self.sees)
        if batch is None:
            raise _not_found("batch", batch_id)
        return batch


Act = Callable[[_Call], Awaitable[Response]]


def make_app(batches: Batches, link: RouterLink) -> Starlette:
    """Return the application; it answers nobody but the router of the link."""

    def path(act: Act) -> Callable[[Request], Awaitable[Response]]:
        async def answer(request: Request) -> Response:
            try:
                if not link.admits(request.headers.get("authorization")):
                    raise Unauthenticated("is not the router's", "authorization")
                return await act(_Call(request, OnBehalf.model_validate_json(request.headers[CALLER]), batches))
            except ServiceError as error:
                return _refusal(error)
            except ClientDisconnect:
                return Response(status_code=400)  # nobody reads it
            except OSError as error:
                log.error("%s %s: batches_folder cannot be used: %s", request.method, request.url.path[:200], error)
                return _refusal(Unavailable(f"batches_folder cannot be used: {error.strerror}"))

        return answer

    paths = (
        ("POST", "/v1/files", _upload),
        ("GET", "/v1/files", _list_files),
        ("GET", "/v1/files/{file_id}", _show_file),
        ("DELETE", "/v1/files/{file_id}", _delete_file),
        ("GET", "/v1/files/{file_id}/content", _send_content),
        ("POST", "/v1/batches", _make_batch),
        ("GET", "/v1/batches", _list_batches),
        ("GET", "/v1/batches/{batch_id}", _show_batch),
        ("POST", "/v1/batches/{batch_id}/cancel", _cancel_batch),
    )
    return Starlette(routes=[Route(where, path(act), methods=[method]) for method, where, act in paths])


def _refusal(error: ServiceError) -> Response:
    answer = error_answer(error, {})
    return Response(answer.body, answer.status, dict(answer.headers), "application/json")


# ------------------------------------------------------------------ files


async def _upload(call: _Call) -> Response:
    return JSONResponse(file_object((await receive_file(call.request, call.tenant, call.batches)).info))


async def _list_files(call: _Call) -> Response:
    page = read_page(call.request.query_params, FILES_PAGE, FILES_PAGE)
    purpose = call.request.query_params.get("purpose")

    def read() -> tuple[list[dict[str, Any]], bool]:
        files, sees = call.batches.files, call.sees
        ids = files.ids(sees)
        listed: dict[str, FileInfo] = {}
        if purpose is not None:  # only then all records are needed
            listed = {each: file.info for each in ids if (file := files.find(each, sees)) is not None}
            ids = [each for each, info in listed.items() if info.purpose == purpose]
        shown, has_more = page_of(ids, page)
        infos = [listed[each] for each in shown if each in listed]
        if purpose is None:
            infos = [file.info for each in shown if (file := files.find(each, sees)) is not None]
        return [file_object(info) for info in infos], has_more

    return JSONResponse(list_object(*await asyncio.to_thread(read)))


async def _show_file(call: _Call) -> Response:
    return JSONResponse(file_object((await call.file()).info))


async def _delete_file(call: _Call) -> Response:
    file = await call.file()
    await asyncio.to_thread(call.batches.files.delete, file)
    return JSONResponse({"id": file.info.id, "object": "file", "deleted": True})


async def _send_content(call: _Call) -> Response:
    file = await call.file()
    try:
        content = await asyncio.to_thread(open, file.content, "rb")
    except FileNotFoundError:  # deleted meanwhile
        raise _not_found("file", file.info.id) from None

    async def chunks() -> AsyncGenerator[bytes]:
        with content:
            while chunk := await asyncio.to_thread(content.read, CHUNK_BYTES):
                yield chunk

    headers = {
        "content-length": str(file.info.num_bytes),
        "content-disposition": f"attachment; filename*=UTF-8''{quote(file.info.filename, safe='')}",
        "x-content-type-options": "nosniff",
    }
    return StreamingResponse(chunks(), headers=headers, media_type="application/octet-stream")


# ------------------------------------------------------------------ batches


async def _make_batch(call: _Call) -> Response:
    batches = call.batches
    form = read_batch_form(parse_object(await _body(call.request), MAX_VALUES), batches.endpoints)
    file = await asyncio.to_thread(batches.files.find, form.input_file_id, call.sees)
    if file is None:
        raise InvalidRequest("input_file_id", f"unknown file {form.input_file_id[:80]!r}")
    if file.info.purpose != PURPOSE:
        raise InvalidRequest("input_file_id", f"must be a file of purpose {PURPOSE!r}, not {file.info.purpose!r}")
    now = batches.clock()
    made = Made(
        id=new_id(BATCH_PREFIX, now),
        tenant=call.tenant,
        key=call.caller.key,
        endpoint=form.endpoint,
        input_file_id=file.info.id,
        completion_window=form.completion_window,
        created_at=now,
        expires_at=now + form.window_s,
        metadata=form.metadata,
        output_lasts_s=form.output_lasts_s,
    )
    batch = await asyncio.to_thread(batches.batches.make, made, file.content)
    batches.runner.changed(batch.id)
    return JSONResponse(await asyncio.to_thread(_object_of, batch))


async def _list_batches(call: _Call) -> Response:
    page = read_page(call.request.query_params, DEFAULT_BATCHES_PAGE, BATCHES_PAGE)

    def read() -> tuple[list[dict[str, Any]], bool]:
        store, sees = call.batches.batches, call.sees
        shown, has_more = page_of(store.ids(sees), page)
        listed = filter(None, map(partial(store.find, tenant=sees), shown))
        return [_object_of(batch) for batch in listed], has_more

    return JSONResponse(list_object(*await asyncio.to_thread(read)))


async def _show_batch(call: _Call) -> Response:
    return JSONResponse(await asyncio.to_thread(_object_of, await call.batch()))


async def _cancel_batch(call: _Call) -> Response:
    batch = await call.batch()

    def cancel() -> dict[str, Any]:
        before = _object_of(batch)
        if before["status"] in ENDED and before["status"] != "cancelled":
            message = f"the batch {batch.id} is {before['status']} already, and cannot be cancelled"
            raise HttpRefusal(409, "batch_ended", message)
        if before["status"] != "cancelled":
            batch.record(Cancelled(at=call.batches.clock()))
        return _object_of(batch)

    body = await asyncio.to_thread(cancel)
    call.batches.runner.changed(batch.id)
    return JSONResponse(body)


def _object_of(batch: BatchFolder) -> dict[str, Any]:
    facts = batch.facts()
    assert facts is not None, "it was found by its first record, and that stays"
    return batch_object(facts, batch.progress())


async def _body(request: Request) -> bytes:
    body = b""
    async for chunk in request.stream():
        body += chunk
        if len(body) > MAX_BODY_BYTES:
            raise _too_large()
    if encoding := encoding_of(request.headers):
        body = await asyncio.to_thread(inflated, body, encoding, MAX_BODY_BYTES)
        if len(body) > MAX_BODY_BYTES:
            raise _too_large()
    return body


def _too_large() -> HttpRefusal:
    return HttpRefusal(413, "request_too_large", f"the body may have {MAX_BODY_BYTES} bytes at most")


def _not_found(kind: str, object_id: str) -> HttpRefusal:
    return HttpRefusal(404, "not_found", f"unknown {kind} {object_id[:80]!r}")
