"""OpenAI's objects of files, and lists. Pure."""

from collections.abc import Sequence
from typing import Any

from batches.records import FileInfo


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
