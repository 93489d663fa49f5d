"""Files that a client may send as pictures, and that are none, are broken, or are bombs."""

import io
import random
import struct
import zipfile
import zlib
from collections.abc import Callable, Iterator

from PIL import Image

from support.media_files import picture, png_of_size


def hostile_files(rng: random.Random, count: int) -> Iterator[bytes]:
    """Yield so many files, of all kinds in turn."""
    for number in range(count):
        yield KINDS[number % len(KINDS)](rng)


def _huge_png(rng: random.Random) -> bytes:
    return png_of_size(rng.choice([20_000, 65_535, 2**31 - 1]), rng.choice([20_000, 65_535, 2**31 - 1]))


def _zlib_bomb(rng: random.Random) -> bytes:
    """A PNG within the limit of pixels whose data unpacks to far more than its rows."""
    file = bytearray(png_of_size(64, 64))
    at = file.index(b"IDAT")
    body = zlib.compress(bytes(rng.choice([1, 50, 200]) << 20), 9)
    chunk = struct.pack(">I", len(body)) + b"IDAT" + body + struct.pack(">I", zlib.crc32(b"IDAT" + body))
    return bytes(file[: at - 4]) + chunk + bytes(file[-12:])


def _text_bomb(rng: random.Random) -> bytes:
    """A PNG with compressed text that unpacks to much."""
    file = picture(rng.randrange(9))
    body = b"k\0\0" + zlib.compress(bytes(100 << 20), 9)
    chunk = struct.pack(">I", len(body)) + b"zTXt" + body + struct.pack(">I", zlib.crc32(b"zTXt" + body))
    return file[:33] + chunk + file[33:]


def _huge_gif(rng: random.Random) -> bytes:
    size = struct.pack("<HH", 65_535, 65_535)
    frame = b"," + struct.pack("<HHHH", 0, 0, 65_535, 65_535) + b"\0\2\2D\1\0;"
    return b"GIF89a" + size + b"\x80\0\0" + bytes(6) + (frame if rng.random() < 0.5 else b";")


def _gif_of_large_frame(rng: random.Random) -> bytes:
    """A GIF whose first frame is larger than the picture that it announces."""
    frame = b"," + struct.pack("<HHHH", 0, 0, rng.choice([30_000, 65_535]), 65_535) + b"\0\2\2D\1\0;"
    return b"GIF89a" + struct.pack("<HH", 2, 2) + b"\x80\0\0" + bytes(6) + frame


def _huge_webp(rng: random.Random) -> bytes:
    side = struct.pack("<I", 16_382)[:3]
    extended = b"VP8X" + struct.pack("<I", 10) + bytes(4) + side + side
    return b"RIFF" + struct.pack("<I", 4 + len(extended)) + b"WEBP" + extended + rng.randbytes(20)


def _huge_bmp(rng: random.Random) -> bytes:
    side = rng.choice([40_000, 2**31 - 1, -1])
    return (
        b"BM"
        + struct.pack("<IHHI", 54, 0, 0, 54)
        + struct.pack("<IiiHHIIiiII", 40, side, side, 1, 24, 0, 0, 0, 0, 0, 0)
    )


def _truncated(rng: random.Random) -> bytes:
    file = picture(rng.randrange(99), form=rng.choice(["PNG", "JPEG", "WEBP", "GIF", "BMP"]))
    return file[: rng.randrange(len(file))]


def _flipped(rng: random.Random) -> bytes:
    file = bytearray(picture(rng.randrange(99), form=rng.choice(["PNG", "JPEG", "WEBP", "GIF", "BMP"])))
    for _ in range(rng.randrange(1, 40)):
        file[rng.randrange(len(file))] = rng.randrange(256)
    return bytes(file)


def _of_100_megapixels(rng: random.Random) -> bytes:
    file = io.BytesIO()
    Image.new("1", (10_000, 10_000)).save(file, "PNG")
    return file.getvalue()


def _thin(rng: random.Random) -> bytes:
    return picture(1, *rng.choice([(1, 1), (1, 4000), (4000, 1), (2, 3), (3, 1)]))


def _other_mode(rng: random.Random) -> bytes:
    file = io.BytesIO()
    mode = rng.choice(["1", "L", "LA", "P", "RGBA", "I;16", "CMYK"])
    form = "JPEG" if mode == "CMYK" else "PNG"
    Image.new(mode, (30, 40)).save(file, form)
    return file.getvalue()


def _other_format(rng: random.Random) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (40, 40)).save(file, rng.choice(["TIFF", "PPM", "ICO", "TGA", "EPS", "PDF"]))
    return file.getvalue()


def _no_picture(rng: random.Random) -> bytes:
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as zipped:
        zipped.writestr("a", bytes(1 << 20))
    return rng.choice(
        [
            b'<svg xmlns="http://www.w3.org/2000/svg"><image href="file:///etc/passwd"/></svg>',
            b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n(/etc/passwd) (r) file",
            b"text, and no picture",
            b"\x89PNG\r\n\x1a\n",
            b"RIFF\xff\xff\xff\xffWEBP",
            b"RIFF\x24\0\0\0WAVEfmt " + bytes(40),
            b"\0",
            archive.getvalue(),
            rng.randbytes(rng.randrange(1, 5000)),
        ]
    )


def _exif(rng: random.Random) -> bytes:
    """A picture with broken or odd metadata."""
    file, exif = io.BytesIO(), Image.Exif()
    exif[0x0112] = rng.choice([0, 3, 6, 9, 65_535])
    Image.new("RGB", (40, 60)).save(file, "JPEG", exif=exif)
    data = bytearray(file.getvalue())
    if rng.random() < 0.5:
        data[30:34] = rng.randbytes(4)
    return bytes(data)


KINDS: tuple[Callable[[random.Random], bytes], ...] = (
    *(_huge_png, _zlib_bomb, _text_bomb, _huge_gif, _gif_of_large_frame, _huge_webp, _huge_bmp, _truncated, _flipped),
    *(_of_100_megapixels, _thin, _other_mode, _other_format, _no_picture, _exif),
)
