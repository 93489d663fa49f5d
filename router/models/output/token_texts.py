"""Texts and bytes of single tokens, and the part of a text that each of its tokens has.

A token alone may be a part of a character, or lose the space before it. So a token's bytes come from the vocabulary,
and its place in a text from the text itself.
"""

import codecs
import json
import unicodedata
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tokenizers import Tokenizer

from engine.model.detokenizer import CONTEXT_TOKENS

RESYNC_CHARS = 64
"""Characters within which a token's text is looked for where the text goes on with something else."""


@dataclass(frozen=True, slots=True)
class TokenForm:
    """A token by itself."""

    text: str
    """Text, unlike any other token's bytes: a part of a character is written as OpenAI does, `bytes:\\xf0\\x9f`."""
    raw: bytes
    """Bytes, of a special token those of its name."""
    is_special: bool = False
    """Whether a text has the token only where special tokens are kept."""

    @classmethod
    def of(cls, raw: bytes, is_special: bool = False) -> "TokenForm":
        try:
            return cls(raw.decode(), raw, is_special)
        except UnicodeDecodeError:
            return cls("bytes:" + "".join(f"\\x{byte:02x}" for byte in raw), raw, is_special)


FormOf = Callable[[int], TokenForm]
"""Function that returns the form of a token id."""


class TokenForms:
    """Forms of one tokenizer's tokens, found when needed."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        """Create them; without a tokenizer all are empty."""
        self._tokenizer = tokenizer
        self._forms: dict[int, TokenForm] = {}
        self._added = {} if tokenizer is None else tokenizer.get_added_tokens_decoder()
        self._has_bytes = tokenizer is not None and "ByteLevel" in _decoder_types(tokenizer)
        self._anchor: list[int] | None = None
        """An ordinary token, after which every token has its whole text."""

    def of(self, token_id: int) -> TokenForm:
        form = self._forms.get(token_id)
        if form is None:
            form = self._forms[token_id] = self._find(token_id)
        return form

    def _find(self, token_id: int) -> TokenForm:
        name = None if self._tokenizer is None else self._tokenizer.id_to_token(token_id)
        if name is None:
            return TokenForm("", b"")
        added = self._added.get(token_id)
        if self._has_bytes:
            return TokenForm.of(_bytes_of(name), added is not None and added.special)
        if added is not None:
            return TokenForm.of(name.encode(), added.special)
        if len(name) == 6 and name.startswith("<0x") and name.endswith(">"):
            return TokenForm.of(bytes.fromhex(name[3:5]))
        return TokenForm.of(self._after_anchor(token_id).encode())

    def _after_anchor(self, token_id: int) -> str:
        assert self._tokenizer is not None, "it has a name"
        if self._anchor is None:
            vocabulary = self._tokenizer.get_vocab(with_added_tokens=False)
            self._anchor = [
                next((one for name, one in vocabulary.items() if name.isascii() and name.isalnum()), token_id)
            ]
        anchor = self._anchor
        before: str = self._tokenizer.decode(anchor, skip_special_tokens=False)
        text: str = self._tokenizer.decode([*anchor, token_id], skip_special_tokens=False)
        return text.removeprefix(before)


def _decoder_types(tokenizer: Tokenizer) -> set[str]:
    if tokenizer.decoder is None:
        return set()
    description: dict[str, Any] = json.loads(tokenizer.decoder.__getstate__())
    return {one["type"] for one in (description, *description.get("decoders", ()))}


def _byte_characters() -> dict[str, int]:
    """Return the byte of each character in names of byte-level tokens: printable bytes stand for themselves."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + place): byte for place, byte in enumerate(others)}


_BYTES = _byte_characters()


def _bytes_of(name: str) -> bytes:
    """Return the bytes of a byte-level token, as the decoder does: a name with another character is text."""
    try:
        return bytes(_BYTES[char] for char in name)
    except KeyError:
        return name.encode()


@dataclass(frozen=True, slots=True)
class TextToken:
    """A token in its text."""

    token_id: int
    value: Any
    """Value that came with the token."""
    text: str
    """Part of the text. Empty for a token that the text has not; a character is part of its last token."""
    raw: bytes
    """Bytes of the text: those of all tokens, joined, are the text."""
    offset: int
    """Characters before the token."""


@dataclass(slots=True)
class _Group:
    """Tokens of whole characters."""

    tokens: list[tuple[int, Any, bytes, str]]
    """Id, value, bytes and characters of each; characters come with their last byte."""

    @property
    def text(self) -> str:
        return "".join(text for *_, text in self.tokens)


class TokensInText:
    """Tokens of a growing text, each returned once the text has its characters, in order."""

    def __init__(
        self, form_of: FormOf, num_chars: int = 0, keeps_special: bool = False, before: Sequence[int] = ()
    ) -> None:
        """Start after `num_chars` characters.

        `keeps_special`: the text has special tokens. `before`: the tokens before the first one.
        """
        self._form_of = form_of
        self._num_chars = num_chars
        self._keeps_special = keeps_special
        self._text = ""
        """Text without a token as yet."""
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._decoder.decode(b"".join(self._raw(token_id) for token_id in before[-CONTEXT_TOKENS:]))
        self._begun = self._decoder.getstate()[0]
        """Bytes of a character that began before the first token."""
        self._groups: deque[_Group] = deque()
        """Groups whose text has not come, the last one perhaps not whole."""
        self._is_open = False
        """Whether the last group is not whole."""

    def add(self, token_ids: Sequence[int], values: Sequence[Any], text: str, ends: bool = False) -> list[TextToken]:
        """Add tokens with their values, and text; return the tokens that are now certain.

        `ends`: nothing follows, so that tokens beyond the text have no part in it.
        """
        self._text += text
        for token_id, value in zip(token_ids, values, strict=True):
            raw = self._raw(token_id)
            chars = self._decoder.decode(raw)
            raw, self._begun = self._begun + raw, b""
            if not self._is_open:
                self._groups.append(_Group([]))
            self._groups[-1].tokens.append((token_id, value, raw, chars))
            self._is_open = bool(self._decoder.getstate()[0])
        if ends and self._is_open:
            *front, (token_id, value, raw, chars) = self._groups[-1].tokens
            chars += self._decoder.decode(b"", final=True)
            self._groups[-1] = _Group([*front, (token_id, value, raw, chars)])
            self._is_open = False
        certain: list[TextToken] = []
        while len(self._groups) > self._is_open and (ends or len(self._text) >= len(self._groups[0].text)):
            certain += self._placed(self._groups.popleft(), ends)
        if ends and certain and self._text:  # text that no token's bytes give: of a decoder of its own kind
            last, rest, self._text = certain[-1], self._text, ""
            certain[-1] = replace(last, text=last.text + rest, raw=last.raw + rest.encode())
        return certain

    @property
    def waits(self) -> bool:
        """Whether tokens wait for their text."""
        return bool(self._groups)

    def _raw(self, token_id: int) -> bytes:
        form = self._form_of(token_id)
        return b"" if form.is_special and not self._keeps_special else form.raw

    def _placed(self, group: _Group, ends: bool) -> list[TextToken]:
        whole = group.text
        taken = self._taken(whole, ends)
        self._text = self._text[len(taken) :]
        raws = _cut(group, taken, whole)
        placed, at = [], 0
        for place, ((token_id, value, _, chars), raw) in enumerate(zip(group.tokens, raws, strict=True)):
            text = taken[at : at + len(chars)] if whole.startswith(taken) else ""
            if place == len(raws) - 1:
                text = taken[at:]
            placed.append(TextToken(token_id, value, text, raw, self._num_chars))
            at += len(text)
            self._num_chars += len(text)
        return placed

    def _taken(self, chars: str, ends: bool) -> str:
        """Return the part of the text that these characters are."""
        text = self._text
        if text.startswith(chars):
            return chars
        if ends and chars.startswith(text):  # a stop string or the limit cut it off
            return text
        if chars.startswith(" ") and text.startswith(chars[1:]):  # some decoders drop the first space
            return chars[1:]
        at = text.find(chars, 0, len(chars) + RESYNC_CHARS)
        return text[: at + len(chars)] if at >= 0 else ""


def _cut(group: _Group, taken: str, whole: str) -> list[bytes]:
    """Return the bytes of each token of a group of which the text has the part `taken`."""
    raws = [raw for _, _, raw, _ in group.tokens]
    if taken == whole:
        return raws
    total = taken.encode()
    if not b"".join(raws).startswith(total):
        return [*(b"" for _ in raws[1:]), total]
    cut, at = [], 0
    for raw in raws:
        cut.append(total[at : at + len(raw)])
        at += len(raw)
    return cut


def pieces_by_offsets(text: str, offsets: Sequence[tuple[int, int]]) -> list[str]:
    """Return the part of the text of each token, by the tokens' first and last characters.

    Characters between two tokens go to the second one, but for marks that the tokenizer composed with the character
    before. A character of several tokens goes to its last one.
    """
    pieces, at = [], 0
    for place, (_, end) in enumerate(offsets):
        following = offsets[place + 1] if place + 1 < len(offsets) else (len(text), len(text))
        if following[1] > following[0] and following[0] < end:
            end = following[0]  # the next token has a part of the last character
        end = max(at, end) if place + 1 < len(offsets) else len(text)
        while at < end < following[0] and unicodedata.combining(text[end]):
            end += 1
        pieces.append(text[at:end])
        at = end
    return pieces
