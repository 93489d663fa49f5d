"""Time of prompts on a worker by the roofline, alone or packed with others into full steps.

Waits for servers of one queue: M/G/c.

Exact for one server with any service times (the mean, by Pollaczek and Khinchine). For c servers Allen and Cunneen's
approximation, with Sakasegawa's for the share that waits. Above its mean a wait is taken as exponential, slightly too
much for equal service times. Near its limit a queue is unpredictable: a few per cent more load double it. So more than
MAX_UTILISATION counts as full.
"""

import math
from dataclasses import dataclass

from engine.backends.sim.settings import StepWork
from sizing.gpus import Roofline
from sizing.plan.load import Lengths

MAX_UTILISATION = 0.9


@dataclass(frozen=True, slots=True)
class QueueWait:
    """Wait before one of `servers` with a common queue."""

    utilisation: float
    share: float
    """Share of arrivals that must wait."""
    mean_s: float
    """Mean wait of those."""

    @property
    def full(self) -> bool:
        return self.utilisation >= MAX_UTILISATION

    @property
    def mean_of_all_s(self) -> float:
        return self.share * self.mean_s

    def share_over(self, seconds: float) -> float:
        """Return the share that waits for longer; 1 where it is full."""
        if seconds < 0 or self.full:
            return 1.0
        return self.share * math.exp(-seconds / self.mean_s) if self.mean_s else 0.0


def waiting(rate: float, servers: int, service_s: float, variation2: float) -> QueueWait:
    """Return the wait.

    `variation2`: variance of service times over the square of their mean, `service_s`.
    """
    utilisation = rate * service_s / servers
    if utilisation >= 1:
        return QueueWait(utilisation, 1.0, math.inf)
    share = utilisation ** (math.sqrt(2 * (servers + 1)) - 1)
    return QueueWait(utilisation, share, service_s * (1 + variation2) / 2 / (servers * (1 - utilisation)))


@dataclass(frozen=True, slots=True)
class PromptSteps:
    """Steps of a worker that computes at most `chunk` prompt tokens per step, beside `streams` that decode."""

    roofline: Roofline
    chunk: int
    hit_rate: float
    streams: float = 0.0
    context_tokens: float = 0.0
    """Context tokens of all streams together."""

    def step_s(self, tokens: float, pairs: float) -> float:
        work = StepWork(round(tokens), round(pairs), round(self.streams), round(self.context_tokens))
        return self.roofline.seconds_of(work)

    def computed(self, prompt: float) -> float:
        """Return the tokens that are not cached, at least the last one."""
        return max(1.0, prompt * (1 - self.hit_rate))

    def pairs(self, prompt: float) -> float:
        """Return the pairs of computed tokens and those before them."""
        computed = self.computed(prompt)
        return computed * (prompt - computed) + computed * (computed + 1) / 2

    def alone(self, prompt: float) -> tuple[float, float]:
        """Return seconds and steps of a prompt alone: steps of `chunk`, and one of the rest.

        Full steps count as their mean, exact unless growing attention changes what limits them.
        """
        computed, all_pairs = self.computed(prompt), self.pairs(prompt)
        full, rest = divmod(computed, self.chunk)
        rest_pairs = rest * (prompt - rest) + rest * (rest + 1) / 2
        seconds = full * self.step_s(self.chunk, (all_pairs - rest_pairs) / full) if full else 0.0
        return (seconds + self.step_s(rest, rest_pairs), full + 1) if rest else (seconds, full)

    def packed(self, prompt: float) -> tuple[float, float]:
        """Return seconds and steps of a prompt's share of full steps, when many are queued."""
        steps = self.computed(prompt) / self.chunk
        return steps * self.step_s(self.chunk, self.pairs(prompt) / steps), steps


@dataclass(frozen=True, slots=True)
class PromptQueue:
    """Queue of prompts for `workers`.

    A prompt costs its share of full steps, and the part of its own steps beyond that, which prompts that share them pay
    once: reading the weights, launching a step.
    """

    steps: PromptSteps
    packed_s: float
    """Mean share of full steps, in seconds."""
    fixed_s: float
    """Mean part beyond, in seconds."""
    together: float
    """Prompts that share a step: those that arrive while one runs, at least one."""
    service_s: float
    """Mean time of a worker for each prompt."""
    num_steps: float
    """Mean number of steps for each prompt."""
    variation2: float
    """Variance of the shares of full steps, over the square of their mean."""
    busy: float
    """Share of a worker's time that is busy."""
    waiting: QueueWait
    """Wait with one queue for all workers, at the pace of full steps."""

    def service(self, prompt: float) -> tuple[float, float]:
        """Return the seconds and steps that a prompt takes of a worker."""
        return _shared(self.steps, prompt, self.together)

    @property
    def others_s(self) -> float:
        """Seconds that a prompt's own steps take for others that share them."""
        return (self.together - 1) * self.packed_s


def line_of(steps: PromptSteps, prompts: Lengths, rate: float, workers: int) -> PromptQueue:
    """Return the queue.

    While a step runs the next prompts arrive, and share the step after it.

    As many share it as arrive within a step that is as long as so many make it.
    """
    packed_s = prompts.mean_of(lambda prompt: steps.packed(prompt)[0])
    fixed_s = max(0.0, prompts.mean_of(lambda prompt: steps.alone(prompt)[0]) - packed_s)
    utilisation = rate * packed_s / workers
    most = max(1.0, steps.chunk / steps.computed(prompts.mean))
    together = most if utilisation >= 1 else min(most, max(1.0, rate / workers * fixed_s / (1 - utilisation)))
    service_s = prompts.mean_of(lambda prompt: _shared(steps, prompt, together)[0])
    num_steps = prompts.mean_of(lambda prompt: _shared(steps, prompt, together)[1])
    variation2 = prompts.mean_of(lambda prompt: steps.packed(prompt)[0] ** 2) / packed_s**2 - 1
    return PromptQueue(
        steps=steps,
        packed_s=packed_s,
        fixed_s=fixed_s,
        together=together,
        service_s=service_s,
        num_steps=num_steps,
        variation2=max(0.0, variation2),
        busy=min(1.0, rate * service_s / workers),
        waiting=waiting(rate, workers, packed_s, max(0.0, variation2)),
    )


def _shared(steps: PromptSteps, prompt: float, together: float) -> tuple[float, float]:
    """Return seconds and steps of one of so many prompts that share theirs."""
    (alone_s, alone), (packed_s, packed) = steps.alone(prompt), steps.packed(prompt)
    return packed_s + max(0.0, alone_s - packed_s) / together, packed + (alone - packed) / together
