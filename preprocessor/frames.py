"""Frames between a preprocessor and its children: a JSON object and byte strings.

No frame is pickled: a hostile file may take over a child, and must not reach further.
"""

import json
import socket
import struct
from collections.abc import Sequence
from typing import IO, Any, NamedTuple

_HEAD = struct.Struct("<II")
"""Sizes of the object as JSON, and number of byte strings; their sizes follow, then everything itself."""
_MAX_JSON_BYTES = 64 << 20
_MAX_PARTS = 4096


class Frame(NamedTuple):
    values: dict[str, Any]
    parts: Sequence[bytes] = ()


class NoFrame(Exception):
    """Bytes of the other end that are no frame, or a too large one."""


def encoded(frame: Frame) -> list[bytes]:
    """Return the pieces of a frame, to be written one after the other."""
    body = json.dumps(frame.values).encode()
    sizes = struct.pack(f"<{len(frame.parts)}Q", *map(len, frame.parts))
    return [_HEAD.pack(len(body), len(frame.parts)) + sizes + body, *frame.parts]


async def read_frame(reader: Any, max_bytes: int) -> Frame:
    """Read a frame from an asyncio.StreamReader.

    Raises asyncio.IncompleteReadError at the end, ConnectionError, and NoFrame.
    """
    json_bytes, num_parts = _HEAD.unpack(await reader.readexactly(_HEAD.size))
    if json_bytes > _MAX_JSON_BYTES or num_parts > _MAX_PARTS:
        raise NoFrame(f"a head of {json_bytes} bytes and {num_parts} parts")
    sizes = struct.unpack(f"<{num_parts}Q", await reader.readexactly(8 * num_parts))
    if sum(sizes) > max_bytes:
        raise NoFrame(f"{sum(sizes)} bytes, at most {max_bytes} are taken")
    try:
        values = json.loads(await reader.readexactly(json_bytes))
    except ValueError as error:
        raise NoFrame(f"no JSON: {error}") from None
    if not isinstance(values, dict):
        raise NoFrame("no JSON object")
    return Frame(values, [await reader.readexactly(size) for size in sizes])


def send_frame(link: socket.socket, frame: Frame) -> None:
    """Send a frame, waiting until all of it has gone."""
    for piece in encoded(frame):
        link.sendall(piece)


def receive_frame(file: IO[bytes]) -> Frame | None:
    """Read a frame, waiting for it; None at the end."""
    head = file.read(_HEAD.size)
    if len(head) < _HEAD.size:
        return None
    json_bytes, num_parts = _HEAD.unpack(head)
    sizes = struct.unpack(f"<{num_parts}Q", file.read(8 * num_parts))
    values = json.loads(file.read(json_bytes))
    return Frame(values, [file.read(size) for size in sizes])
