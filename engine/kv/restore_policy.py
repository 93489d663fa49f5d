"""How fast this engine computes prompts and brings blocks back from its tiers, learnt from what it does. Pure."""

from dataclasses import dataclass

WEIGHT = 0.2
"""Of the newest measurement in the running mean."""
MIN_TOKENS = 64
"""A step of fewer prompt tokens says little about how fast prompts are computed."""
FORGIVENESS = 1.02
"""What is not used is not measured either: a rate that was too low counts for this much more each time."""


@dataclass(slots=True)
class RestorePolicy:
    """Running means. What was never measured is assumed to be worth trying."""

    prefill_tokens_per_s: float | None = None
    restored_bytes_per_s: float | None = None

    def computed(self, prompt_tokens: int, seconds: float) -> None:
        """A step computed so many prompt tokens, and perhaps a few others."""
        if prompt_tokens >= MIN_TOKENS and seconds > 0:
            self.prefill_tokens_per_s = _mean(self.prefill_tokens_per_s, prompt_tokens / seconds)

    def restored(self, num_bytes: int, seconds: float) -> None:
        """So many bytes came back from the tiers, were verified and bound."""
        if num_bytes and seconds > 0:
            self.restored_bytes_per_s = _mean(self.restored_bytes_per_s, num_bytes / seconds)

    def worth_restoring(self, num_tokens: int, num_bytes: int) -> bool:
        """Bringing them back is quicker than computing them, as far as is known."""
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
