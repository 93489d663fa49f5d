"""Late binding of lenders: whether to bind a request to a lender now, or to wait and choose later.

Pure.
"""

from router.admission.config import AdmissionConfig
from router.placement.fleet.worker_records import ActivePlacement
from router.placement.place import Decision
from router.placement.rates import Rates
from router.placement.worker_table import WorkerTable


class LenderLoad:
    """Load of lenders, with long prompts on a part of them, so that short ones find others free.

    A lender computes prompts in order of priority and arrival: a later prompt of the same class waits for all that is
    queued there.
    """

    def __init__(self, config: AdmissionConfig) -> None:
        self._config = config
        self._long: dict[ActivePlacement, str] = {}
        """Lenders of the long prompts in progress."""

    def queue_s(self, worker_id: str, workers: WorkerTable, rates: Rates) -> float:
        """Return the predicted seconds until a lender's queue is computed; 0 for one that is gone."""
        row = workers.row_of.get(worker_id)
        return 0.0 if row is None else float(workers.queued_prefill_tokens[row] / rates.prefill_tokens_per_s[row])

    def deep(self, decision: Decision, workers: WorkerTable, rates: Rates, limit_s: float) -> bool:
        """Return whether the decision's lender is busy beyond the limit."""
        if not decision.lender_computes or decision.lender_id is None:
            return False
        return self.queue_s(decision.lender_id, workers, rates) > limit_s

    def crowded(self, decision: Decision, workers: WorkerTable, rates: Rates) -> bool:
        """Return whether the prompt is long and as many lenders as allowed compute long prompts."""
        if not self._is_long(decision, workers, rates):
            return False
        busy = {lender_id for placed, lender_id in self._long.items() if not placed.started}
        return decision.lender_id not in busy and len(busy) >= self._allowed(int((~workers.decodes).sum()))

    def _allowed(self, num_lenders: int) -> int:
        """Return the number of lenders that may compute long prompts at a time.

        A small fleet needs more than a fraction of one lender for short prompts: of four lenders, with three for long
        prompts, half as many requests were in time.
        """
        config = self._config
        left = min(config.short_prompt_lenders, -(-num_lenders // 2))
        return max(1, min(int(config.long_prompt_lender_share * num_lenders), num_lenders - left))

    def started(self, placed: ActivePlacement, decision: Decision, workers: WorkerTable, rates: Rates) -> None:
        if decision.lender_id is not None and self._is_long(decision, workers, rates):
            self._long[placed] = decision.lender_id

    def ended(self, placed: ActivePlacement) -> None:
        self._long.pop(placed, None)

    def _is_long(self, decision: Decision, workers: WorkerTable, rates: Rates) -> bool:
        if not decision.lender_computes or decision.lender_id is None:
            return False
        tokens_per_s = float(rates.prefill_tokens_per_s[workers.row_of[decision.lender_id]])
        return decision.lender_tokens / tokens_per_s > self._config.long_prompt_s
