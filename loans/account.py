"""Account of where the KV of a request came from."""

from dataclasses import dataclass, field


@dataclass(slots=True)
class KvAccount:
    """Origin of one request's KV, and the times of its stages in seconds of the host's monotonic clock."""

    reused_blocks: int = 0
    moved_blocks: int = 0
    computed_blocks: int = 0
    computed_tokens: int = 0
    moved_bytes: int = 0
    mismatched_blocks: int = 0
    lender_cached_blocks: int = 0
    lender_computed_blocks: int = 0
    lender_fetched_blocks: int = 0
    restored_blocks: int = 0
    """Blocks restored from the local store, in main memory or on a disk of this host."""
    store_blocks: int = 0
    """Blocks fetched from the store that workers share."""
    transport: str = ""
    lanes: tuple[str, ...] = ()
    hedged_blocks: int = 0
    """Blocks computed here because the lender was silent, while its loan was open."""
    loan_failure: str = ""
    restore_failure: str = ""
    """Reason why restoring from the local store ended early."""
    store_failure: str = ""
    """Reason why fetching from the shared store ended early."""
    pinned_blocks: int = 0
    """Blocks of the prompt that stay in the pool, as the request asked."""
    pins_gave_way: int = 0
    """Blocks of the prompt that an earlier request pinned and that gave way to other requests before their time."""
    stored_blocks: int = 0
    """Blocks of a request without output that the shared store has, or is being given."""
    preemptions: int = 0
    """Number of times the request was preempted and its tokens computed again."""
    recomputed_tokens: int = 0
    """Tokens computed again because they were no longer cached after a preemption; `computed_tokens` excludes them."""
    is_predicted: bool = False
    """Whether the counts are the router's prediction, because a stock server tells none."""
    times: dict[str, float] = field(default_factory=dict)

    def store_failed(self, is_local: bool, reason: str) -> None:
        """Record why reading from the local store, or from the shared one, ended early."""
        if is_local:
            self.restore_failure = reason
        else:
            self.store_failure = reason
