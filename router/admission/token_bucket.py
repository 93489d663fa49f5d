"""A token bucket. Pure: the clock is an argument."""

from dataclasses import dataclass


@dataclass(slots=True)
class TokenBucket:
    """Refills at `rate` a second up to `burst`; full at first."""

    rate: float
    burst: float
    _level: float = -1.0
    _at: float = 0.0

    def __post_init__(self) -> None:
        assert self.rate > 0
        assert self.burst > 0
        self._level = self.burst

    def level(self, now: float) -> float:
        """What is there; a clock that steps back changes nothing."""
        if now > self._at:
            self._level = min(self.burst, self._level + (now - self._at) * self.rate)
            self._at = now
        return self._level

    def wait_s(self, amount: float, now: float) -> float:
        """Seconds until `amount` is there if nobody takes any; 0 when it is, infinite when it never will be."""
        missing = amount - self.level(now)
        if missing <= 1e-9:  # of sums of fractions
            return 0.0
        return missing / self.rate if amount <= self.burst else float("inf")

    def take(self, amount: float, now: float) -> None:
        """`wait_s` said 0."""
        assert self.wait_s(amount, now) == 0
        self._level -= amount

    def give_back(self, amount: float, now: float) -> None:
        """Of what was taken."""
        self._level = min(self.burst, self.level(now) + amount)

    def full(self, now: float) -> bool:
        """As good as a fresh one."""
        return self.level(now) >= self.burst
