"""An uploaded file: a multipart form, parsed as it comes and streamed to disk."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator

from python_multipart import MultipartParser
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import parse_options_header
from starlette.requests import ClientDisconnect, Request

from batches.api.reading import read_upload_form
from batches.service import Batches
from batches.state import FileInfo
from batches.storage.file_store import NewFile, StoredFile
from cluster.errors import InvalidRequest
from router.frontend.http.body.fields import refuse_encoding
from router.frontend.http.errors import HttpRefusal

SILENCE_S = 60.0
"""Seconds without a byte after which an upload is refused."""
UPLOAD_S = 3600.0
"""Seconds for the whole upload."""
LINGER_S = 5.0
"""Seconds for which the rest of a refused upload is read: a client that still sends would not see the answer."""
WRITE_BYTES = 256 << 10
"""Bytes that are written at a time."""
FORM_BYTES = 64 << 10
"""Bytes of the form besides its file."""
MAX_PARTS = 16
MAX_FILENAME_CHARS = 255


class Form:
    """Form that is being parsed: its text fields, and the content of its part `file`."""

    def __init__(self, content_type: str) -> None:
        """Create the parser.

        Raises InvalidRequest for another content type than a multipart form.
        """
        kind, options = parse_options_header(content_type)
        boundary = options.get(b"boundary")
        if kind != b"multipart/form-data" or not boundary:
            raise InvalidRequest("content-type", "must be multipart/form-data with a boundary")
        self.texts: dict[str, str] = {}
        self.filename: str | None = None
        """Name of the file; None before its part."""
        self._content: list[bytes] = []
        self._part: list[bytes] | None = None
        """Content of the part that is being read: the file's, or a text's."""
        self._part_name = ""
        self._disposition = b""
        self._header: list[bytes] = []
        self._value: list[bytes] = []
        self._num_parts, self._num_text_bytes = 0, 0
        self._is_whole = False
        try:
            self._parser = MultipartParser(
                boundary,
                {
                    "on_part_begin": self._on_part_begin,
                    "on_header_field": lambda data, begin, end: self._header.append(data[begin:end]),
                    "on_header_value": lambda data, begin, end: self._value.append(data[begin:end]),
                    "on_header_end": self._on_header_end,
                    "on_headers_finished": self._on_headers_finished,
                    "on_part_data": self._on_part_data,
                    "on_part_end": self._on_part_end,
                    "on_end": self._on_end,
                },
            )
        except FormParserError as error:
            raise _no_form(error) from None

    def feed(self, chunk: bytes) -> bytes:
        """Parse a chunk of the body, and return the file's bytes in it.

        Raises InvalidRequest.
        """
        try:
            self._parser.write(chunk)
        except FormParserError as error:
            raise _no_form(error) from None
        content = b"".join(self._content)
        self._content.clear()
        return content

    def finish(self) -> str:
        """Return the filename of the form, which must be whole.

        Raises InvalidRequest.
        """
        if not self._is_whole:
            raise InvalidRequest("", "the form is incomplete: its last boundary is missing")
        if self.filename is None:
            raise InvalidRequest("file", "is missing: the form needs a part `file` with a filename")
        return self.filename

    def _on_part_begin(self) -> None:
        self._disposition = b""
        self._num_parts += 1
        if self._num_parts > MAX_PARTS:
            raise InvalidRequest("", f"the form may have {MAX_PARTS} parts at most")

    def _on_header_end(self) -> None:
        if b"".join(self._header).lower() == b"content-disposition":
            self._disposition = b"".join(self._value)
        self._header.clear()
        self._value.clear()

    def _on_headers_finished(self) -> None:
        _, options = parse_options_header(self._disposition)
        self._part_name = options.get(b"name", b"").decode(errors="replace")
        if self._part_name != "file":
            self._part = []
            return
        if self.filename is not None:
            raise InvalidRequest("file", "appears twice")
        name = options.get(b"filename", b"").decode(errors="replace")
        self.filename = name[:MAX_FILENAME_CHARS] or "upload"
        self._part = self._content

    def _on_part_data(self, data: bytes, begin: int, end: int) -> None:
        assert self._part is not None
        if self._part is not self._content:
            self._num_text_bytes += end - begin
            if self._num_text_bytes > FORM_BYTES:
                raise InvalidRequest(self._part_name, f"the form's texts may have {FORM_BYTES} bytes at most")
        self._part.append(data[begin:end])

    def _on_part_end(self) -> None:
        assert self._part is not None
        if self._part is not self._content:
            self.texts[self._part_name] = b"".join(self._part).decode(errors="replace")
        self._part = None

    def _on_end(self) -> None:
        self._is_whole = True


async def receive_file(request: Request, tenant: str, batches: Batches) -> StoredFile:
    """Store the file of an upload.

    Raises InvalidRequest and HttpRefusal; then the rest of the body was read, so that the client sees the answer.
    """
    body = request.stream()
    try:
        refuse_encoding(request.headers)
        declared = request.headers.get("content-length", "0")
        if declared.isdigit() and int(declared[:20]) > batches.max_file_bytes + FORM_BYTES:
            raise _too_large(batches)
        async with batches.uploads.turn(tenant):
            return await _store(request, body, tenant, batches)
    except InvalidRequest:
        with contextlib.suppress(TimeoutError, ClientDisconnect):
            async with asyncio.timeout(LINGER_S):
                async for _ in body:
                    pass
        raise


async def _store(request: Request, body: AsyncGenerator[bytes], tenant: str, batches: Batches) -> StoredFile:
    form = Form(request.headers.get("content-type", ""))
    batches.space.begin(tenant, await asyncio.to_thread(batches.files.used_bytes, tenant))
    num_bytes, is_kept = 0, False
    new: NewFile | None = None
    try:
        new = await asyncio.to_thread(batches.files.new_file, tenant)
        unwritten: list[bytes] = []
        num_unwritten = 0
        async for chunk in _in_time(body):
            content = form.feed(chunk)
            if num_bytes + len(content) > batches.max_file_bytes:
                raise _too_large(batches)
            batches.space.take(tenant, len(content))
            num_bytes += len(content)
            unwritten.append(content)
            num_unwritten += len(content)
            if num_unwritten >= WRITE_BYTES:
                await asyncio.to_thread(new.write, b"".join(unwritten))
                unwritten, num_unwritten = [], 0
        await asyncio.to_thread(new.write, b"".join(unwritten))
        info = _info(form, new, tenant, batches.clock())
        stored = await asyncio.to_thread(batches.files.add, new, info)
        is_kept = True
        return stored
    finally:
        batches.space.end(tenant, num_bytes, is_kept)
        if new is not None and not is_kept:
            new.discard()


def _info(form: Form, new: NewFile, tenant: str, now: float) -> FileInfo:
    filename = form.finish()
    upload = read_upload_form(form.texts)
    return FileInfo(
        id=new.id,
        tenant=tenant,
        num_bytes=new.num_bytes,
        created_at=now,
        filename=filename,
        purpose=upload.purpose,
        expires_at=None if upload.lasts_s is None else now + upload.lasts_s,
    )


async def _in_time(body: AsyncGenerator[bytes]) -> AsyncGenerator[bytes]:
    """Yield the chunks of a body.

    Raises HttpRefusal for one that is too slow.
    """
    loop = asyncio.get_running_loop()
    ends_at = loop.time() + UPLOAD_S
    try:
        while True:
            async with asyncio.timeout_at(min(ends_at, loop.time() + SILENCE_S)):
                chunk = await anext(body, None)
            if chunk is None:
                return
            yield chunk
    except TimeoutError:
        message = f"nothing came for {SILENCE_S:g} s, or the upload took more than {UPLOAD_S:g} s"
        raise HttpRefusal(408, "request_timeout", message, "file") from None


def _too_large(batches: Batches) -> HttpRefusal:
    limit = f"{batches.max_file_bytes >> 20} MiB"
    return HttpRefusal(413, "file_too_large", f"the file may have {limit} at most (max_file_mib)", "file")


def _no_form(error: FormParserError) -> InvalidRequest:
    return InvalidRequest("", f"the body is not a multipart form: {error}")
