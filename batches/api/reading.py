"""Reading of forms, bodies and queries of the files and batches API. Pure.

OpenAI's objects of files, and lists. Pure.

Pure.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import msgspec

from batches.state import FileInfo, window_s
from cluster.errors import InvalidRequest
from router.frontend.http.body.fields import IgnoredFields, Model, shown, typed

PURPOSE = "batch"
"""Purpose of files that a batch reads."""
PURPOSES = (PURPOSE, "vision", "user_data")
"""Purposes of uploaded files; those of the last two are pictures, sounds and videos of requests."""
MAX_METADATA, MAX_KEY_CHARS, MAX_VALUE_CHARS = 16, 64, 512
MIN_LASTS_S, MAX_LASTS_S = 3600, 30 * 86_400
"""Bounds of `expires_after.seconds`, as OpenAI's."""
STRICT = IgnoredFields(strict=True)
"""No field is ignored here, so that this collection stays empty."""


class Expiry(Model):
    """Time after which a file is deleted."""

    anchor: Literal["created_at"]
    seconds: Annotated[int, msgspec.Meta(ge=MIN_LASTS_S, le=MAX_LASTS_S)]


class BatchBody(Model):
    """Body of POST /v1/batches."""

    input_file_id: str
    endpoint: str
    completion_window: str
    metadata: dict[str, str] | None = None
    output_expires_after: Expiry | None = None


@dataclass(frozen=True, slots=True)
class UploadForm:
    """Fields of an upload besides its file."""

    lasts_s: int | None
    """Seconds after which the file is deleted."""
    purpose: str = PURPOSE


@dataclass(frozen=True, slots=True)
class BatchForm:
    """A batch that a client asks for."""

    input_file_id: str
    endpoint: str
    completion_window: str
    window_s: int
    metadata: dict[str, str] | None
    output_lasts_s: int | None


@dataclass(frozen=True, slots=True)
class PageQuery:
    """A part of a list."""

    limit: int
    after: str
    newest_first: bool = True


def read_upload_form(form: Mapping[str, str]) -> UploadForm:
    """Read the text fields of an upload.

    Raises InvalidRequest.
    """
    known = {"purpose", "expires_after[anchor]", "expires_after[seconds]"}
    for name in form:
        if name not in known:
            raise InvalidRequest(name, "is not supported")
    purpose = form.get("purpose")
    if purpose not in PURPOSES:
        raise InvalidRequest("purpose", f"must be one of {', '.join(PURPOSES)}, not {shown(purpose)}")
    if "expires_after[anchor]" not in form and "expires_after[seconds]" not in form:
        return UploadForm(None, purpose)
    seconds = form.get("expires_after[seconds]", "")
    given = {"anchor": form.get("expires_after[anchor]"), "seconds": int(seconds) if _is_number(seconds) else seconds}
    expiry = typed({name: value for name, value in given.items() if value}, Expiry, "expires_after", STRICT)
    return UploadForm(expiry.seconds, purpose)


def read_batch_form(values: Any, endpoints: Sequence[str]) -> BatchForm:
    """Read the body of a request for a batch.

    Raises InvalidRequest.
    """
    body = typed(values, BatchBody, "", STRICT)
    if body.endpoint not in endpoints:
        raise InvalidRequest("endpoint", f"must be one of {', '.join(endpoints)}, not {shown(body.endpoint)}")
    seconds = window_s(body.completion_window)
    _check_metadata(body.metadata or {})
    lasts_s = None if body.output_expires_after is None else body.output_expires_after.seconds
    return BatchForm(body.input_file_id, body.endpoint, body.completion_window, seconds, body.metadata, lasts_s)


def read_page(query: Mapping[str, str], default: int, most: int) -> PageQuery:
    """Read `limit`, `after` and `order`.

    Raises InvalidRequest.
    """
    limit = query.get("limit", str(default))
    if not _is_number(limit) or not 1 <= int(limit) <= most:
        raise InvalidRequest("limit", f"must be 1 to {most}, not {shown(limit)}")
    order = query.get("order", "desc")
    if order not in ("asc", "desc"):
        raise InvalidRequest("order", f"must be asc or desc, not {shown(order)}")
    return PageQuery(int(limit), query.get("after", ""), order == "desc")


def page_of(ids: Sequence[str], query: PageQuery) -> tuple[list[str], bool]:
    """Return the ids of a page, and whether more follow; `ids` are the oldest first.

    Raises InvalidRequest.
    """
    ordered = list(reversed(ids)) if query.newest_first else list(ids)
    begin = 0
    if query.after:
        if query.after not in ordered:
            raise InvalidRequest("after", f"{shown(query.after)} is not in the list")
        begin = ordered.index(query.after) + 1
    return ordered[begin : begin + query.limit], len(ordered) > begin + query.limit


def _check_metadata(metadata: Mapping[str, str]) -> None:
    if len(metadata) > MAX_METADATA:
        raise InvalidRequest("metadata", f"may have {MAX_METADATA} keys at most, not {len(metadata)}")
    for key, value in metadata.items():
        if len(key) > MAX_KEY_CHARS or len(value) > MAX_VALUE_CHARS:
            limits = f"{MAX_KEY_CHARS} characters of a key and {MAX_VALUE_CHARS} of a value"
            raise InvalidRequest("metadata", f"{shown(key)} is above the limits: {limits}")


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) < 18


def file_object(info: FileInfo) -> dict[str, Any]:
    return {
        "id": info.id,
        "object": "file",
        "bytes": info.num_bytes,
        "created_at": int(info.created_at),
        "expires_at": None if info.expires_at is None else int(info.expires_at),
        "filename": info.filename,
        "purpose": info.purpose,
        "status": "processed",
        "status_details": None,
    }


def list_object(items: Sequence[dict[str, Any]], has_more: bool) -> dict[str, Any]:
    return {
        "object": "list",
        "data": items,
        "first_id": items[0]["id"] if items else None,
        "last_id": items[-1]["id"] if items else None,
        "has_more": has_more,
    }
