"""Workers that prefill and decode: which part of the requests keeps the SLO, though prompts hold streams up."""

import math
from dataclasses import dataclass
from functools import cached_property

from simulator.plan.load import NORMAL, Load
from simulator.plan.prompts import PromptQueue, PromptSteps, line_of
from simulator.plan.queueing import QueueWait, waiting
from simulator.plan.streams import Streams, crossing, poisson_share
from simulator.replay import Setup, roofline_of

NUM_MESSAGES = 4
"""Before a client has its first token: to the router, to the worker, and two to the client."""
FEW_STREAMS = 6.0
"""Placement weighs a prompt's wait against the streams that it holds up. With few streams it goes by the lines, so that
they are as one; the more there are, the more it goes by streams, and with many a wait is halfway between that of one
line for all workers and that of a line for each. Fitted to simulated clusters, with streams from 0.6 to 104."""
SPREAD = tuple(NORMAL.inv_cdf(share) for share in (0.1, 0.3, 0.5, 0.7, 0.9))
"""Of batches around their mean, in standard deviations: each as likely as the others."""


@dataclass(frozen=True)
class AggregatedPlan:
    """All workers are alike: each computes prompts in chunks, beside the streams that run there."""

    setup: Setup
    load: Load
    workers: int

    @cached_property
    def streams(self) -> Streams:
        return Streams(roofline_of(self.setup, "decode", apart=False), self.load, self.setup.block_tokens)

    def line_at(self, batch: float) -> PromptQueue:
        """With so many streams beside each prompt."""
        context_tokens = batch * self.load.context
        roofline, chunk = self.streams.roofline, self.setup.decode_chunk
        steps = PromptSteps(roofline, chunk, self.load.hit_rate, batch, context_tokens)
        return line_of(steps, self.load.prompts, self.load.rate, self.workers)

    def itl_at(self, batch: float) -> float:
        """Steps with prompts take longer, and there are so many of them; in the rest of each second are the others."""
        line, rate = self.line_at(batch), self.load.rate / self.workers
        with_prompts = min(rate, line.busy / line.service_s) * line.num_steps
        return 1 / (with_prompts + (1 - line.busy) / self.streams.step_s(max(1.0, batch)))

    @cached_property
    def batch(self) -> float:
        """Streams of a worker, the mean: as many as come while one lasts (Little)."""
        tokens_per_s = self.load.rate * self.load.gaps / self.workers
        return crossing(lambda batch: batch - tokens_per_s * self.itl_at(batch), 0.0, self._most)

    @cached_property
    def _most(self) -> float:
        return max(1.0, self.streams.largest(self.setup.slo.itl_s))

    @cached_property
    def overloaded(self) -> bool:
        """Even the largest batch within the ITL, prompts aside, makes fewer tokens than are wanted."""
        return self.load.rate * self.load.gaps / self.workers * self.itl_at(self._most) >= self._most

    @cached_property
    def line(self) -> PromptQueue:
        return self.line_at(self.batch)

    @cached_property
    def own_line(self) -> QueueWait:
        """Were a line for each worker, and requests dealt out by chance."""
        return waiting(self.load.rate / self.workers, 1, self.line.packed_s, self.line.variation2)

    @property
    def apart_share(self) -> float:
        """Between one line for all, 0, and a line for each, 1."""
        return self.batch / (2 * (self.batch + FEW_STREAMS))

    def share_over(self, seconds: float) -> float:
        """Of requests: who waits longer for other prompts."""
        one, each = self.line.waiting.share_over(seconds), self.own_line.share_over(seconds)
        return one + (each - one) * self.apart_share

    @cached_property
    def wait_s(self) -> float:
        """The mean."""
        one, each = self.line.waiting.mean_of_all_s, self.own_line.mean_of_all_s
        return one + (each - one) * self.apart_share if math.isfinite(one) else math.inf

    @cached_property
    def itl_s(self) -> float:
        return self.itl_at(self.batch)

    def delay_s(self, prompt: float) -> float:
        """By which a prompt holds up each stream."""
        seconds, steps = self.line.service(prompt)
        return max(0.0, seconds - steps * self.streams.step_s(max(1.0, self.batch)))

    @cached_property
    def kept_itl(self) -> float:
        """Each output meets another number of prompts, Poisson by its length, and batches vary."""
        if self.load.gaps == 0:
            return 1.0
        if self.overloaded or not self.streams.largest(self.setup.slo.itl_s):
            return 0.0
        return self.load.outputs.share_of(lambda output: sum(self._kept_itl(output, z) for z in SPREAD) / len(SPREAD))

    def _kept_itl(self, output: float, deviations: float) -> float:
        """Of outputs of that length, where the batch is so many standard deviations larger than in the mean.

        For prompts that hold them up for unequal times stand equal ones, so many as have the same mean and variance."""
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
        """By one prompt: the mean, and the mean of squares."""
        prompts = self.load.prompts
        return prompts.mean_of(self.delay_s), prompts.mean_of(lambda prompt: self.delay_s(prompt) ** 2)

    def unqueued_s(self, prompt: float) -> float:
        """Of a prompt's first token, without the wait for other prompts; it waits for the step that runs."""
        line = self.line
        rest_of_step_s = (self.itl_s + line.busy * line.others_s) / 2
        return NUM_MESSAGES * self.setup.message_s + rest_of_step_s + line.steps.alone(prompt)[0] + line.others_s

    @cached_property
    def kept_ttft(self) -> float:
        limit_s = self.setup.slo.ttft_s
        return self.load.prompts.share_of(lambda prompt: 1 - self.share_over(limit_s - self.unqueued_s(prompt)))

    @cached_property
    def ttft_s(self) -> float:
        """The mean."""
        return self.wait_s + self.load.prompts.mean_of(self.unqueued_s)

    @cached_property
    def held(self) -> float:
        """Sequences with blocks in all pools: from the moment they are placed."""
        return self.load.rate * (self.ttft_s + self.load.gaps * self.itl_s)

    @cached_property
    def parts(self) -> dict[str, float]:
        """Of the requests that keep each."""
        memory = self.streams.kept_memory(self.workers, self.held, self.batch) if self.kept_ttft else 0.0
        return {"ttft": self.kept_ttft, "itl": self.kept_itl, "memory": memory}

    @property
    def kept(self) -> float:
        return self.parts["ttft"] * self.parts["itl"] * self.parts["memory"]
