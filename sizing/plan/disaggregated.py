"""Prefill workers and decode workers: which part of the requests keeps the SLO."""

from dataclasses import dataclass
from functools import cached_property

from sizing.comparison.replay import Setup, nic_bytes_per_s, roofline_of
from sizing.plan.load import OfferedLoad
from sizing.plan.prompts import PromptQueue, PromptSteps, line_of
from sizing.plan.streams import Streams, crossing, share_within

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
