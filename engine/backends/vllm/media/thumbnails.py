"""Thumbnails of decoded pictures, for people who read samples."""

import logging
from collections.abc import Sequence
from io import BytesIO

from PIL import Image

from engine.media import MAX_THUMBNAIL_BYTES, MAX_THUMBNAILS, THUMBNAIL_PIXELS

log = logging.getLogger(__name__)

QUALITIES = (75, 50, 25, 5)
"""Qualities of WebP, tried until a thumbnail is small enough; noise of 96 x 96 pixels is, at the second."""


def thumbnails_of(pictures: Sequence[Image.Image]) -> list[bytes]:
    """Return WebP files of the first pictures; an empty one where none can be made."""
    return [_thumbnail(each) for each in pictures[:MAX_THUMBNAILS]]


def _thumbnail(picture: Image.Image) -> bytes:
    scale = min(1, THUMBNAIL_PIXELS / max(picture.size))
    size = max(1, round(picture.width * scale)), max(1, round(picture.height * scale))
    try:
        small = picture.resize(size, Image.Resampling.BICUBIC, reducing_gap=2.0)
        for quality in QUALITIES:
            file = BytesIO()
            small.save(file, "WEBP", quality=quality)
            if file.tell() <= MAX_THUMBNAIL_BYTES:
                return file.getvalue()
    except (OSError, ValueError, KeyError, MemoryError) as error:  # as of a Pillow without WebP
        log.warning("a picture has no thumbnail: %s: %s", type(error).__name__, error)  # its request needs none
    return b""
