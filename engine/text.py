"""Between tokens and text: the tokenizer of a model directory, and its incremental decoding. Needs no torch."""

from collections.abc import Sequence

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from cluster.errors import InvalidRequest
from engine.model_dir import ModelDir

CONTEXT_TOKENS = 8
"""Tokens of the prompt's end that decoding starts from: what a token says can depend on the one before it."""


def load_tokenizer(model_dir: ModelDir) -> Tokenizer | None:
    """None when the directory has no tokenizer: then only token ids go in and out."""
    if (file := model_dir.path / "tokenizer.json").exists():
        return Tokenizer.from_file(str(file))
    if not model_dir.has_tokenizer:
        return None
    from transformers import AutoTokenizer  # converts older formats; slow to import

    slow = AutoTokenizer.from_pretrained(model_dir.path, local_files_only=True)
    converted: Tokenizer = slow.backend_tokenizer
    return converted


def check_token_ids(token_ids: Sequence[int], field: str, vocab_size: int) -> None:
    """Raises InvalidRequest. A token that is none would end the engine, with all that runs on it."""
    if len(token_ids) and (largest := max(token_ids)) >= vocab_size:
        raise InvalidRequest(field, f"token id {largest} is out of range: the vocabulary has {vocab_size}")


class TextStream:
    """Text of one completion, as it becomes certain.

    Text that could still turn out to be the beginning of a stop string is held back; `push` returns what is
    certain, and `stopped` names the stop string once it was found. It is not part of the text. One that is complete
    within the first `min_tokens` tokens is text like any other.
    """

    def __init__(
        self, tokenizer: Tokenizer | None, prompt: Sequence[int], stop: Sequence[str], min_tokens: int = 0
    ) -> None:
        self._tokenizer = tokenizer
        self._stream = DecodeStream(ids=list(prompt[-CONTEXT_TOKENS:]), skip_special_tokens=True)
        self._stop = tuple(stop)
        self._too_early = min_tokens
        """Tokens more at which nothing stops."""
        self._held = ""
        self.stopped = ""

    def push(self, token_id: int) -> str:
        """One more token."""
        if self._tokenizer is None or self.stopped:
            return ""
        self._held += self._stream.step(self._tokenizer, token_id) or ""
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


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that begins `stop`."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
