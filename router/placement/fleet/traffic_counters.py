"""Traffic of one model at this router: growing counters, for the planner."""

from bisect import bisect_left

from cluster.metrics import LATENCY_S
from protos import inference_pb2 as pb


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
