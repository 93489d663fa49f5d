"""Fit of a `Calibration` to a log of receipts: least squares over the durations of stages.

A step takes `StepTiming`'s sum of terms. A receipt gives the time of several steps together; their work follows from
the log: from the streams that ran beside it on its worker, and from the prompts computed there.

    the lender's     from the first question for blocks to compute until nothing was left; its own start
                     message may be late where its cores are busy
    prompt tail      the prompt's rest in the running batch
    decode           as many steps as tokens but one, beside the mean of the streams over that time

The fit is weak where stages hardly differ (equal lengths do not separate fixed costs from costs per token), where
requests were preempted, and where workers slow each other down in a way that no term describes, such as engines on the
same cores. `Fit.error` says how well the times follow.
"""

import math
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from engine.backends.sim.settings import StepTiming
from sizing.calibration import Calibration, Fit
from workloads.request import BadSetup
from workloads.traces.receipts import ServedRequest

LEAST_ROWS = 8
TERMS = ("step_s", "prompt_token_s", "prompt_pair_s", "stream_s", "kv_token_s")
MESSAGES = 4
"""Messages on the way of a first token: to the router, to the worker, and back."""
SAME_STEP_S = 0.0015
SHORT = 0.25
"""Share of the median duration below which durations count as equal, so that no microsecond decides."""
ROUNDS = 20
"""Rounds of reweighting."""
DISTURBED = 5.0
"""Multiple of the median error at which larger errors are capped (Huber's weights)."""
FASTEST_BYTES_PER_S = 1e12
"""Bandwidth assumed where transfers take no time that depends on their size."""
READ_LATENCY_S = 20e-6
"""Latency assumed for a link that was not measured, in seconds."""
MAX_MS = 1e8
"""Longest accepted duration of a stage, in milliseconds."""
END_BLOCKS = 2
"""Largest mean number of blocks that a decode worker computes when lenders compute the rest; above it, it computes
whole prompts too."""
POOL_BYTES = 256 << 20
"""Default pool of a worker, in bytes."""


@dataclass(slots=True)
class _Timed:
    """One request on the cluster's time line, in seconds."""

    served: ServedRequest
    arrived_s: float
    """Arrival at its router, if the first token reached the client at once."""
    stages: dict[str, tuple[float, float]]
    """Begin and end by stage."""

    @property
    def worker(self) -> str:
        return self.served.receipt.placement.decode_worker

    @property
    def tail_tokens(self) -> int:
        return self.served.receipt.kv.computed_tokens


@dataclass(slots=True)
class _Row:
    """A measurement; `work` has an amount for each of TERMS."""

    seconds: float
    work: tuple[float, float, float, float, float]


@dataclass(frozen=True, slots=True)
class AssumedRates:
    """Values for what a log cannot show where nothing moved.

    They override measurements.
    """

    kv_token_bytes: float | None = None
    block_bytes: int | None = None
    """Bytes of a block, whatever its tokens."""
    nic_bytes_per_s: float | None = None

    def __post_init__(self) -> None:
        for name, option in (("block_bytes", "block_bytes"), ("nic_bytes_per_s", "nic_gbps")):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise BadSetup(option, f"{value:g} is not above 0")

    def of_block(self, block_tokens: int) -> int | None:
        """Return the bytes of a block, if known."""
        if self.block_bytes is not None or self.kv_token_bytes is None:
            return self.block_bytes
        return round(self.kv_token_bytes * block_tokens)


NOTHING = AssumedRates()


def calibrate(
    log: Iterable[ServedRequest],
    num_blocks: int | None = None,
    prefill_chunk: int = 512,
    decode_chunk: int = 128,
    assumed: AssumedRates = NOTHING,
) -> Calibration:
    """Fit a calibration.

    Raises BadSetup naming what is neither measured nor given.

    `num_blocks`: blocks of a worker's pool; default: 256 MiB of blocks.
    """
    timed = [each for served in log if (each := _timed(served)) is not None]
    if len(timed) < LEAST_ROWS:
        raise BadSetup(
            "log", f"{len(timed)} undisturbed requests with receipts are too few; at least {LEAST_ROWS} are needed"
        )
    fits: dict[str, Fit] = {}
    decode, fits["decode"] = _fit(list(_decode_rows(timed, decode_chunk)))
    message_s = _message_s(timed)
    prefill_rows = list(_prefill_rows(timed, prefill_chunk, message_s))
    prefill = None
    if len(prefill_rows) >= LEAST_ROWS:
        prefill, fits["prefill"] = _fit(prefill_rows)
    kv = [each.served.receipt.kv for each in timed]
    block_tokens = max(each.block_tokens for each in kv)
    notes: dict[str, str] = {}
    moved = [each for each in kv if each.moved_blocks]
    if (block_bytes := assumed.of_block(block_tokens)) is not None:
        notes["block_bytes"] = "given"
    elif moved:
        block_bytes = moved[0].moved_bytes // moved[0].moved_blocks
    else:
        raise BadSetup(
            "block_bytes", "no KV moved in this log, so the block size was not measured: set --block-bytes or --model"
        )
    link = _link(timed, prefill_chunk, block_bytes)
    if assumed.nic_bytes_per_s is not None:
        notes["nic_bytes_per_s"] = "given"
        link = (link[0] if link else READ_LATENCY_S, assumed.nic_bytes_per_s)
    elif link is None:
        few = f"fewer than {LEAST_ROWS} transfers in this log, so links were not measured"
        raise BadSetup("nic_gbps", f"{few}: set --nic-gbps or --gpu")
    if prefill is None:
        notes["prefill"] = "as decode: hardly anything was computed for others"
    if num_blocks is None:
        notes["num_blocks"] = "256 MiB, a worker's default"
    latency_s, bytes_per_s = link
    return Calibration(
        decode=decode,
        prefill=prefill,
        nic_bytes_per_s=bytes_per_s,
        read_latency_s=latency_s,
        message_s=message_s,
        block_tokens=block_tokens,
        block_bytes=block_bytes,
        num_blocks=num_blocks or max(1, POOL_BYTES // block_bytes),
        prefill_chunk=prefill_chunk,
        decode_chunk=decode_chunk,
        decode_prompts=sum(each.tail_tokens for each in timed) > END_BLOCKS * block_tokens * len(timed),
        fits=fits,
        not_measured=notes,
    )


def _timed(served: ServedRequest) -> _Timed | None:
    """Return the request's times, or None for disturbed or impossible ones.

    The client's first token ties both clocks together.
    """
    receipt = served.receipt
    kv = receipt.kv
    if receipt.placement.attempt != 1 or kv.loan_failure or kv.preemptions or kv.mismatched_blocks:
        return None
    if not kv.block_tokens or any(
        not (abs(stage.start_ms) < MAX_MS and 0 <= stage.duration_ms < MAX_MS) for stage in receipt.stages
    ):
        return None
    spans = {stage.name: (stage.start_ms / 1e3, (stage.start_ms + stage.duration_ms) / 1e3) for stage in receipt.stages}
    if "prompt tail" not in spans or "decode" not in spans:
        return None
    arrived_s = served.arrived_s + served.ttft_s - spans["prompt tail"][1]
    return _Timed(
        served, arrived_s, {name: (arrived_s + begin, arrived_s + end) for name, (begin, end) in spans.items()}
    )


def _decode_rows(timed: Sequence[_Timed], chunk: int) -> Iterable[_Row]:
    """Yield rows of each stream and of each prompt's tail, with what ran beside it."""
    for others in _by_worker(timed):
        streams = _Streams(others)
        tails = _Sums([(each.stages["prompt tail"], each.tail_tokens, _tail_pairs(each)) for each in others])
        for each in others:
            begin, end = each.stages["decode"]
            steps = each.served.completion_tokens - 1
            if steps >= 1 and end > begin:
                beside, context = streams.between(begin, end)
                yield _Row(end - begin, (steps, *tails.between(begin, end), steps * beside, steps * context))
            begin, end = each.stages["prompt tail"]
            if each.tail_tokens and end > begin:
                steps = math.ceil(each.tail_tokens / chunk)
                beside, context = streams.between(begin, end)
                yield _Row(end - begin, (steps, each.tail_tokens, _tail_pairs(each), steps * beside, steps * context))


def _prefill_rows(timed: Sequence[_Timed], chunk: int, message_s: float) -> Iterable[_Row]:
    """Yield a row for each time in which a lender always had something to compute."""
    by_lender: dict[str, list[_Timed]] = defaultdict(list)
    for each in timed:
        if each.served.receipt.kv.lender_computed_blocks and "lender prefill" in each.stages:
            by_lender[each.served.receipt.placement.lender].append(each)
    for lent in by_lender.values():
        for period in _overlapping(lent):
            if not any(each.served.receipt.kv.lender_fetched_blocks for each in period):
                row = _prefill_row(period, chunk)
                row.seconds = max(1e-6, row.seconds - 2 * message_s)  # the question and the answer
                yield row


def _overlapping(lent: Sequence[_Timed]) -> Iterable[list[_Timed]]:
    """Yield groups of requests that follow each other without a break."""
    period: list[_Timed] = []
    until = -math.inf
    for each in sorted(lent, key=lambda each: each.stages["lender queue"]):
        begin, end = each.stages["lender queue"][0], each.stages["lender prefill"][1]
        if begin >= until and period:
            yield period
            period = []
        period.append(each)
        until = max(until, end)
    if period:
        yield period


def _prefill_row(period: Sequence[_Timed], chunk: int) -> _Row:
    """Return the row of a period; prompts that finished together were in one step."""
    begin = min(each.stages["lender queue"][0] for each in period)
    ordered = sorted(period, key=lambda each: each.stages["lender prefill"][1])
    tokens_of_steps: list[int] = []
    pairs, done_at = 0.0, -math.inf
    for each in ordered:
        kv, end = each.served.receipt.kv, each.stages["lender prefill"][1]
        tokens = kv.lender_computed_blocks * kv.block_tokens
        pairs += _pairs((kv.reused_blocks + kv.moved_blocks - kv.lender_computed_blocks) * kv.block_tokens, tokens)
        if end - done_at < SAME_STEP_S:
            tokens_of_steps[-1] += tokens
        else:
            tokens_of_steps.append(tokens)
        done_at = end
    steps = sum(math.ceil(tokens / chunk) for tokens in tokens_of_steps)
    return _Row(done_at - begin, (steps, sum(tokens_of_steps), pairs, 0, 0))


def _link(timed: Sequence[_Timed], chunk: int, block_bytes: int) -> tuple[float, float] | None:
    """Return seconds until the first byte and bytes per second of final reads; None with too few of them."""
    rows = []
    for each in timed:
        kv = each.served.receipt.kv
        if not kv.moved_blocks or "transfer of the last blocks" not in each.stages:
            continue
        begin, end = each.stages["transfer of the last blocks"]
        computed = kv.lender_computed_blocks * kv.block_tokens
        last = kv.moved_bytes if not computed else ((computed - 1) % chunk + 1) // kv.block_tokens * block_bytes
        if end > begin:
            rows.append(_Row(end - begin, (1, last, 0, 0, 0)))
    if len(rows) < LEAST_ROWS:
        return None
    line, _ = _fit(rows)
    return line.step_s, 1 / max(line.prompt_token_s, 1 / FASTEST_BYTES_PER_S)


def _message_s(timed: Sequence[_Timed]) -> float:
    """Return the seconds per hop: the client's TTFT minus all stages."""
    beyond = [each.arrived_s - each.served.arrived_s for each in timed]
    return max(0.0, float(np.median(beyond))) / MESSAGES


# ---------------------------------------------------------------------------- what ran beside what


def _by_worker(timed: Sequence[_Timed]) -> list[list[_Timed]]:
    by_worker: dict[str, list[_Timed]] = defaultdict(list)
    for each in timed:
        by_worker[each.worker].append(each)
    return list(by_worker.values())


class _Streams:
    """Decoding streams of one worker."""

    def __init__(self, timed: Sequence[_Timed]) -> None:
        self._begins, self._ends = np.array([each.stages["decode"] for each in timed]).T
        self._prompts = np.array([each.served.prompt_tokens for each in timed], float)
        spans = np.maximum(self._ends - self._begins, 1e-9)
        self._per_s = np.array([each.served.completion_tokens for each in timed]) / spans

    def between(self, begin: float, end: float) -> tuple[float, float]:
        """Return the mean number of streams, and of their context tokens, between two times."""
        first, last = np.maximum(self._begins, begin), np.minimum(self._ends, end)
        shares = np.maximum(last - first, 0.0) / (end - begin)
        contexts = self._prompts + ((first + last) / 2 - self._begins) * self._per_s
        return float(shares.sum()), float(shares @ contexts)


class _Sums:
    """Amounts of work over time spans, and how much falls between two times."""

    def __init__(self, spans: Sequence[tuple[tuple[float, float], float, float]]) -> None:
        self._spans = sorted(spans)
        self._begins = [span[0][0] for span in self._spans]
        self._longest = max((end - begin for (begin, end), _, _ in spans), default=0.0)

    def between(self, begin: float, end: float) -> tuple[float, float]:
        first = bisect_left(self._begins, begin - self._longest)
        totals = [0.0, 0.0]
        for (start, stop), *amounts in self._spans[first : bisect_left(self._begins, end)]:
            inside = min(stop, end) - max(start, begin)
            if inside > 0:
                share = inside / (stop - start)
                totals = [total + share * amount for total, amount in zip(totals, amounts, strict=True)]
        return totals[0], totals[1]


def _tail_pairs(each: _Timed) -> float:
    kv = each.served.receipt.kv
    return _pairs(max(0, each.served.prompt_tokens - kv.computed_tokens), kv.computed_tokens)


def _pairs(before: int, tokens: int) -> float:
    """Return the pairs of each of `tokens` with itself and all before it."""
    return tokens * (2 * before + tokens + 1) / 2


# ---------------------------------------------------------------------------- least squares


def _fit(rows: Sequence[_Row]) -> tuple[StepTiming, Fit]:
    """Fit terms, none below 0.

    Errors are relative to the fitted value, less so for short times: the fit then matches the mean of the measurements,
    where errors relative to the measurement would favour quick ones.
    """
    amounts = np.array([row.work for row in rows], float)
    seconds = np.array([row.seconds for row in rows])
    least = SHORT * float(np.median(seconds))
    weights, expected = np.ones(len(rows)), np.maximum(seconds, least)
    coefficients = np.zeros(len(TERMS))
    for _ in range(ROUNDS):
        by = weights / expected
        coefficients = _best_subset(amounts * by[:, None], seconds * by)
        expected = np.maximum(amounts @ coefficients, least)
        off = np.abs(seconds / expected - amounts @ coefficients / expected)
        weights = np.sqrt(np.minimum(1.0, DISTURBED * max(1e-9, float(np.median(off))) / np.maximum(off, 1e-12)))
    timing = StepTiming(**dict(zip(TERMS, map(float, coefficients), strict=True)))
    return timing, Fit(rows=len(rows), error=float(np.median(off)), jitter=_jitter(amounts[:, 0], seconds, expected))


def _jitter(steps: NDArray[np.float64], seconds: NDArray[np.float64], expected: NDArray[np.float64]) -> float:
    """Return the standard deviation of the logarithm of a step's time, from rows of one or two steps, by the median."""
    few = steps <= 2
    if few.sum() < LEAST_ROWS:
        return 0.0
    off = np.log(np.maximum(seconds, 1e-9) / expected)[few] * np.sqrt(np.maximum(steps[few], 1))
    return float(1.48 * np.median(np.abs(off - np.median(off))))


def _best_subset(rows: NDArray[np.float64], wanted: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return x >= 0 that minimises |rows @ x - wanted|, trying all subsets of the five columns."""
    columns = [column for column in range(rows.shape[1]) if rows[:, column].any()]
    scales = np.maximum(np.abs(rows).max(axis=0), 1e-300)
    best, least = np.zeros(rows.shape[1]), math.inf
    for chosen in range(1, 1 << len(columns)):
        subset = [column for place, column in enumerate(columns) if chosen >> place & 1]
        solved, *_ = np.linalg.lstsq(rows[:, subset] / scales[subset], wanted, rcond=None)
        if (solved < 0).any():
            continue
        off = float(np.square(rows[:, subset] / scales[subset] @ solved - wanted).sum())
        if off < least * (1 - 1e-9):
            best = np.zeros(rows.shape[1])
            best[subset], least = solved / scales[subset], off
    return best
