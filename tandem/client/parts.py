"""Chat messages and media as callers write them, to messages of the wire."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

from cluster.errors import InvalidRequest
from engine.media.processor import MediaKind
from protos import inference_pb2 as pb

Part = str | Mapping[str, Any] | pb.ContentPart
"""Part of a message: a text, or a mapping. `{"type": "text", "text": ...}` is a text; `{"type": "image"}`, or "audio"
or "video", is a file with one of `path` (read here), `data` (bytes) and `url`."""
Medium = Mapping[str, Any] | pb.Media
Message = tuple[str, str | Sequence[Part]]
"""Chat message as (role, content); the content is a text, or parts."""
KINDS: tuple[str, ...] = get_args(MediaKind)
SOURCES = ("path", "data", "url")


def chat_message(message: Message | pb.ChatMessage, where: str) -> pb.ChatMessage:
    """Return a message; `where` names it in errors.

    Raises InvalidRequest.
    """
    if isinstance(message, pb.ChatMessage):
        return message
    role, content = message
    if isinstance(content, str):
        return pb.ChatMessage(role=role, content=content)
    parts = [_part(part, f"{where}.parts[{place}]") for place, part in enumerate(content)]
    return pb.ChatMessage(role=role, parts=parts)


def medium(given: Medium, where: str) -> pb.Media:
    """Return a picture, sound or video, whose file is read where a path is given; `where` names it in errors.

    Raises InvalidRequest.
    """
    if isinstance(given, pb.Media):
        return given
    kind, sources = str(given.get("type")), [name for name in SOURCES if given.get(name) is not None]
    unknown = given.keys() - {"type", *SOURCES}
    if kind not in KINDS or len(sources) != 1 or unknown:
        reason = f'needs "type", one of {", ".join(KINDS)}, and one of {", ".join(SOURCES)}, not {sorted(given)}'
        raise InvalidRequest(where, reason)
    (source,) = sources
    if source != "path":
        return pb.Media(kind=kind, **{source: given[source]})
    try:
        return pb.Media(kind=kind, data=Path(given["path"]).read_bytes())
    except OSError as error:
        raise InvalidRequest(where, f"{given['path']} cannot be read: {error.strerror}") from None


def picture(given: str) -> dict[str, str]:
    """Return a picture that is named by a path or a URL."""
    is_url = given.lower().startswith(("http://", "https://", "data:"))
    return {"type": "image", "url" if is_url else "path": given}


def _part(part: Part, where: str) -> pb.ContentPart:
    if isinstance(part, pb.ContentPart):
        return part
    if isinstance(part, str):
        return pb.ContentPart(text=part)
    if part.get("type") == "text" and isinstance(part.get("text"), str):
        return pb.ContentPart(text=part["text"])
    return pb.ContentPart(media=medium(part, where))
