"""Prompt lookup: the tokens that followed earlier occurrences of a text's last tokens.

The index is that of an LZ77 compressor: for every run of `width` tokens the end of its last occurrence, chained to the
ends of earlier ones. Adding a token is one entry. A search follows the chain of the last run for a bounded number of
places and takes the one that agrees with the text's end for longest. Nothing is scanned.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

WIDTH = 2
"""Tokens that must agree before a draft is proposed."""
MAX_PLACES = 16
"""Largest number of places compared, the latest first."""
MAX_AGREEING = 32
"""Largest number of tokens compared at each place."""
MAX_ADDED = 1024
"""Largest number of tokens indexed by one call: a long prompt is indexed over several steps, since all sequences wait
for each."""
_BITS = 32


@dataclass(frozen=True, slots=True)
class Match:
    """A place whose preceding tokens agree with the text's end."""

    end: int
    agreeing: int
    """Number of agreeing tokens, at most MAX_AGREEING."""


class NgramIndex:
    """Index of one growing text.

    The text is not stored: each call is given all of it.
    """

    def __init__(self, width: int = WIDTH) -> None:
        assert width >= 1
        self._width = width
        self._latest: dict[int, int] = {}
        """End of the last occurrence, by run of `width` tokens packed into one number."""
        self._before = array("i", [0] * width)
        """End of the previous occurrence of the same run, 0 for none; [indexed tokens + 1], by end of the run."""

    def search(self, tokens: Sequence[int]) -> Match | None:
        """Return the best earlier place: longest agreement, then latest.

        None without an agreement of `width` tokens.
        """
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
        """Index runs that have a following token, so all but the last."""
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
    """Return `count` tokens from `end` on.

    At the text's end they continue with the copy, like a repetition.
    """
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
