"""Workers that prefill and decode: share of the requests that keep the SLO, although prompts delay streams.

Prefill workers and decode workers: which part of the requests keeps the SLO.
"""

import math
from dataclasses import dataclass
from functools import cached_property

from sizing.comparison.replay import Setup, nic_bytes_per_s, roofline_of
from sizing.plan.load import NORMAL, OfferedLoad
from sizing.plan.prompts import PromptQueue, PromptSteps, QueueWait, line_of, waiting
from sizing.plan.streams import Streams, crossing, poisson_share, share_within

NUM_MESSAGES_AGGREGATED = 4
"""Messages before a client has its first token: to the router, to the worker, and two to the client."""
FEW_STREAMS = 6.0
"""Number of streams at which placement weighs waits and delays equally. Placement weighs a prompt's wait against the
streams that it delays. With few streams it follows the queues, so that they act as one; with many a wait is halfway
between one queue for all workers and one queue each. Fitted to simulated clusters with 0.6 to 104 streams."""
SPREAD = tuple(NORMAL.inv_cdf(share) for share in (0.1, 0.3, 0.5, 0.7, 0.9))
"""Batch sizes around their mean, in standard deviations, equally likely."""


@dataclass(frozen=True)
class AggregatedPlan:
    """Plan of equal workers, each computing prompts in chunks beside its streams."""

    setup: Setup
    load: OfferedLoad
    workers: int

    @cached_property
    def streams(self) -> Streams:
        return Streams(roofline_of(self.setup, "decode", apart=False), self.load, self.setup.block_tokens)

    def line_at(self, batch: float) -> PromptQueue:
        """Return the prompt queue with so many streams beside each prompt."""
        context_tokens = batch * self.load.context
        roofline, chunk = self.streams.roofline, self.setup.decode_chunk
        steps = PromptSteps(roofline, chunk, self.load.hit_rate, batch, context_tokens)
        return line_of(steps, self.load.prompts, self.load.rate, self.workers)

    def itl_at(self, batch: float) -> float:
        """Return the mean ITL with so many streams: steps with prompts take longer, others fill the time."""
        line, rate = self.line_at(batch), self.load.rate / self.workers
        with_prompts = min(rate, line.busy / line.service_s) * line.num_steps
        return 1 / (with_prompts + (1 - line.busy) / self.streams.step_s(max(1.0, batch)))

    @cached_property
    def batch(self) -> float:
        """Mean number of a worker's streams, by Little's law."""
        tokens_per_s = self.load.rate * self.load.gaps / self.workers
        return crossing(lambda batch: batch - tokens_per_s * self.itl_at(batch), 0.0, self._most)

    @cached_property
    def _most(self) -> float:
        return max(1.0, self.streams.largest(self.setup.slo.itl_s))

    @cached_property
    def overloaded(self) -> bool:
        """Whether even the largest batch within the ITL generates fewer tokens than the load needs, without prompts."""
        return self.load.rate * self.load.gaps / self.workers * self.itl_at(self._most) >= self._most

    @cached_property
    def line(self) -> PromptQueue:
        return self.line_at(self.batch)

    @cached_property
    def own_line(self) -> QueueWait:
        """Wait with one queue per worker and random assignment."""
        return waiting(self.load.rate / self.workers, 1, self.line.packed_s, self.line.variation2)

    @property
    def apart_share(self) -> float:
        """Position between one queue for all, 0, and one queue each, 1."""
        return self.batch / (2 * (self.batch + FEW_STREAMS))

    def share_over(self, seconds: float) -> float:
        """Return the share of requests that wait longer than `seconds` for other prompts."""
        one, each = self.line.waiting.share_over(seconds), self.own_line.share_over(seconds)
        return one + (each - one) * self.apart_share

    @cached_property
    def wait_s(self) -> float:
        """Mean wait."""
        one, each = self.line.waiting.mean_of_all_s, self.own_line.mean_of_all_s
        return one + (each - one) * self.apart_share if math.isfinite(one) else math.inf

    @cached_property
    def itl_s(self) -> float:
        return self.itl_at(self.batch)

    def delay_s(self, prompt: float) -> float:
        """Return the delay of each stream by a prompt."""
        seconds, steps = self.line.service(prompt)
        return max(0.0, seconds - steps * self.streams.step_s(max(1.0, self.batch)))

    @cached_property
    def kept_itl(self) -> float:
        """Share of requests that keep the ITL; outputs meet varying numbers of prompts, and batches vary."""
        if self.load.gaps == 0:
            return 1.0
        if self.overloaded or not self.streams.largest(self.setup.slo.itl_s):
            return 0.0
        return self.load.outputs.share_of(lambda output: sum(self._kept_itl(output, z) for z in SPREAD) / len(SPREAD))

    def _kept_itl(self, output: float, deviations: float) -> float:
        """Return the share of outputs of that length that keep the ITL, at a batch above the mean by `deviations`.

        Prompts with unequal delays are replaced by equal ones with the same mean and variance.
        """
        gaps = max(1.0, output - 1)
        batch = self.batch + deviations * math.sqrt(self.batch * self.streams.swing(self.batch) / self.workers)
        room_s = (self.setup.slo.itl_s - self.streams.step_s(max(1.0, batch))) * gaps
        delay_s, square = self._delays
        if not delay_s:
            return float(room_s >= 0)
        met = self.load.rate / self.workers * gaps * self.itl_s
        return poisson_share(room_s * delay_s / square, met * delay_s**2 / square)

    @cached_property
    def _delays(self) -> tuple[float, float]:
        """Mean delay by one prompt, and mean square."""
        prompts = self.load.prompts
        return prompts.mean_of(self.delay_s), prompts.mean_of(lambda prompt: self.delay_s(prompt) ** 2)

    def unqueued_s(self, prompt: float) -> float:
        """Return the time to first token without a wait for other prompts, the running step included."""
        line = self.line
        rest_of_step_s = (self.itl_s + line.busy * line.others_s) / 2
        return (
            NUM_MESSAGES_AGGREGATED * self.setup.message_s
            + rest_of_step_s
            + line.steps.alone(prompt)[0]
            + line.others_s
        )

    @cached_property
    def kept_ttft(self) -> float:
        limit_s = self.setup.slo.ttft_s
        return self.load.prompts.share_of(lambda prompt: 1 - self.share_over(limit_s - self.unqueued_s(prompt)))

    @cached_property
    def ttft_s(self) -> float:
        """Mean time to first token."""
        return self.wait_s + self.load.prompts.mean_of(self.unqueued_s)

    @cached_property
    def held(self) -> float:
        """Sequences with blocks in all pools, from their placement on."""
        return self.load.rate * (self.ttft_s + self.load.gaps * self.itl_s)

    @cached_property
    def parts(self) -> dict[str, float]:
        """Share of requests that keep each part of the SLO."""
        memory = self.streams.kept_memory(self.workers, self.held, self.batch) if self.kept_ttft else 0.0
        return {"ttft": self.kept_ttft, "itl": self.kept_itl, "memory": memory}

    @property
    def kept(self) -> float:
        return self.parts["ttft"] * self.parts["itl"] * self.parts["memory"]


NUM_MESSAGES = 6
"""Messages before a client has its first token: to the router, to the decode worker, to the lender and back, two to the
client."""
TAIL_STEPS = 1.5
"""Steps of a prompt's tail: half a step of waiting on average, and the next one."""


@dataclass(frozen=True)
class DecodePool:
    """Decode workers beside prefill workers."""

    setup: Setup
    load: OfferedLoad
    workers: int

    @cached_property
    def streams(self) -> Streams:
        return Streams(roofline_of(self.setup, "decode", apart=True), self.load, self.setup.block_tokens)

    @cached_property
    def largest_batch(self) -> float:
        """Largest batch within the ITL, memory aside."""
        return self.streams.largest(self.setup.slo.itl_s)

    @cached_property
    def batch(self) -> float:
        """Mean number of a worker's streams, by Little's law, at the step that so many take."""
        tokens_per_s = self.load.rate * self.load.gaps / self.workers
        limit = max(1.0, self.largest_batch)
        return crossing(lambda batch: batch - tokens_per_s * self.streams.step_s(batch), 0.0, limit)

    @cached_property
    def overloaded(self) -> bool:
        """Whether even the largest batch within the ITL generates fewer tokens than the load needs."""
        limit = max(1.0, self.largest_batch)
        return self.load.rate * self.load.gaps / self.workers * self.streams.step_s(limit) >= limit

    @cached_property
    def itl_s(self) -> float:
        return self.streams.step_s(max(1.0, self.batch))

    @cached_property
    def kept_itl(self) -> float:
        if self.load.gaps == 0:
            return 1.0
        if self.overloaded:
            return 0.0
        limit, mean = self.workers * self.largest_batch, self.workers * self.batch
        return share_within(limit, mean, self.streams.swing(self.batch))

    def held(self, ttft_s: float) -> float:
        """Return the sequences with blocks in all pools, from their placement on."""
        return self.load.rate * (ttft_s + self.load.gaps * self.itl_s)

    def kept_memory(self, ttft_s: float) -> float:
        return self.streams.kept_memory(self.workers, self.held(ttft_s), self.batch)


@dataclass(frozen=True)
class PrefillPool:
    """Prefill workers."""

    setup: Setup
    load: OfferedLoad
    workers: int

    @cached_property
    def line(self) -> PromptQueue:
        roofline = roofline_of(self.setup, "prefill", apart=True)
        steps = PromptSteps(roofline, self.setup.prefill_chunk, self.load.hit_rate)
        return line_of(steps, self.load.prompts, self.load.rate, self.workers)

    def link_utilisation(self, receivers: int) -> float:
        """Return the utilisation of the prefill workers' NICs or of those of `receivers`, whichever is higher."""
        prompt = self.load.prompt
        moved = self.load.rate * prompt * self.setup.model.mean_token_bytes(prompt, states=1)
        ends = ((self.workers, "prefill"), (receivers, "decode"))
        rooflines = ((count, roofline_of(self.setup, role, apart=True)) for count, role in ends)  # type: ignore[arg-type]
        return max(moved / (count * nic_bytes_per_s(roofline)) for count, roofline in rooflines)

    @cached_property
    def bytes_per_s(self) -> float:
        """Bandwidth from one worker to another when nothing else moves."""
        sender, receiver = (roofline_of(self.setup, role, apart=True) for role in ("prefill", "decode"))
        return min(nic_bytes_per_s(sender), nic_bytes_per_s(receiver))

    def exposed_s(self, prompt: float, utilisation: float) -> float:
        """Return the part of a prompt's KV transfer that comes after its last step.

        It is that of the last chunk, with the prompt's last windows and its state, or the link's backlog by then. Links
        are shared fairly, so at half their capacity a transfer takes twice as long.
        """
        steps = self.line.steps
        last = min(steps.computed(prompt), self.setup.prefill_chunk)
        seconds, count = steps.alone(prompt)
        before_s = seconds * (count - 1) / count
        last_s, whole_s = (
            tokens * (self.setup.model.mean_token_bytes(tokens, states=1) / self.bytes_per_s / (1 - utilisation))
            for tokens in (last, prompt)
        )
        return max(last_s, whole_s - before_s)


@dataclass(frozen=True)
class DisaggregatedPlan:
    """Plan of both pools."""

    prefill: PrefillPool
    decode: DecodePool

    @property
    def setup(self) -> Setup:
        return self.prefill.setup

    @property
    def load(self) -> OfferedLoad:
        return self.prefill.load

    @cached_property
    def link_utilisation(self) -> float:
        return self.prefill.link_utilisation(self.decode.workers)

    def unqueued_s(self, prompt: float) -> float:
        """Return the time to first token without a wait for a prefill worker."""
        setup, line = self.prefill.setup, self.prefill.line
        rest_of_step_s = line.busy * (line.fixed_s + line.others_s) / 2
        compute_s = rest_of_step_s + line.steps.alone(prompt)[0] + line.others_s
        transfer_s = self.prefill.exposed_s(prompt, self.link_utilisation)
        return NUM_MESSAGES * setup.message_s + compute_s + transfer_s + TAIL_STEPS * self.decode.itl_s

    @cached_property
    def kept_ttft(self) -> float:
        if self.link_utilisation >= 1:
            return 0.0
        wait, limit_s = self.prefill.line.waiting, self.prefill.setup.slo.ttft_s
        return self.prefill.load.prompts.share_of(
            lambda prompt: 1 - wait.share_over(limit_s - self.unqueued_s(prompt)),
        )

    @cached_property
    def ttft_s(self) -> float:
        """Mean time to first token."""
        if self.link_utilisation >= 1:
            return float("inf")
        return self.prefill.line.waiting.mean_of_all_s + self.prefill.load.prompts.mean_of(self.unqueued_s)

    @cached_property
    def parts(self) -> dict[str, float]:
        """Share of requests that keep each part of the SLO."""
        memory = self.decode.kept_memory(self.ttft_s) if self.kept_ttft else 0.0
        return {"ttft": self.kept_ttft, "itl": self.decode.kept_itl, "memory": memory}

    @property
    def kept(self) -> float:
        return self.kept_ttft * self.parts["itl"] * self.parts["memory"]
