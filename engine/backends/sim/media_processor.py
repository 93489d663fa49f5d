"""Media processor of the sim engine: no file is decoded, and each becomes as many tokens as its size says."""

import struct
from collections.abc import Sequence
from hashlib import sha256

from engine.media import (
    MAX_THUMBNAILS,
    THUMBNAIL_PIXELS,
    MediaInput,
    MediaKind,
    MediaLimits,
    MediaProcessor,
    MediaRefused,
    Modality,
    Processed,
    ProcessedItem,
)
from engine.model.detokenizer import load_tokenizer
from engine.model.model_dir import ModelDir

PLACEHOLDERS: dict[MediaKind, str] = {"image": "<image>", "audio": "<audio>", "video": "<video>"}
BEGINNINGS: dict[MediaKind, tuple[bytes, ...]] = {
    "image": (b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff", b"GIF8", b"RIFF", b"BM"),
    "audio": (b"RIFF", b"ID3", b"OggS", b"fLaC"),
    "video": (b"\0\0\0", b"\x1aE\xdf\xa3"),
}
"""First bytes of the files that it reads."""
LEAST_TOKENS, SPREAD = 20, 13
"""A file of n bytes becomes LEAST_TOKENS + n % SPREAD tokens."""


class SimMediaProcessor(MediaProcessor):
    """Processor whose items depend on the bytes of the files only.

    A placeholder is the text of its kind in `PLACEHOLDERS`, as the model's tokenizer encodes it. Where that makes no
    token of it, or there is no tokenizer, it is one of the vocabulary's last three tokens.
    """

    def __init__(self, model_dir: ModelDir) -> None:
        """Read the tokenizer.

        Raises ModelRefused.
        """
        self.modalities = {kind: Modality(text) for kind, text in PLACEHOLDERS.items()}
        tokenizer = load_tokenizer(model_dir)
        self._places: dict[MediaKind, tuple[int, ...]] = {}
        for number, (kind, text) in enumerate(PLACEHOLDERS.items(), 1):
            known = () if tokenizer is None else tuple(tokenizer.encode(text, add_special_tokens=False).ids)
            self._places[kind] = known or (model_dir.vocab_size - number,)

    def process(
        self, token_ids: Sequence[int], media: Sequence[MediaInput], limits: MediaLimits, thumbnails: bool = False
    ) -> Processed:
        for place, each in enumerate(media):
            if not each.data.startswith(BEGINNINGS[each.kind]):
                raise MediaRefused(f"the file is no {each.kind} of a known format", place)
        waiting = {kind: [each for each in media if each.kind == kind] for kind in PLACEHOLDERS}
        expanded: list[int] = []
        items: list[ProcessedItem] = []
        at = 0
        while at < len(token_ids):
            kind = next((kind for kind, place in self._places.items() if _has(token_ids, at, place)), None)
            if kind is None:
                expanded.append(token_ids[at])
                at += 1
                continue
            if not waiting[kind]:
                raise MediaRefused(f"the prompt has more places for {kind} than files")
            data = waiting[kind].pop(0).data
            length = LEAST_TOKENS + len(data) % SPREAD
            items.append(ProcessedItem(sha256(data).hexdigest(), len(expanded), length, kind.encode(), data))
            expanded += [self._places[kind][0]] * length
            at += len(self._places[kind])
        if left := next((kind for kind, files in waiting.items() if files), None):
            raise MediaRefused(f"the prompt has fewer places for {left} than files")
        pictures = [each.data for each in media if each.kind == "image"] if thumbnails else []
        return Processed(expanded, items, [_one_colour(sha256(data).digest()) for data in pictures[:MAX_THUMBNAILS]])


def _has(token_ids: Sequence[int], at: int, place: tuple[int, ...]) -> bool:
    return tuple(token_ids[at : at + len(place)]) == place


def _one_colour(digest: bytes) -> bytes:
    """Return a square in the colour of a digest, as lossless WebP: each of its five codes has one symbol."""
    red, green, blue = digest[:3]
    fields = [(0x2F, 8), (THUMBNAIL_PIXELS - 1, 14), (THUMBNAIL_PIXELS - 1, 14), (0, 7)]  # no alpha, transform or cache
    for symbol in (green, red, blue, 255):
        fields += [(0b101, 3), (symbol, 8)]
    fields.append((0b0001, 4))  # the code of distances, whose symbol 0 has one bit
    bits = at = 0
    for value, width in fields:
        bits |= value << at
        at += width
    data = bits.to_bytes(-(-at // 16) * 2, "little")
    return struct.pack("<4sI4s4sI", b"RIFF", 12 + len(data), b"WEBP", b"VP8L", len(data)) + data
