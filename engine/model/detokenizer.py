"""Between tokens and text: the tokenizer of a model directory, and its incremental decoding. Needs no torch."""

from collections.abc import Sequence

from tokenizers import Tokenizer

from cluster.errors import InvalidRequest
from engine.kv.block_keys import max_token
from engine.model.model_dir import ModelDir

NO_CHARACTER = "\ufffd"
"""What bytes decode to that are no character, or not all of one."""
MAX_CHARACTER_TOKENS = 16
"""Of one character, however many bytes and combining parts the tokenizer makes of it."""
CONTEXT_TOKENS = 8
"""Tokens of the prompt's end that decoding starts from: what a token says can depend on the one before it."""


def load_tokenizer(model_dir: ModelDir) -> Tokenizer | None:
    """None when the directory has no tokenizer: then only token ids go in and out."""
    if (file := model_dir.path / "tokenizer.json").exists():
        return Tokenizer.from_file(str(file))
    if not model_dir.has_tokenizer:
        return None
    from transformers import AutoTokenizer  # converts older formats; slow to import

    slow = AutoTokenizer.from_pretrained(model_dir.path, local_files_only=True, trust_remote_code=False)
    converted: Tokenizer = slow.backend_tokenizer
    return converted


def check_token_ids(token_ids: Sequence[int], field: str, vocab_size: int) -> None:
    """Raises InvalidRequest. A token that is none would end the engine, with all that runs on it."""
    if len(token_ids) and (largest := max_token(token_ids)) >= vocab_size:
        raise InvalidRequest(field, f"token id {largest} is out of range: the vocabulary has {vocab_size}")


class _Decoding:
    """Text of tokens, as they come.

    What tokens say is known from decoding them with those before. tokenizers' own `DecodeStream` does the same, but
    raises where bytes that are no characters change what was said before, and begins with text of the prompt where that
    ends within a character.
    """

    def __init__(self, tokenizer: Tokenizer, context: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._ids = list(context)
        """The last ones whose text is out, and those whose text is not."""
        self._num_out = len(self._ids)
        self._out = self._decode()
        """The text of the former."""

    def push(self, token_id: int) -> str:
        """What is certain now. A character that is not whole is awaited, but no longer than any can take."""
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
        text: str = self._tokenizer.decode(self._ids, skip_special_tokens=True)
        return text


class TextStream:
    """Text of one completion, as it becomes certain.

    Text that could still turn out to be the beginning of a stop string is held back; `push` returns what is
    certain, and `stopped` names the stop string once it was found. It is not part of the text. One that is complete
    within the first `min_tokens` tokens is text like any other.
    """

    def __init__(
        self, tokenizer: Tokenizer | None, prompt: Sequence[int], stop: Sequence[str], min_tokens: int = 0
    ) -> None:
        self._decoding = None if tokenizer is None else _Decoding(tokenizer, prompt[-CONTEXT_TOKENS:])
        self._stop = tuple(stop)
        self._too_early = min_tokens
        """Tokens more at which nothing stops."""
        self._held = ""
        self.stopped = ""

    def push(self, token_id: int) -> str:
        """One more token."""
        if self._decoding is None or self.stopped:
            return ""
        self._held += self._decoding.push(token_id)
        early, self._too_early = self._too_early > 0, max(0, self._too_early - 1)
        return self._certain(early)

    def finish(self) -> str:
        """No more tokens: what was held back."""
        held, self._held = self._held, ""
        return "" if self.stopped else held

    def _certain(self, early: bool) -> str:
        found = [(at, stop) for stop in self._stop if (at := self._held.find(stop)) >= 0]
        if found and not early:
            at, self.stopped = min(found)
            text, self._held = self._held[:at], ""
            return text
        hold = max((_overlap(self._held, stop) for stop in self._stop), default=0)
        cut = len(self._held) - hold
        text, self._held = self._held[:cut], self._held[cut:]
        return text


def _num_equal(one: str, other: str) -> int:
    """Leading characters that both have."""
    if one.startswith(other):
        return len(other)
    return next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), len(one))


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that begins `stop`."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
