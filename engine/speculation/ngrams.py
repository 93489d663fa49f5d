"""Prompt lookup: what followed the last tokens of a text where they occurred in it before.

The index is that of an LZ77 compressor: of every run of `width` tokens where it ended last, and from there a chain to
where it ended before. Adding a token is one entry; a search follows the chain of the last run for a bounded number of
places and takes the one that agrees with the text's end for longest. Nothing is ever scanned.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

WIDTH = 2
"""Tokens that must agree before anything is guessed."""
MAX_PLACES = 16
"""Places that a search compares, the latest first."""
MAX_AGREEING = 32
"""Tokens that it compares at each."""
MAX_ADDED = 1024
"""Tokens that one call adds: a long prompt is indexed in several steps, since all wait for each."""
_BITS = 32


@dataclass(frozen=True, slots=True)
class Match:
    """The tokens before `end` agree with the text's end."""

    end: int
    agreeing: int
    """For how many tokens, at most MAX_AGREEING."""


class NgramIndex:
    """Of one text that only grows. It is not kept here: each call is given all of it."""

    def __init__(self, width: int = WIDTH) -> None:
        assert width >= 1
        self._width = width
        self._latest: dict[int, int] = {}
        """By run of `width` tokens, packed into one number: where it ended last."""
        self._before = array("i", [0] * width)
        """By end of a run: where the same run ended before, 0 where nowhere. [tokens indexed + 1]"""

    def search(self, tokens: Sequence[int]) -> Match | None:
        """The best earlier place. Of those that agree equally long the latest; None where not even `width` tokens do,
        or as far as the text is indexed."""
        self._add(tokens)
        if len(tokens) < self._width:
            return None
        best: Match | None = None
        end = self._latest.get(self._key(tokens, len(tokens)), 0)
        for _ in range(MAX_PLACES):
            if not end:
                break
            agreeing = _agreeing(tokens, end)
            if best is None or agreeing > best.agreeing:
                best = Match(end, agreeing)
            if agreeing == MAX_AGREEING:
                break
            end = self._before[end]
        return best

    def _add(self, tokens: Sequence[int]) -> None:
        """Runs that something follows, so not the last one."""
        first = len(self._before)
        mask = (1 << _BITS * self._width) - 1
        stop = min(len(tokens), first + MAX_ADDED)
        if stop <= first:
            return
        key = self._key(tokens, first - 1) if first > self._width else _packed(tokens[: first - 1])
        for end in range(first, stop):
            key = (key << _BITS | tokens[end - 1]) & mask
            self._before.append(self._latest.get(key, 0))
            self._latest[key] = end

    def _key(self, tokens: Sequence[int], end: int) -> int:
        return _packed(tokens[end - self._width : end])


def continuation(tokens: Sequence[int], end: int, count: int) -> tuple[int, ...]:
    """`count` tokens from `end` on. Where the text ends they go on from its copy, as a repetition does."""
    copied = list(tokens[end : end + count])
    period = len(tokens) - end
    while len(copied) < count:
        copied.append(copied[len(copied) - period])
    return tuple(copied)


def _packed(tokens: Sequence[int]) -> int:
    key = 0
    for token in tokens:
        key = key << _BITS | token
    return key


def _agreeing(tokens: Sequence[int], end: int) -> int:
    count, last = 0, len(tokens)
    while count < min(end, MAX_AGREEING) and tokens[end - 1 - count] == tokens[last - 1 - count]:
        count += 1
    return count
