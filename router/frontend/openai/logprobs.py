"""Log probabilities in the formats of OpenAI's two endpoints, and of vLLM for prompts.

Pure.
"""

from collections.abc import Iterable, Sequence
from typing import Any

from protos import inference_pb2 as pb
from router.frontend.http.generation import TokenText

LEAST = -9999.0
"""Value in place of minus infinity, which JSON cannot express; vLLM's value."""


def chat_logprobs(message: pb.GenerateResponse, text_of: TokenText) -> list[dict[str, Any]]:
    """Return one entry for each token of the message."""
    return [
        _entry(text_of(token_id), logprobs.logprob)
        | {"top_logprobs": [_entry(text_of(top_id), top) for top_id, top in _tops(logprobs)]}
        for token_id, logprobs in zip(message.token_ids, message.logprobs, strict=True)
    ]


def _entry(text: str, logprob: float) -> dict[str, Any]:
    return {"token": text, "logprob": max(logprob, LEAST), "bytes": list(text.encode())}


class CompletionLogprobs:
    """Log probabilities of one choice; counts the character offset of each token."""

    def __init__(self, num_chars: int) -> None:
        """Start with `num_chars` characters before the first token."""
        self._num_chars = num_chars

    def of(self, message: pb.GenerateResponse, text_of: TokenText) -> dict[str, list[Any]]:
        tokens = [text_of(token_id) for token_id in message.token_ids]
        offsets = []
        for token in tokens:
            offsets.append(self._num_chars)
            self._num_chars += len(token)
        return {
            "tokens": tokens,
            "token_logprobs": [max(logprobs.logprob, LEAST) for logprobs in message.logprobs],
            "top_logprobs": [
                {text_of(top_id): top for top_id, top in _tops(logprobs)} | {token: max(logprobs.logprob, LEAST)}
                for token, logprobs in zip(tokens, message.logprobs, strict=True)
            ],
            "text_offset": offsets,
        }


def echoed(prompt: Sequence[int], scored: Sequence[pb.TokenLogprobs], text_of: TokenText) -> dict[str, list[Any]]:
    """Return the log probabilities of an echoed prompt, in the same form; the first token has none."""
    first = pb.GenerateResponse(token_ids=prompt[:1], logprobs=[pb.TokenLogprobs()])
    rest = pb.GenerateResponse(token_ids=prompt[1:], logprobs=scored)
    counted = CompletionLogprobs(0)
    whole = joined([counted.of(first, text_of), counted.of(rest, text_of)])
    assert whole is not None
    whole["token_logprobs"][0] = whole["top_logprobs"][0] = None
    return whole


def joined(parts: Iterable[dict[str, list[Any]]]) -> dict[str, list[Any]] | None:
    """Join the parts of several messages of one choice; None without any."""
    whole: dict[str, list[Any]] | None = None
    for part in parts:
        if whole is None:
            whole = {name: [] for name in part}
        for name, values in part.items():
            whole[name] += values
    return whole


def prompt_logprobs(
    prompt: Sequence[int], scored: Sequence[pb.TokenLogprobs], text_of: TokenText
) -> list[dict[str, Any] | None]:
    """Return one entry for each token of the prompt, None for the first.

    A rank is known for the likeliest tokens only.
    """
    entries: list[dict[str, Any] | None] = [None]
    for token_id, logprobs in zip(prompt[1:], scored, strict=True):
        entry: dict[str, Any] = {
            str(top_id): {"logprob": top, "rank": rank, "decoded_token": text_of(top_id)}
            for rank, (top_id, top) in enumerate(_tops(logprobs), start=1)
        }
        own = {"logprob": max(logprobs.logprob, LEAST), "rank": None, "decoded_token": text_of(token_id)}
        entry.setdefault(str(token_id), own)
        entries.append(entry)
    return entries


def _tops(logprobs: pb.TokenLogprobs) -> Iterable[tuple[int, float]]:
    return zip(logprobs.top_token_ids, (max(top, LEAST) for top in logprobs.top_logprobs), strict=True)
