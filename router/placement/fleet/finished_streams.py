"""Lessons from finished streams: workers' speeds, lengths of outputs, and errors of predictions.

Traffic of one model at this router: growing counters, for the planner.
"""

from bisect import bisect_left
from dataclasses import replace

from cluster.metrics import LATENCY_S
from protos import inference_pb2 as pb
from protos import inference_pb2 as public_pb
from router.placement.demand import Demand
from router.placement.fleet.worker_records import ActivePlacement
from router.placement.learning.output_lengths import OutputKey, OutputLengths
from router.placement.learning.rate_learning import LogRatios, RateLearner, ReceiptTimings, measured
from router.placement.rates import Priors, SessionKey


class FinishedStreams:
    """Speeds, output lengths and prediction errors learned from streams that ended well."""

    def __init__(self, priors: Priors, learn_rates: bool) -> None:
        self.rate_learner = RateLearner(priors)
        self.ttft_scores = LogRatios()
        """Predicted over actual TTFT."""
        self._learn_rates = learn_rates
        self._output_lengths = OutputLengths()

    def learn(self, placed: ActivePlacement, finish: public_pb.Finish, ttft_s: float | None) -> None:
        """Learn from a stream that ended with `finish`, which has the receipt.

        `ttft_s` counts from the placement; None where the first token was not observed.
        """
        if ttft_s is not None:
            self.ttft_scores.add(placed.predicted_ttft_s, ttft_s)
        kv = finish.receipt.kv
        # A mismatch from the decode worker's own tiers is no failure of the lender, and sets no loan_failure.
        if kv.loan_failure and (kv.mismatched_blocks or not kv.moved_blocks):
            placed.lent = False
        elif kv.moved_blocks and not kv.loan_failure:
            placed.lent = True
        placed.decode.asked_blocks += kv.reused_blocks + kv.store_blocks + kv.moved_blocks + kv.computed_blocks
        placed.decode.hit_blocks += kv.reused_blocks
        if placed.lender is not None:
            placed.lender.asked_blocks += kv.moved_blocks
            placed.lender.hit_blocks += kv.lender_cached_blocks
        if self._learn_rates:
            self._learn_length(placed, finish)
            self._learn_speeds(placed, finish)

    def with_expected_output(self, demand: Demand, key: OutputKey, num_prompt: int, session: SessionKey) -> Demand:
        """Return the demand of a request of this tenant, task and session, with the output that is expected yet.

        An output that has outgrown the estimate reserves as much as its worker does by itself.
        """
        estimate = self._output_lengths.estimate(key)
        if estimate is None or demand.embeds or not demand.chain_tokens:
            return replace(demand, output_key=key, session=session)
        num_emitted = min(demand.chain_tokens) - num_prompt
        left = min(estimate.num_tokens - num_emitted, demand.max_chain_tokens - min(demand.chain_tokens))
        return replace(
            demand,
            output_key=key,
            session=session,
            expected_output_tokens=max(0, left),
            num_outputs_seen=estimate.num_seen,
        )

    def _learn_length(self, placed: ActivePlacement, finish: public_pb.Finish) -> None:
        num_tokens = finish.usage.completion_tokens
        if placed.num_streams == 1 and not placed.demand.embeds and num_tokens:
            is_cut = finish.reason == public_pb.FINISH_REASON_LENGTH
            self._output_lengths.observe(placed.demand.output_key, num_tokens, is_cut)

    def _learn_speeds(self, placed: ActivePlacement, finish: public_pb.Finish) -> None:
        load, running = placed.decode.load, placed.running_before + 1.0
        if load is not None:
            running = (running + max(1, load.running)) / 2
        moved = placed.transfer_from(finish.receipt.placement.lender)
        seen = measured(finish, *placed.queued_before, running, placed.num_streams, moved, placed.demand.has_items)
        self.rate_learner.observe(seen)
        if seen.fetch is not None and placed.decode.store_id:
            num_blocks, seconds = seen.fetch
            num_bytes = int(num_blocks) * placed.demand.block_bytes
            moved = placed.transfer_from(placed.decode.store_id)
            transfer = num_bytes + (moved.shared_bytes(num_bytes) if moved is not None else 0), seconds
            self.rate_learner.observe(ReceiptTimings(seen.decode_id, placed.decode.store_id, transfer=transfer))


class Latencies:
    """Histogram with the bounds of the metrics."""

    def __init__(self) -> None:
        self._counts = [0] * (len(LATENCY_S) + 1)
        self._sum_s = 0.0

    def add(self, seconds: float) -> None:
        self._counts[bisect_left(LATENCY_S, seconds)] += 1
        self._sum_s += seconds

    def to_proto(self) -> pb.Latencies:
        return pb.Latencies(bounds_s=LATENCY_S, counts=self._counts, sum_s=self._sum_s)


class TrafficCounters:
    """Counters since the router started."""

    def __init__(self) -> None:
        self._arrived = self._arrived_tokens = 0
        self._ended_tokens = self._lent_tokens = self._own_tokens = 0
        self._ttft, self._itl = Latencies(), Latencies()

    def arrived(self, prompt_tokens: int) -> None:
        """Count a well-formed request, whether any worker can serve it or not."""
        self._arrived += 1
        self._arrived_tokens += prompt_tokens

    def first_token(self, ttft_s: float) -> None:
        """Count a first token, `ttft_s` after its request's arrival."""
        self._ttft.add(ttft_s)

    def finished(self, finish: pb.Finish) -> None:
        """Count a successful request."""
        kv, usage = finish.receipt.kv, finish.usage
        self._ended_tokens += usage.prompt_tokens
        self._lent_tokens += kv.lender_computed_blocks * kv.block_tokens
        self._own_tokens += kv.computed_tokens
        if usage.completion_tokens > 1:
            decode_ms = sum(stage.duration_ms for stage in finish.receipt.stages if stage.name == "decode")
            self._itl.add(decode_ms / 1e3 / (usage.completion_tokens - 1))

    def to_proto(self, waiting_tokens: int) -> pb.Traffic:
        return pb.Traffic(
            arrived=self._arrived,
            arrived_tokens=self._arrived_tokens,
            waiting_tokens=waiting_tokens,
            ended_tokens=self._ended_tokens,
            lent_tokens=self._lent_tokens,
            own_tokens=self._own_tokens,
            ttft=self._ttft.to_proto(),
            itl=self._itl.to_proto(),
        )
