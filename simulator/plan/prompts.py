"""How long prompts take a worker, by the roofline; alone, or packed with others into full steps."""

from dataclasses import dataclass

from engine.sim.timing import StepWork
from simulator.gpus import Roofline
from simulator.plan.load import Lengths
from simulator.plan.waiting import Waiting, waiting


@dataclass(frozen=True, slots=True)
class PromptSteps:
    """Of a worker that computes at most `chunk` prompt tokens a step, beside `streams` that decode."""

    roofline: Roofline
    chunk: int
    hit_rate: float
    streams: float = 0.0
    context_tokens: float = 0.0
    """Of all streams together."""

    def step_s(self, tokens: float, pairs: float) -> float:
        work = StepWork(round(tokens), round(pairs), round(self.streams), round(self.context_tokens))
        return self.roofline.seconds_of(work)

    def computed(self, prompt: float) -> float:
        """Tokens that are not cached: the last one at least."""
        return max(1.0, prompt * (1 - self.hit_rate))

    def pairs(self, prompt: float) -> float:
        """Of computed tokens and those before them."""
        computed = self.computed(prompt)
        return computed * (prompt - computed) + computed * (computed + 1) / 2

    def alone(self, prompt: float) -> tuple[float, float]:
        """Seconds and steps when nobody else computes: steps of `chunk`, and one of the rest. Full ones count as their
        mean, which is exact unless attention, growing, changes what binds them."""
        computed, all_pairs = self.computed(prompt), self.pairs(prompt)
        full, rest = divmod(computed, self.chunk)
        rest_pairs = rest * (prompt - rest) + rest * (rest + 1) / 2
        seconds = full * self.step_s(self.chunk, (all_pairs - rest_pairs) / full) if full else 0.0
        return (seconds + self.step_s(rest, rest_pairs), full + 1) if rest else (seconds, full)

    def packed(self, prompt: float) -> tuple[float, float]:
        """Seconds and steps, this prompt's part of full ones, when many are in line."""
        steps = self.computed(prompt) / self.chunk
        return steps * self.step_s(self.chunk, self.pairs(prompt) / steps), steps


@dataclass(frozen=True, slots=True)
class PromptLine:
    """Prompts in line for `workers`."""

    steps: PromptSteps
    packing: float
    """From 0, each prompt has steps of its own, to 1, all share full ones."""
    service_s: float
    num_steps: float
    """For one prompt, the mean."""
    variation2: float
    """Of service times: their variance over the square of the mean."""
    waiting: Waiting
    """Were one line for all workers."""

    def service(self, prompt: float) -> tuple[float, float]:
        """Seconds and steps that a prompt takes of a worker."""
        return _between(self.steps.alone(prompt), self.steps.packed(prompt), self.packing)


def line_of(steps: PromptSteps, prompts: Lengths, rate: float, workers: int) -> PromptLine:
    """The busier a worker is, the more prompts share a step: between a prompt alone and packed ones by how busy packed
    ones would keep it."""
    packing = min(1.0, rate / workers * prompts.mean_of(lambda prompt: steps.packed(prompt)[0]))
    services = [_between(steps.alone(prompt), steps.packed(prompt), packing) for prompt in prompts.quantiles]
    mean_s = sum(seconds for seconds, _ in services) / len(services)
    square = sum(seconds**2 for seconds, _ in services) / len(services)
    num_steps = sum(count for _, count in services) / len(services)
    variation2 = max(0.0, square / mean_s**2 - 1)
    return PromptLine(steps, packing, mean_s, num_steps, variation2, waiting(rate, workers, mean_s, variation2))


def _between(alone: tuple[float, float], packed: tuple[float, float], packing: float) -> tuple[float, float]:
    seconds, count = (one + (other - one) * packing for one, other in zip(alone, packed, strict=True))
    return seconds, count
