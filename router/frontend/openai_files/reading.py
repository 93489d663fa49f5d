"""Reading of forms, bodies and queries of the files and batches API. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cluster.errors import InvalidRequest
from router.batches.state import window_s
from router.frontend.http.body.fields import Fields, IgnoredFields, shown

PURPOSE = "batch"
"""Purpose of files that a batch reads."""
PURPOSES = (PURPOSE, "vision", "user_data")
"""Purposes of uploaded files; those of the last two are pictures, sounds and videos of requests."""
MAX_METADATA, MAX_KEY_CHARS, MAX_VALUE_CHARS = 16, 64, 512
MIN_LASTS_S, MAX_LASTS_S = 3600, 30 * 86_400
"""Bounds of `expires_after.seconds`, as OpenAI's."""


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
    values = {"anchor": form.get("expires_after[anchor]"), "seconds": int(seconds) if _is_number(seconds) else seconds}
    return UploadForm(_lasts_s(Fields(values, "expires_after")), purpose)


def read_batch_form(values: Any, endpoints: Sequence[str]) -> BatchForm:
    """Read the body of a request for a batch.

    Raises InvalidRequest.
    """
    fields = Fields(values, ignored=IgnoredFields(strict=True))
    input_file_id = fields.text("input_file_id", required=True)
    endpoint = fields.text("endpoint", required=True)
    if endpoint not in endpoints:
        raise fields.refuse("endpoint", f"must be one of {', '.join(endpoints)}, not {shown(endpoint)}")
    completion_window = fields.text("completion_window", required=True)
    seconds = window_s(completion_window)
    metadata = _metadata(fields)
    expiry = fields.nested("output_expires_after")
    output_lasts_s = None if expiry is None else _lasts_s(expiry)
    fields.finish()
    return BatchForm(input_file_id, endpoint, completion_window, seconds, metadata, output_lasts_s)


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


def _metadata(fields: Fields) -> dict[str, str] | None:
    values = fields.take("metadata")
    if values is None:
        return None
    if not isinstance(values, dict) or not all(isinstance(value, str) for value in values.values()):
        raise fields.refuse("metadata", "must be an object of strings")
    if len(values) > MAX_METADATA:
        raise fields.refuse("metadata", f"may have {MAX_METADATA} keys at most, not {len(values)}")
    for key, value in values.items():
        if len(key) > MAX_KEY_CHARS or len(value) > MAX_VALUE_CHARS:
            limits = f"{MAX_KEY_CHARS} characters of a key and {MAX_VALUE_CHARS} of a value"
            raise fields.refuse("metadata", f"{shown(key)} is above the limits: {limits}")
    return values


def _lasts_s(fields: Fields) -> int:
    """Return the seconds of an `expires_after`."""
    anchor = fields.text("anchor", required=True)
    if anchor != "created_at":
        raise fields.refuse("anchor", f"must be 'created_at', not {shown(anchor)}")
    seconds = fields.integer("seconds", MIN_LASTS_S, MAX_LASTS_S)
    if seconds is None:
        raise fields.refuse("seconds", "is missing")
    return seconds


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) < 18
