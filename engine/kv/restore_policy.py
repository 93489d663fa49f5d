"""Restore or recompute: measured speeds of computing prompts and of restoring blocks from tiers.

Pure.
"""

from dataclasses import dataclass

WEIGHT = 0.2
"""Weight of the newest measurement in the running mean."""
MIN_TOKENS = 64
"""Smallest number of prompt tokens of a step that is measured."""
FORGIVENESS = 1.02
"""Growth of the assumed restore rate each time it is not used, so that it is tried again."""


@dataclass(slots=True)
class RestorePolicy:
    """Running means of both speeds.

    A speed that was never measured is assumed to favour restoring.
    """

    prefill_tokens_per_s: float | None = None
    restored_bytes_per_s: float | None = None

    def computed(self, prompt_tokens: int, seconds: float) -> None:
        """Learn from a step that computed so many prompt tokens, and perhaps a few others."""
        if prompt_tokens >= MIN_TOKENS and seconds > 0:
            self.prefill_tokens_per_s = _mean(self.prefill_tokens_per_s, prompt_tokens / seconds)

    def restored(self, num_bytes: int, seconds: float) -> None:
        """Learn from a restore: bytes read from the tiers, verified and bound."""
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


def _mean(before: float | None, measured: float) -> float:
    return measured if before is None else before + WEIGHT * (measured - before)
