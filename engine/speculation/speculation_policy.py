"""Whether guesses pay: how likely they are right, what they cost, and who gets how many. Pure.

A guess costs a row of the step's forward, and gives a token if it and all before it are right. A sequence whose next
guess is right with probability p, and each after it with p again, gets p + p^2 + ... + p^k tokens more from k guesses.
So guesses are given out in order of p^j, the likeliest first, each while it raises the expected

    tokens of the step / seconds of the step,     seconds = step_s + row_s * rows (+ pass_s * depth, of a draft model)

and none at all unless that comes to GAIN times what the step gives without them. Both sides of it are measured while it
runs: p of each sequence (`AcceptanceRates`) and the seconds of steps over their rows (`StepCost`). At batch 1 a step waits for
the weights, a row costs little, and nearly every guess pays; in a large batch a row costs as much as the token that it
may give, and only guesses that are nearly certain do. Nobody sets a batch size from which on speculation is off.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

GAIN = 1.05
"""Expected of a step with guesses, or it gets none: both estimates are noisy."""
UNKNOWN = 0.5
"""The chance of a guess of a kind that was never verified."""
WEIGHT = 0.15
"""Of the newest guess in the running share of one sequence."""
WEIGHT_OF_ALL = 0.02
"""And of the share over all sequences, from which each begins."""
FADING = 0.03
"""Weight of the newest step in what steps cost."""
OUTLIER = 4.0
"""A step that takes so many times longer than the mean counts as that: a process may be stopped for a while."""
MIN_VARIANCE = 0.05
"""Of rows, before a slope is read from them."""
MIN_ROW = 0.005
"""Of a step: what a row costs at least."""
FORGIVENESS = 1.002
"""What is not used is not measured either: with each step in which guesses did not pay, they look so much better."""


class AcceptanceRates:
    """How likely guesses of a kind are right, whoever's they are."""

    def __init__(self) -> None:
        self._of_all: dict[int, float] = {}

    def of(self, kind: int) -> float:
        return self._of_all.get(kind, UNKNOWN)

    def learn(self, kind: int, right: bool) -> None:
        before = self.of(kind)
        self._of_all[kind] = before + WEIGHT_OF_ALL * (right - before)


@dataclass(slots=True)
class SequenceAcceptance:
    """The same for one sequence, which begins as all others are."""

    of_all: AcceptanceRates
    _own: dict[int, float] = field(default_factory=dict)

    def of(self, kind: int) -> float:
        return self._own[kind] if kind in self._own else self.of_all.of(kind)

    def learn(self, kind: int, rights: Iterable[bool]) -> None:
        """Whether guesses were right, in turn. After a wrong one nothing can be said of the others."""
        for right in rights:
            before = self.of(kind)
            self._own[kind] = before + WEIGHT * (right - before)
            self.of_all.learn(kind, right)
            if not right:
                return

    def forgive(self, kind: int) -> None:
        """A chance that is not tried rises a little, or it never would be again."""
        self._own[kind] = min(1.0, self.of(kind) * FORGIVENESS)


class StepCost:
    """Seconds of a step as a line over its rows, through the steps seen, of which old ones fade."""

    def __init__(self) -> None:
        self._count = 0
        self._rows = 0.0
        self._seconds = 0.0
        self._variance = 0.0
        self._covariance = 0.0
        self._slope = 0.0

    @property
    def row_s(self) -> float:
        """What one row more costs."""
        return max(self._slope, MIN_ROW * self._seconds)

    def seconds(self, rows: int) -> float:
        """Of a step of so many rows; 0 while none was seen."""
        return max(self._seconds + self.row_s * (rows - self._rows), 0.1 * self._seconds)

    def learn(self, rows: int, seconds: float) -> None:
        """A step of so many rows took so long."""
        self._count += 1
        weight = max(FADING, 1 / self._count)
        if self._count > 1:
            seconds = min(seconds, OUTLIER * self._seconds)
        by_rows, by_seconds = rows - self._rows, seconds - self._seconds
        self._rows += weight * by_rows
        self._seconds += weight * by_seconds
        self._variance = (1 - weight) * (self._variance + weight * by_rows * by_rows)
        self._covariance = (1 - weight) * (self._covariance + weight * by_rows * by_seconds)
        if self._variance >= MIN_VARIANCE:
            self._slope = self._covariance / self._variance

    def forgive(self) -> None:
        """Guesses did not pay now."""
        self._slope /= FORGIVENESS
        self._covariance /= FORGIVENESS


@dataclass(frozen=True, slots=True)
class DraftBudget:
    """What a sequence could make use of."""

    chance: float
    """Of its next guess to be right, and of each after it if those before are."""
    most: int
    """Guesses, at most."""


def allot(
    wishes: Sequence[DraftBudget], num_tokens: int, num_rows: int, left: int, cost: StepCost, pass_s: float = 0.0
) -> list[int]:
    """How many guesses each gets in a step that gives `num_tokens` tokens of `num_rows` rows without any, `left` at
    most in all. `pass_s`: what it costs to guess one place further, for all at once."""
    ranked = sorted(
        (-(wish.chance**depth), depth, place) for place, wish in enumerate(wishes) for depth in range(1, wish.most + 1)
    )
    nothing = [0] * len(wishes)
    if not ranked:
        return nothing
    plain_s = cost.seconds(num_rows)
    if not plain_s:
        pass_s = 0.0  # nothing is known of steps: try
    best, best_rate = nothing, GAIN * num_tokens / plain_s if plain_s else 0.0
    deepest = max(wish.most for wish in wishes)
    for limit in range(1, deepest + 1) if pass_s else (deepest,):
        counts, rate = _within(limit, ranked, len(wishes), num_tokens, plain_s + limit * pass_s, left, cost.row_s)
        if rate > best_rate:
            best, best_rate = counts, rate
    return best


def _within(
    limit: int,
    ranked: Sequence[tuple[float, int, int]],
    num_wishes: int,
    num_tokens: float,
    seconds: float,
    left: int,
    row_s: float,
) -> tuple[list[int], float]:
    """The guesses up to a depth that raise the rate, and the rate that is expected then."""
    counts = [0] * num_wishes
    tokens = float(num_tokens)
    for negative, depth, place in ranked:
        if depth > limit:
            continue
        if not left or (seconds and -negative * seconds <= tokens * row_s):
            break
        counts[place] = depth
        tokens, seconds, left = tokens - negative, seconds + row_s, left - 1
    return counts, tokens / seconds if seconds else float("inf")
