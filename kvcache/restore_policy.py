"""Restore or recompute: measured speeds of computing prompts and of restoring blocks, and how often a lookup pays.

Pure.
"""

from dataclasses import dataclass

WEIGHT = 0.2
"""Weight of the newest measurement in the running mean."""
MIN_TOKENS = 64
"""Smallest number of prompt tokens of a step that is measured."""
EXPLORE_EVERY = 16
"""Number of lookups that do not seem worth it, of which one is made to learn."""
FORGIVENESS = 1.02
"""Growth of the assumed restore rate each time it is not used, so that it is tried again."""


@dataclass(slots=True)
class RestorePolicy:
    """Running means of both speeds.

    A speed that was never measured is assumed to favour restoring.
    """

    prefill_tokens_per_s: float | None = None
    restored_bytes_per_s: float | None = None
    prompt_step_s: float = 0.0
    """Seconds of a step with prompt tokens."""

    def computed(self, prompt_tokens: int, seconds: float) -> None:
        """Learn from a step that computed so many prompt tokens, and perhaps a few others."""
        if prompt_tokens >= MIN_TOKENS and seconds > 0:
            self.prompt_step_s = _mean(self.prompt_step_s or None, seconds)
            self.prefill_tokens_per_s = _mean(self.prefill_tokens_per_s, prompt_tokens / seconds)

    def restored(self, num_bytes: int, seconds: float) -> None:
        """Learn from a restore: bytes read from a store, verified and bound."""
        if num_bytes and seconds > 0:
            self.restored_bytes_per_s = _mean(self.restored_bytes_per_s, num_bytes / seconds)

    def worth_restoring(self, num_tokens: int, num_bytes: int) -> bool:
        """Return whether restoring is faster than computing, by the measured speeds."""
        if not num_tokens:
            return False
        if self.prefill_tokens_per_s is None or self.restored_bytes_per_s is None:
            return True
        if num_bytes / self.restored_bytes_per_s <= num_tokens / self.prefill_tokens_per_s:
            return True
        self.restored_bytes_per_s *= FORGIVENESS
        return False


@dataclass(slots=True)
class LookupPolicy:
    """Whether to look a prompt up in a place that does not say beforehand what it holds.

    A lookup delays a request even where nothing is found. It starts optimistic, and tries again now and then.
    """

    found_share: float = 1.0
    """Running mean of the share of looked-up blocks that were found."""
    lookup_s: float = 0.0
    _skipped: int = 0

    def worth_looking(self, num_tokens: int, speeds: RestorePolicy) -> bool:
        """Return whether a lookup is expected to save more time than it takes.

        It takes its own time, and on average half of a step for which the request comes too late.
        """
        if speeds.prefill_tokens_per_s is None:
            return True
        saved_s = self.found_share * num_tokens / speeds.prefill_tokens_per_s
        if saved_s > self.lookup_s + speeds.prompt_step_s / 2:
            return True
        self._skipped += 1
        if self._skipped < EXPLORE_EVERY:
            return False
        self._skipped = 0
        return True

    def looked(self, num_wanted: int, num_found: int, seconds: float) -> None:
        """Learn from a lookup of `num_wanted` blocks."""
        self.found_share = _mean(self.found_share, num_found / num_wanted)
        self.lookup_s = _mean(self.lookup_s or None, seconds)


def _mean(before: float | None, measured: float) -> float:
    return measured if before is None else before + WEIGHT * (measured - before)
