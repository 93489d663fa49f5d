"""A token bucket. Pure: the clock is an argument."""

from dataclasses import dataclass


@dataclass(slots=True)
class TokenBucket:
    """Bucket that refills at `rate` per second up to `burst`; full at first."""

    rate: float
    burst: float
    _level: float = -1.0
    _at: float = 0.0

    def __post_init__(self) -> None:
        assert self.rate > 0
        assert self.burst > 0
        self._level = self.burst

    def level(self, now: float) -> float:
        """Return the present level; a clock that steps back changes nothing."""
        if now > self._at:
            self._level = min(self.burst, self._level + (now - self._at) * self.rate)
            self._at = now
        return self._level

    def wait_s(self, amount: float, now: float) -> float:
        """Return the seconds until `amount` is there if none is taken; infinite when it never will be."""
        missing = amount - self.level(now)
        if missing <= 1e-9:  # rounding of sums of fractions
            return 0.0
        return missing / self.rate if amount <= self.burst else float("inf")

    def take(self, amount: float, now: float) -> None:
        """Take `amount`, for which `wait_s` must have returned 0."""
        assert self.wait_s(amount, now) == 0
        self._level -= amount

    def give_back(self, amount: float, now: float) -> None:
        """Return an amount that was taken."""
        self._level = min(self.burst, self.level(now) + amount)

    def full(self, now: float) -> bool:
        """Return whether the bucket equals a fresh one."""
        return self.level(now) >= self.burst
