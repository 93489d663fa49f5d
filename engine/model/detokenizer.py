"""Tokenizer of a model directory, and incremental detokenisation.

Needs no torch.
"""

from collections.abc import Sequence

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from cluster.errors import InvalidRequest
from engine.model.model_dir import ModelDir
from kvcache.block_keys import max_token

NO_CHARACTER = "\ufffd"
"""Character for bytes that are no character, or not a whole one."""
MAX_CHARACTER_TOKENS = 16
"""Largest number of tokens of one character, however the tokenizer splits its bytes and combining parts."""
CONTEXT_TOKENS = 8
"""Tokens of the prompt's end with which decoding starts: a token's text can depend on the one before it."""
UTF8_BYTES = 4
"""Bytes of a character at most."""


def load_tokenizer(model_dir: ModelDir) -> Tokenizer | None:
    """Load the tokenizer; None when the directory has none, and then only token ids go in and out."""
    if (file := model_dir.path / "tokenizer.json").exists():
        return Tokenizer.from_file(str(file))
    if not model_dir.has_tokenizer:
        return None
    from transformers import AutoTokenizer  # it converts older formats, and is slow to import

    slow = AutoTokenizer.from_pretrained(model_dir.path, local_files_only=True, trust_remote_code=False)
    converted: Tokenizer = slow.backend_tokenizer
    return converted


def check_token_ids(token_ids: Sequence[int], field: str, vocab_size: int) -> None:
    """Check token ids.

    Raises InvalidRequest; an id outside the vocabulary would crash the engine and all its requests.
    """
    if len(token_ids) and (largest := max_token(token_ids)) >= vocab_size:
        raise InvalidRequest(field, f"token id {largest} is out of range: the vocabulary has {vocab_size}")


class _Decoding:
    """Incremental text of tokens.

    A token's text is known from decoding it together with earlier tokens. tokenizers' `DecodeStream` does so quickly,
    but raises where invalid bytes change earlier text, repeats text of a prompt that ends within a character, and
    awaits a character for ever. There the text is decoded without it, and another one goes on afterwards.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int], keep_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skips_special_tokens = not keep_special_tokens
        self._stream: DecodeStream | None = None
        self._last: list[int] = []
        """Last tokens whose text was returned."""
        self._waiting: list[int] = []
        """Tokens after them."""
        for count in range(CONTEXT_TOKENS, CONTEXT_TOKENS + UTF8_BYTES):
            context = list(prompt[-count:])
            if not self._decode(context).startswith(NO_CHARACTER):
                break  # it does not begin within a character
        self._go_on_after(context)

    def push(self, token_id: int) -> str:
        """Return the text that is now certain.

        An incomplete character is awaited, but no longer than any character can take.
        """
        self._waiting.append(token_id)
        is_late = len(self._waiting) >= MAX_CHARACTER_TOKENS
        if self._stream is not None and not is_late:
            try:
                new: str | None = self._stream.step(self._tokenizer, token_id)
            except Exception:  # tokenizers raises no other class where earlier text has changed
                self._stream = None
            else:
                if new is not None:
                    self._last, self._waiting = self._waiting, []
                    return new
        text = self._decode([*self._last, *self._waiting])
        if text.endswith(NO_CHARACTER) and not is_late:
            return ""
        new = text[_num_equal(text, self._decode(self._last)) :]
        if new or is_late:  # many special tokens have no text
            last, self._waiting = self._waiting, []
            self._go_on_after(last)
        return new

    def _go_on_after(self, last: list[int]) -> None:
        """Decode what follows these tokens, whose text was returned."""
        self._last = last
        is_whole = not self._decode(last).endswith(NO_CHARACTER)
        self._stream = DecodeStream(last, self._skips_special_tokens) if is_whole else None

    def _decode(self, token_ids: list[int]) -> str:
        text: str = self._tokenizer.decode(token_ids, skip_special_tokens=self._skips_special_tokens)
        return text


class TextStream:
    """Text of one completion, released as it becomes certain.

    Text that could be the beginning of a stop string is held back. `push` returns certain text, and `stopped` names the
    stop string once it was found; it is part of the text only where `include_stop` says so. A stop string that is
    complete within the first `min_tokens` tokens is ordinary text.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        prompt: Sequence[int],
        stop: Sequence[str],
        min_tokens: int = 0,
        keep_special_tokens: bool = False,
        include_stop: bool = False,
    ) -> None:
        self._decoding = None if tokenizer is None else _Decoding(tokenizer, prompt, keep_special_tokens)
        self._stop = tuple(stop)
        self._include_stop = include_stop
        self._too_early = min_tokens
        """Number of further tokens at which no stop string counts."""
        self._held = ""
        self.stopped = ""

    def push(self, token_id: int) -> str:
        """Add a token; return certain text."""
        if self._decoding is None or self.stopped:
            return ""
        new = self._decoding.push(token_id)
        if not self._stop:
            return new
        early, self._too_early = self._too_early > 0, max(0, self._too_early - 1)
        return self._certain(new, early) if new else ""

    def finish(self) -> str:
        """End the text; return the part held back."""
        held, self._held = self._held, ""
        return held

    def _certain(self, new: str, early: bool) -> str:
        """Return the text before a stop string that ends in `new`, or before what may begin one."""
        num_old, held = len(self._held), self._held + new
        matches = [(at, stop) for stop in self._stop if (at := held.find(stop, max(0, num_old + 1 - len(stop)))) >= 0]
        if matches and not early:
            at, self.stopped = min(matches)
            self._held = ""
            return held[: at + len(self.stopped) if self._include_stop else at]
        cut = len(held) - max(_overlap(held, stop) for stop in self._stop)
        self._held = held[cut:]
        return held[:cut]


def _num_equal(one: str, other: str) -> int:
    """Return the number of equal leading characters."""
    if one.startswith(other):
        return len(other)
    return next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), len(one))


def _overlap(text: str, stop: str) -> int:
    """Return the length of the longest suffix of `text` that is a prefix of `stop`, and not all of it."""
    at = text.find(stop[:1], max(0, len(text) + 1 - len(stop)))
    while at >= 0 and not stop.startswith(text[at:]):
        at = text.find(stop[:1], at + 1)
    return len(text) - at if at >= 0 else 0
