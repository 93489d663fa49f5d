"""Speculation policy: acceptance, cost of draft tokens, and how many each sequence gets.

Pure.

A draft token costs one row of the step's forward, and gives a token if it and all before it are accepted. A sequence
whose drafts are each accepted with probability p gains p + p^2 + ... + p^k tokens from k drafts. So drafts are given
out in order of p^j, the likeliest first, each while it raises the expected

    tokens of the step / seconds of the step,     seconds = step_s + row_s * rows (+ pass_s * depth, of a draft model)

and none at all unless that reaches GAIN times the rate without drafts. Both parts are measured continuously: p of each
sequence (`AcceptanceRates`) and the seconds of steps over their rows (`StepCost`). At batch 1 a step waits for the
weights, a row costs little, and nearly every draft pays. In a large batch a row costs as much as the token it may give,
and only nearly certain drafts pay. No setting says from which batch size speculation is off.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

GAIN = 1.05
"""Expected gain below which a step gets no drafts, since both estimates are noisy."""
UNKNOWN = 0.5
"""Assumed acceptance of a kind of draft that was never verified."""
WEIGHT = 0.15
"""Weight of the newest draft in one sequence's acceptance."""
WEIGHT_OF_ALL = 0.02
"""Weight of the newest draft in the acceptance over all sequences, with which each one starts."""
FADING = 0.03
"""Weight of the newest step in the cost of steps."""
OUTLIER = 4.0
"""Cap on a step's duration, as a multiple of the mean: a process may be stopped for a while."""
MIN_VARIANCE = 0.05
"""Smallest variance of rows from which a slope is estimated."""
MIN_ROW = 0.005
"""Smallest cost of a row, as a share of a step."""
FORGIVENESS = 1.002
"""Growth of the assumed benefit with each step in which drafts did not pay: unused drafts are not measured."""


class AcceptanceRates:
    """Acceptance rates by kind of draft, over all sequences."""

    def __init__(self) -> None:
        self._of_all: dict[int, float] = {}

    def of(self, kind: int) -> float:
        return self._of_all.get(kind, UNKNOWN)

    def learn(self, kind: int, right: bool) -> None:
        before = self.of(kind)
        self._of_all[kind] = before + WEIGHT_OF_ALL * (right - before)


@dataclass(slots=True)
class SequenceAcceptance:
    """Acceptance rates of one sequence, which start at those of all."""

    of_all: AcceptanceRates
    _own: dict[int, float] = field(default_factory=dict)

    def of(self, kind: int) -> float:
        return self._own[kind] if kind in self._own else self.of_all.of(kind)

    def learn(self, kind: int, rights: Iterable[bool]) -> None:
        """Learn from verified drafts, in order.

        After a wrong one the others were not verified.
        """
        for right in rights:
            before = self.of(kind)
            self._own[kind] = before + WEIGHT * (right - before)
            self.of_all.learn(kind, right)
            if not right:
                return

    def forgive(self, kind: int) -> None:
        """Raise an unused rate a little, so that it is tried again."""
        self._own[kind] = min(1.0, self.of(kind) * FORGIVENESS)


class StepCost:
    """Seconds of a step as a line over its rows, fitted to recent steps."""

    def __init__(self) -> None:
        self._count = 0
        self._rows = 0.0
        self._seconds = 0.0
        self._variance = 0.0
        self._covariance = 0.0
        self._slope = 0.0

    @property
    def row_s(self) -> float:
        """Cost of one more row, in seconds."""
        return max(self._slope, MIN_ROW * self._seconds)

    def seconds(self, rows: int) -> float:
        """Return the seconds of a step with so many rows; 0 before the first step."""
        return max(self._seconds + self.row_s * (rows - self._rows), 0.1 * self._seconds)

    def learn(self, rows: int, seconds: float) -> None:
        """Learn from a step."""
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
        """Lower the cost a little after a step in which drafts did not pay."""
        self._slope /= FORGIVENESS
        self._covariance /= FORGIVENESS


@dataclass(frozen=True, slots=True)
class DraftBudget:
    """Drafts that a sequence could use."""

    chance: float
    """Probability that its next draft is accepted, and each later one if those before are."""
    most: int
    """Largest number of drafts."""


def allot(
    wishes: Sequence[DraftBudget], num_tokens: int, num_rows: int, left: int, cost: StepCost, pass_s: float = 0.0
) -> list[int]:
    """Return the number of drafts for each sequence, `left` at most in all.

    Without drafts the step gives `num_tokens` tokens of `num_rows` rows. `pass_s`: seconds to propose one more token
    for all sequences at once.
    """
    ranked = sorted(
        (-(wish.chance**depth), depth, place) for place, wish in enumerate(wishes) for depth in range(1, wish.most + 1)
    )
    nothing = [0] * len(wishes)
    if not ranked:
        return nothing
    plain_s = cost.seconds(num_rows)
    if not plain_s:
        pass_s = 0.0  # no step was measured yet: try
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
    """Return the drafts, up to a depth, that raise the rate, and the expected rate."""
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
