"""Pictures, sounds and videos in bodies of HTTP APIs.

A body's media become those of its request in order of appearance. So each is named by its place in this order.
"""

import base64
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

from cluster.errors import InvalidRequest
from protos import inference_pb2 as pb
from router.admission.arrivals import Arrival
from router.frontend.http.body.fields import Model, needed, shown
from router.frontend.http.errors import Caller
from router.models.media import sources_in
from router.validation import MEDIA_KINDS, check_url

PIECE_CHARS = 256 << 10
"""Characters of base64 that are decoded at a time; a multiple of 4."""
EARLIER = "previous_response_id"
"""Field that brings the media of earlier turns."""


@dataclass(slots=True)
class GivenMedium:
    """One medium of a body."""

    path: str
    """Field of the body that names it."""
    file_id: str = ""
    """File of the files API that has its content, which is still to be read; empty: the content is there."""


Given = list[GivenMedium]


class Document(Model):
    file_id: str | None = None
    file_url: str | None = None
    file_data: str | None = None
    filename: Any = None


class Url(Model):
    url: str


class Sound(Model):
    data: str
    format: Any = None
    """Format of the sound. It is not read, since the file itself shows it."""


class Part(Document):
    """Part of a content in OpenAI's APIs, of any type; those of input_file are a document's."""

    type: str = ""
    text: str | None = None
    refusal: str | None = None
    image_url: str | Url | None = None
    audio_url: str | Url | None = None
    video_url: str | Url | None = None
    input_audio: Sound | None = None
    file: Document | None = None
    annotations: Any = None
    logprobs: Any = None


Content = str | list[Part]


class MediaFiles(Protocol):
    """Files that bodies may name instead of sending them."""

    async def load(
        self, request: pb.GenerateRequest, media: Sequence[GivenMedium], caller: Caller, arrival: Arrival
    ) -> None:
        """Read the files that the request's last media name.

        Raises ServiceError naming the body's field.
        """


def read_url(path: str, kind: str, url: str | None, media: Given) -> pb.Media:
    """Read a medium that is given as a URL; the content of a data: URL is decoded.

    Raises InvalidRequest.
    """
    if not url:
        raise InvalidRequest(path, f"must be a url, not {shown(url)}")
    media.append(GivenMedium(path))
    if url[:5].lower() != "data:":
        check_url(url, path)
        return pb.Media(kind=kind, url=url)
    head, comma, content = url.partition(",")
    if not comma or not head.lower().endswith(";base64"):
        raise InvalidRequest(path, f"must begin with data:TYPE;base64, not with {shown(head[:40])}")
    return pb.Media(kind=kind, data=_decoded(path, content))


def read_data(path: str, kind: str, content: str, media: Given) -> pb.Media:
    """Read a medium that is given as a base64 text.

    Raises InvalidRequest.
    """
    media.append(GivenMedium(path))
    return pb.Media(kind=kind, data=_decoded(path, content))


def read_file(path: str, kind: str, file_id: str, media: Given) -> pb.Media:
    """Read a medium that is given as the id of a file; `kind` empty: the file's name tells it.

    Raises InvalidRequest.
    """
    if not file_id:
        raise InvalidRequest(path, "is empty")
    media.append(GivenMedium(path, file_id))
    return pb.Media(kind=kind)


def read_document(document: Document, path: str, media: Given) -> pb.Media:
    """Read a file that is given by its id, its URL or as a data: URL.

    Raises InvalidRequest, also for a type that is no picture, sound or video.
    """
    if document.file_id is not None:
        return read_file(f"{path}.file_id", "", document.file_id, media)
    if document.file_url is not None:
        return read_url(f"{path}.file_url", "image", document.file_url, media)
    url, path = document.file_data or "", f"{path}.file_data"
    kind = url[:64].lower().removeprefix("data:").partition("/")[0]
    if kind not in MEDIA_KINDS:
        raise InvalidRequest(path, "must be data:image/...;base64, or of audio or video: no other files can be read")
    return read_url(path, kind, url, media)


def read_parts(content: Content | None, path: str, known: Sequence[str], media: Given) -> list[str | pb.Media]:
    """Return the texts and media of a content, whose parts have one of the `known` types.

    Raises InvalidRequest.
    """
    if not isinstance(content, list):
        return [content] if content else []
    return [_part(part, f"{path}[{place}]", known, media) for place, part in enumerate(content)]


def _part(part: Part, path: str, known: Sequence[str], media: Given) -> str | pb.Media:
    kind = part.type
    if kind not in known:
        raise InvalidRequest(f"{path}.type", f"must be one of {', '.join(known)}, not {shown(kind)}")
    if kind == "refusal":
        return part.refusal or ""
    if kind == "text":
        return needed(part.text, f"{path}.text")
    if kind.endswith("_text"):
        return part.text or ""
    if kind == "input_audio":
        sound = needed(part.input_audio, f"{path}.input_audio")
        return read_data(f"{path}.input_audio.data", "audio", sound.data, media)
    if kind == "file":
        return read_document(needed(part.file, f"{path}.file"), f"{path}.file", media)
    if kind == "input_file":
        return read_document(part, path, media)
    if kind == "input_image" and part.file_id is not None:
        return read_file(f"{path}.file_id", "image", part.file_id, media)
    name = "image_url" if kind == "input_image" else kind
    url: str | Url | None = getattr(part, name)
    where = f"{path}.{name}.url" if isinstance(url, Url) else f"{path}.{name}"
    return read_url(where, name.removesuffix("_url"), url.url if isinstance(url, Url) else url, media)


def set_content(message: pb.ChatMessage, parts: Sequence[str | pb.Media]) -> None:
    """Set a message's parts; where all of them are texts they are its content."""
    texts = [part for part in parts if isinstance(part, str)]
    if len(texts) == len(parts):
        message.content = "".join(texts)
        return
    for part in parts:
        if isinstance(part, str):
            message.parts.add(text=part)
        else:
            message.parts.add(media=part)


def media_names(messages: Sequence[pb.ChatMessage], media: Sequence[GivenMedium]) -> dict[str, str]:
    """Return the body's fields of messages' media, by our fields; media of earlier turns come first."""
    sources = list(sources_in(messages))
    paths = [EARLIER] * (len(sources) - len(media)) + [each.path for each in media]
    names = {source.field: path for source, path in zip(sources, paths, strict=True)}
    return names | {"media": paths[0]} if paths else names


@contextmanager
def named_media(messages: Sequence[pb.ChatMessage], media: Sequence[GivenMedium]) -> Iterator[None]:
    """Run a block whose InvalidRequest errors name the body's fields of media.

    Raises InvalidRequest for a medium that is a file.
    """
    for each in media:
        if each.file_id:
            raise InvalidRequest(each.path, "files cannot be counted: send the content")
    try:
        yield
    except InvalidRequest as error:
        if (path := media_names(messages, media).get(error.field)) is None:
            raise
        raise InvalidRequest(path, error.message) from None


def _decoded(path: str, content: str) -> bytes:
    """Decode base64 piece by piece: a whole file would keep all other threads waiting."""
    if not content:
        raise InvalidRequest(path, "is empty")
    padding = content.find("=")
    if len(content) % 4 or 0 <= padding < len(content) - 2:
        raise InvalidRequest(path, "is not base64, or incomplete")
    try:
        starts = range(0, len(content), PIECE_CHARS)
        return b"".join(base64.b64decode(content[start : start + PIECE_CHARS], validate=True) for start in starts)
    except ValueError:
        raise InvalidRequest(path, "is not base64") from None
