"""Speeds of a fleet, learned from receipts, as the arrays that placement reads, and the quality of predictions.

A worker without measurements gets the mean of its kind. A pair without measurements gets the middle between its
lender's speed to others and its borrower's from others, or either alone, or the mean of all pairs. The first
measurement starts from that assumption. Quality is the logarithm of predicted over actual, as running quantiles.

Pure.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import log

import numpy as np

from protos import inference_pb2 as pb
from router.placement.in_flight import Transfer
from router.placement.rates import Floats, Ints, LinearFit, LinearFits, Priors, Rates

LEAST_DELAY_SHARE = 4
"""Bound on how much less than the prior a stream may cost: streams should be spread even where steps cost the same."""


@dataclass(frozen=True, slots=True)
class ReceiptTimings:
    """Measurements of one receipt: (amount, seconds) each, or None."""

    decode_id: str
    lender_id: str | None = None
    prefill: tuple[float, float] | None = None
    """Tokens that the lender had queued and computed."""
    transfer: tuple[float, float] | None = None
    """Bytes that the decode worker read of blocks the lender held."""
    tail: tuple[float, float] | None = None
    """Tokens that the decode worker had queued and computed."""
    step: tuple[float, float] | None = None
    """Running streams, and the seconds of one step with them."""
    fetch: tuple[float, float] | None = None
    """Blocks that the decode worker fetched from the shared store."""


class RateLearner:
    """Learned lines by worker and pair; `rates` is [W] for the present workers."""

    def __init__(self, priors: Priors) -> None:
        self._priors = priors
        self._prefill = LinearFits(LinearFit(priors.step_s, 1 / priors.prefill_tokens_per_s))
        self._tail = LinearFits(LinearFit(priors.step_s, 1 / priors.decode_prefill_tokens_per_s))
        self._step = LinearFits(LinearFit(priors.step_s, priors.stream_delay_s))
        link = LinearFit(priors.loan_overhead_s, 1 / priors.kv_bytes_per_s)
        self._links = link
        self._lends, self._borrows = LinearFits(link.fresh()), LinearFits(link.fresh())
        self._pairs: dict[tuple[str, str], LinearFit] = {}
        self._pairs_copy: tuple[Floats, Floats] | None = None
        self.arrange(())

    @property
    def rates(self) -> Rates:
        return self._rates

    def rates_as_they_are(self) -> Rates:
        """Return a copy.

        The pairs' arrays, large and rarely changed, are copied only after changes.
        """
        if self._pairs_copy is None:
            self._pairs_copy = self._rates.loan_overhead_s.copy(), self._rates.kv_bytes_per_s.copy()
        rates, (overhead_s, bytes_per_s) = self._rates, self._pairs_copy
        return Rates(
            prefill_tokens_per_s=rates.prefill_tokens_per_s.copy(),
            prefill_fixed_s=rates.prefill_fixed_s.copy(),
            decode_prefill_tokens_per_s=rates.decode_prefill_tokens_per_s.copy(),
            tail_fixed_s=rates.tail_fixed_s.copy(),
            stream_delay_s=rates.stream_delay_s.copy(),
            kv_bytes_per_s=bytes_per_s,
            loan_overhead_s=overhead_s,
        )

    def arrange(self, worker_ids: Sequence[str]) -> None:
        """Set the present workers, ascending; forget all others."""
        self._pairs_copy = None
        present = set(worker_ids)
        for lines in (self._prefill, self._tail, self._step, self._lends, self._borrows):
            lines.keep(present)
        self._pairs = {pair: line for pair, line in self._pairs.items() if present.issuperset(pair)}
        self._ids = tuple(worker_ids)
        self._row_of = {worker_id: row for row, worker_id in enumerate(self._ids)}
        self._rates = Rates.uniform(len(self._ids), self._priors)
        self._lent, self._borrowed = _Ends(len(self._ids)), _Ends(len(self._ids))
        self._pair_seen = np.zeros((len(self._ids), len(self._ids)), np.bool_)
        for worker_id, row in self._row_of.items():
            self._lent.write(row, self._lends.by_worker.get(worker_id))
            self._borrowed.write(row, self._borrows.by_worker.get(worker_id))
        for lines in (self._prefill, self._tail, self._step):
            self._write_workers(lines, range(len(self._ids)))
        everybody = np.arange(len(self._ids))
        self._write_unmeasured(everybody, everybody)
        for (borrower_id, lender_id), line in self._pairs.items():
            self._write_pair(self._row_of[borrower_id], self._row_of[lender_id], line)

    def observe(self, measured: ReceiptTimings) -> None:
        """Learn from a receipt; workers that left are skipped."""
        if measured.decode_id not in self._row_of:
            return
        self._observe_worker(self._tail, measured.decode_id, measured.tail)
        self._observe_worker(self._step, measured.decode_id, measured.step)
        if measured.lender_id is not None and measured.lender_id in self._row_of:
            self._observe_worker(self._prefill, measured.lender_id, measured.prefill)
            if measured.transfer is not None:
                self._observe_transfer(measured.decode_id, measured.lender_id, *measured.transfer)

    def _observe_worker(self, lines: LinearFits, worker_id: str, seen: tuple[float, float] | None) -> None:
        if seen is not None:
            lines.observe(worker_id, *seen)
            unseen = [row for row, other in enumerate(self._ids) if other not in lines.by_worker]
            self._write_workers(lines, [self._row_of[worker_id], *unseen])

    def _observe_transfer(self, borrower_id: str, lender_id: str, num_bytes: float, seconds: float) -> None:
        self._pairs_copy = None
        borrower, lender = self._row_of[borrower_id], self._row_of[lender_id]
        if (pair := self._pairs.get((borrower_id, lender_id))) is None:
            fixed_s = float(self._rates.loan_overhead_s[borrower, lender])
            unit_s = 1 / float(self._rates.kv_bytes_per_s[borrower, lender])
            pair = self._pairs[borrower_id, lender_id] = LinearFit(fixed_s, unit_s)
        pair.observe(num_bytes, seconds)
        self._links.observe(num_bytes, seconds)
        for lines, worker_id, ends, row in (
            (self._lends, lender_id, self._lent, lender),
            (self._borrows, borrower_id, self._borrowed, borrower),
        ):
            lines.observe(worker_id, num_bytes, seconds)
            ends.write(row, lines.by_worker[worker_id])
        everybody = np.arange(len(self._ids))
        self._write_unmeasured(np.array([borrower]), everybody)
        self._write_unmeasured(everybody, np.array([lender]))
        self._write_unknown()
        self._write_pair(borrower, lender, pair)

    def _write_workers(self, lines: LinearFits, rows: Iterable[int]) -> None:
        """Write the present speeds of these workers."""
        rates, least_delay_s = self._rates, self._priors.stream_delay_s / LEAST_DELAY_SHARE
        for row in rows:
            line = lines.of(self._ids[row])
            if lines is self._prefill:
                rates.prefill_fixed_s[row], rates.prefill_tokens_per_s[row] = line.fixed_s, 1 / line.unit_s
            elif lines is self._tail:
                rates.tail_fixed_s[row], rates.decode_prefill_tokens_per_s[row] = line.fixed_s, 1 / line.unit_s
            else:
                rates.stream_delay_s[row] = max(least_delay_s, line.unit_s)

    def _write_pair(self, borrower: int, lender: int, line: LinearFit) -> None:
        self._pair_seen[borrower, lender] = True
        self._rates.loan_overhead_s[borrower, lender] = line.fixed_s
        self._rates.kv_bytes_per_s[borrower, lender] = 1 / line.unit_s

    def _write_unknown(self) -> None:
        """Write the mean of all pairs for those of which neither end has measurements."""
        at = np.ix_(~self._borrowed.seen, ~self._lent.seen)
        self._rates.loan_overhead_s[at] = self._links.fixed_s
        self._rates.kv_bytes_per_s[at] = 1 / self._links.unit_s

    def _write_unmeasured(self, borrowers: Ints, lenders: Ints) -> None:
        """Write the assumed speeds of those of these pairs that have no measurements."""
        if not len(borrowers) or not len(lenders):
            return
        at = np.ix_(borrowers, lenders)
        num_seen = self._borrowed.seen[borrowers][:, None].astype(np.int64) + self._lent.seen[lenders][None, :]
        unseen = ~self._pair_seen[at]
        for matrix, part, mean, sign in (
            (self._rates.loan_overhead_s, 0, self._links.fixed_s, 1),
            (self._rates.kv_bytes_per_s, 1, self._links.unit_s, -1),
        ):
            total = self._borrowed.logs[part, borrowers][:, None] + self._lent.logs[part, lenders][None, :]
            taken = np.where(num_seen > 0, total / np.maximum(num_seen, 1), log(mean))
            matrix[at] = np.where(unseen, np.exp(sign * taken), matrix[at])


class _Ends:
    """Each worker as one end of loans: logarithms of its line's two parts, [2, W]; 0 without measurements."""

    def __init__(self, num_workers: int) -> None:
        self.seen = np.zeros(num_workers, np.bool_)
        self.logs: Floats = np.zeros((2, num_workers))

    def write(self, row: int, line: LinearFit | None) -> None:
        if line is not None:
            self.seen[row] = True
            self.logs[:, row] = log(line.fixed_s), log(line.unit_s)


def measured(
    finish: pb.Finish,
    decode_queued_tokens: int,
    lender_queued_tokens: int,
    running: float,
    num_choices: int,
    moved: Transfer | None = None,
    with_items: bool = False,
) -> ReceiptTimings:
    """Return the measurements of `finish`, which ended the stream.

    The queued tokens are those at the workers before this placement; `running` streams include this one; `moved` is
    the transfer to the decode worker. Nothing is learned from requests that failed, were preempted, or mix several
    causes, and nothing about computing from those `with_items`, whose time is also the encoder's.
    """
    receipt = finish.receipt
    kv, placement = receipt.kv, receipt.placement
    seconds = {
        stage.name: stage.duration_ms / 1e3 for stage in receipt.stages if stage.where == placement.decode_worker
    }
    undisturbed = not (kv.loan_failure or kv.mismatched_blocks or kv.preemptions)
    prefill = transfer = fetch = tail = step = None
    if kv.store_blocks and "fetch from the store" in seconds:
        fetch = kv.store_blocks, seconds["fetch from the store"]
    if undisturbed and placement.lender and "lender prefill" in seconds and not kv.lender_fetched_blocks:
        ready_s = seconds.get("lender queue", 0.0) + seconds["lender prefill"]
        if kv.lender_computed_blocks and not with_items:
            tokens = lender_queued_tokens + kv.lender_computed_blocks * kv.block_tokens
            prefill = tokens, ready_s
        elif not kv.lender_computed_blocks and kv.moved_blocks and "transfer of the last blocks" in seconds:
            shared = 0 if moved is None else moved.shared_bytes(kv.moved_bytes)
            transfer = kv.moved_bytes + shared, ready_s + seconds["transfer of the last blocks"]
    if undisturbed and not with_items and kv.computed_tokens and "prompt tail" in seconds:
        tail = decode_queued_tokens + kv.computed_tokens, seconds.get("decode queue", 0.0) + seconds["prompt tail"]
    num_steps = finish.usage.completion_tokens - 1 - receipt.speculation.accepted_tokens
    if placement.attempt == 1 and not kv.preemptions and num_choices == 1 and num_steps > 0 and "decode" in seconds:
        step = running, seconds["decode"] / num_steps
    return ReceiptTimings(placement.decode_worker, placement.lender or None, prefill, transfer, tail, step, fetch)


BINS_PER_DOUBLING = 8
DOUBLINGS = 10
"""Factor, in powers of two, at which a wrong prediction is capped."""
MEMORY = 4096
"""Number of predictions at which all counts are halved, so that quantiles follow the last few thousand."""


class LogRatios:
    """Histogram of the logarithm of predicted over actual; a quantile is right within half a bin, 4.5 %."""

    def __init__(self) -> None:
        self._counts = [0.0] * (2 * DOUBLINGS * BINS_PER_DOUBLING + 1)
        self._total = 0.0
        self.num_seen = 0

    def add(self, predicted: float, actual: float) -> None:
        """Add a prediction; both values are above 0."""
        doublings = max(-DOUBLINGS, min(DOUBLINGS, math.log2(predicted / actual)))
        self._counts[round((doublings + DOUBLINGS) * BINS_PER_DOUBLING)] += 1
        self._total += 1
        self.num_seen += 1
        if self._total >= MEMORY:
            self._counts = [count / 2 for count in self._counts]
            self._total /= 2

    def quantiles(self, shares: Sequence[float]) -> list[float]:
        """Return predicted over actual at these shares, in [0, 1]; nan before the first prediction."""
        return [self._quantile(share) for share in shares]

    def _quantile(self, share: float) -> float:
        if not self._total:
            return math.nan
        reached, last = 0.0, 0
        for number, count in enumerate(self._counts):
            if count:
                reached, last = reached + count, number
                if reached >= share * self._total:
                    break
        return float(2 ** (last / BINS_PER_DOUBLING - DOUBLINGS))
