"""A cluster sized by a planner, as one of the compared scenarios."""

import math

from engine.backends.sim.settings import StepWork, Timing
from planner.config import PolicyConfig, PoolConfig
from sizing.cluster.autoscale import Autoscale
from sizing.comparison.replay import Scenario, Setup, priors_of, roofline_of
from workloads.request import BadSetup


def autoscaled(setup: Setup, most: int, start_s: float) -> Scenario:
    """Return the scenario: one worker of each role, and up to `most` of each by the planner.

    Raises BadSetup.
    """
    if most < 1:
        raise BadSetup("autoscale", f"{most} is not at least 1")
    if not 0 <= start_s < math.inf:
        raise BadSetup("worker_start", f"{start_s} is not a number of seconds from 0")
    if setup.dp > 1:
        raise BadSetup("autoscale", f"workers come and go in groups of {setup.dp}, which the planner does not size")
    return Scenario("conditional", 1, 1, autoscale=Autoscale(policy_of(setup, most, start_s)))


def policy_of(setup: Setup, most: int, start_s: float = 60.0) -> PolicyConfig:
    """Return the planner's policy with what an operator knows about the GPUs; `most` workers in each pool."""
    decode: Timing
    if (measured := setup.calibration) is not None:
        chunk, decode = measured.prefill_chunk, measured.timing("decode")
        prompt = StepWork(prompt_tokens=chunk, prompt_pairs=chunk * (chunk + 1) // 2)
        prefill_tokens_per_s = chunk / max(1e-9, measured.timing("prefill").seconds_of(prompt))
    else:
        decode = roofline_of(setup, "decode", apart=True)
        prefill_tokens_per_s = priors_of(setup, apart=True).prefill_tokens_per_s
    one, two = (decode.seconds_of(StepWork(streams=count, context_tokens=4096 * count)) for count in (1, 2))
    pool = PoolConfig(max_workers=most)
    return PolicyConfig(
        prefill=pool,
        decode=pool,
        ttft_s=setup.slo.ttft_s,
        itl_s=setup.slo.itl_s,
        start_s=start_s,
        prefill_tokens_per_s=prefill_tokens_per_s,
        step_s=max(1e-6, one),
        stream_delay_s=max(1e-6, two - one),
    )
