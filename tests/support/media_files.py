"""Small pictures as files."""

import struct
import zlib
from io import BytesIO

import numpy as np
from PIL import Image


def picture(seed: int = 0, width: int = 84, height: int = 56, form: str = "PNG") -> bytes:
    """A picture whose pixels a seed decides."""
    pixels = np.random.default_rng(seed).integers(0, 255, (height, width, 3), np.uint8)
    file = BytesIO()
    Image.fromarray(pixels).save(file, form)
    return file.getvalue()


def png_of_size(width: int, height: int) -> bytes:
    """A PNG that says that it has this size, and has almost no pixels."""

    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + header + chunk(b"IDAT", zlib.compress(b"\0" * 64)) + chunk(b"IEND", b"")
