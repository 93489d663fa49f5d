"""Small pictures and sounds as files."""

import struct
import wave
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


def sound(seed: int = 0, seconds: float = 1.0, rate: int = 16_000) -> bytes:
    """A WAV of loud tones, ten a second, whose pitches a seed decides."""
    times = np.arange(int(seconds * rate)) / rate
    pitches = np.random.default_rng(seed).uniform(200, 3500, len(times) * 10 // rate + 1)
    waves = np.sin(2 * np.pi * pitches[(times * 10).astype(int)] * times)
    file = BytesIO()
    with wave.open(file, "wb") as writer:
        writer.setparams((1, 2, rate, 0, "NONE", ""))
        writer.writeframes((waves * 30_000).astype("<i2").tobytes())
    return file.getvalue()


def png_of_size(width: int, height: int) -> bytes:
    """A PNG that says that it has this size, and has almost no pixels."""

    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + header + chunk(b"IDAT", zlib.compress(b"\0" * 64)) + chunk(b"IEND", b"")
