"""Tokenizer of a model directory, and incremental detokenisation.

Needs no torch.
"""

from collections.abc import Sequence

from tokenizers import Tokenizer

from cluster.errors import InvalidRequest
from engine.model.model_dir import ModelDir
from kvcache.block_keys import max_token

NO_CHARACTER = "\ufffd"
"""Character for bytes that are no character, or not a whole one."""
MAX_CHARACTER_TOKENS = 16
"""Largest number of tokens of one character, however the tokenizer splits its bytes and combining parts."""
CONTEXT_TOKENS = 8
"""Tokens of the prompt's end with which decoding starts: a token's text can depend on the one before it."""


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

    A token's text is known from decoding it together with earlier tokens. tokenizers' own `DecodeStream` does the same,
    but raises where invalid bytes change earlier text, and repeats text of a prompt that ends within a character.
    """

    def __init__(self, tokenizer: Tokenizer, context: Sequence[int], keep_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = not keep_special_tokens
        self._ids = list(context)
        """Last tokens whose text was returned, and the tokens after them."""
        self._num_out = len(self._ids)
        self._out = self._decode()
        """Text of the returned ones."""

    def push(self, token_id: int) -> str:
        """Return the text that is now certain.

        An incomplete character is awaited, but no longer than any character can take.
        """
        self._ids.append(token_id)
        text = self._decode()
        waited = len(self._ids) - self._num_out >= MAX_CHARACTER_TOKENS
        if text.endswith(NO_CHARACTER) and not waited:
            return ""
        new = text[_num_equal(text, self._out) :]
        if new or waited:  # many special tokens have no text
            self._ids = self._ids[self._num_out :]
            self._num_out = len(self._ids)
            self._out = self._decode()
        return new

    def _decode(self) -> str:
        text: str = self._tokenizer.decode(self._ids, skip_special_tokens=self._skip_special_tokens)
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
        context = prompt[-CONTEXT_TOKENS:]
        self._decoding = None if tokenizer is None else _Decoding(tokenizer, context, keep_special_tokens)
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
        self._held += self._decoding.push(token_id)
        early, self._too_early = self._too_early > 0, max(0, self._too_early - 1)
        return self._certain(early)

    def finish(self) -> str:
        """End the text; return the part held back."""
        held, self._held = self._held, ""
        return "" if self.stopped else held

    def _certain(self, early: bool) -> str:
        matches = [(at, stop) for stop in self._stop if (at := self._held.find(stop)) >= 0]
        if matches and not early:
            at, self.stopped = min(matches)
            end = at + len(self.stopped) if self._include_stop else at
            text, self._held = self._held[:end], ""
            return text
        hold = max((_overlap(self._held, stop) for stop in self._stop), default=0)
        cut = len(self._held) - hold
        text, self._held = self._held[:cut], self._held[cut:]
        return text


def _num_equal(one: str, other: str) -> int:
    """Return the number of equal leading characters."""
    if one.startswith(other):
        return len(other)
    return next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), len(one))


def _overlap(text: str, stop: str) -> int:
    """Return the length of the longest suffix of `text` that is a prefix of `stop`."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
