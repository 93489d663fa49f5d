"""Overload in virtual time: a modelled fleet beyond its capacity, one fifth of it interactive, the rest batch."""

import random
from dataclasses import dataclass

import pytest

from router.admission.config import AdmissionConfig
from router.admission.request import RequestInfo
from support.admission_site import Job, ModelledFleet

MAX_TTFT_S = 1.5
WARM_S, END_S = 20.0, 80.0
BATCH_DEADLINE_S = 40.0
PROMPT, OUTPUT = 600, 200
DECODES, LENDERS, POOL, STEP_S = 4, 2, 1000, 0.02
STREAMS = DECODES * (POOL // -(-(PROMPT + OUTPUT) // 16))
"""At a time, by the pools."""
POOLS_BIND, LENDERS_BIND = 16_000.0, 2_500.0
"""Tokens a second of a lender."""


def capacity(tokens_per_s: float) -> float:
    """Requests a second of mean size, by pools or lenders."""
    return min(STREAMS / (PROMPT / tokens_per_s + OUTPUT * STEP_S), LENDERS * tokens_per_s / PROMPT)


@dataclass(frozen=True)
class Figures:
    goodput: float
    """Tokens a second of requests that ended within their limits."""
    interactive_p99_s: float
    interactive_served: float
    """Of those that came."""
    batch_served: float
    longest_queue: int


def simulate(load: float, tokens_per_s: float, interactive: float = 0.2) -> Figures:
    """`load` in units of the capacity."""
    config = AdmissionConfig(max_queued=500)
    site = ModelledFleet(DECODES, POOL, LENDERS, tokens_per_s, STEP_S, config)
    draw = random.Random(7)
    at, longest = 0.0, 0
    while (at := at + draw.expovariate(load * capacity(tokens_per_s))) < END_S:
        first = draw.random() < interactive
        size = draw.uniform(0.5, 1.5)
        limits = {"first_token_by": at + MAX_TTFT_S} if first else {}
        info = RequestInfo(f"t{draw.randrange(5)}", 0 if first else -1, at, at + BATCH_DEADLINE_S, **limits)
        site.run(at)
        site.arrive(Job(first, at, int(PROMPT * size), int(OUTPUT * size), info))
        longest = max(longest, site.admission.num_waiting)
    site.run(END_S)
    counted = [job for job in site.jobs if job.arrived_at >= WARM_S]
    good = [job for job in site.jobs if job.ended_at is not None and job.ended_at >= WARM_S and kept_limits(job)]
    waits = sorted(
        job.first_token_at - job.arrived_at for job in counted if job.interactive and job.first_token_at is not None
    )
    early = [job for job in counted if job.arrived_at < END_S - 15]
    return Figures(
        goodput=sum(job.prompt_tokens + job.output_tokens for job in good) / (END_S - WARM_S),
        interactive_p99_s=waits[int(0.99 * len(waits))],
        interactive_served=served([job for job in early if job.interactive]),
        batch_served=served([job for job in early if not job.interactive]),
        longest_queue=longest,
    )


def kept_limits(job: Job) -> bool:
    assert job.first_token_at is not None
    assert job.ended_at is not None
    in_time = not job.interactive or job.first_token_at - job.arrived_at <= MAX_TTFT_S
    return in_time and job.ended_at <= job.info.deadline


def served(jobs: list[Job]) -> float:
    return sum(job.first_token_at is not None for job in jobs) / len(jobs) if jobs else 1.0


@pytest.fixture(scope="module", params=[POOLS_BIND, LENDERS_BIND], ids=["pools bind", "lenders bind"])
def by_load(request: pytest.FixtureRequest) -> dict[float, Figures]:
    return {load: simulate(load, request.param) for load in (0.5, 0.75, 1.0, 1.5, 2.0, 3.0)}


def test_goodput_stays_at_its_peak(by_load: dict[float, Figures]) -> None:
    peak = max(figures.goodput for figures in by_load.values())
    for load in (1.5, 2.0, 3.0):
        assert by_load[load].goodput >= 0.95 * peak, by_load


def test_interactive_stays_in_its_limit_while_batch_waits(by_load: dict[float, Figures]) -> None:
    for load, figures in by_load.items():
        assert figures.interactive_p99_s <= MAX_TTFT_S, (load, figures)
        assert figures.interactive_served >= 0.97, (load, figures)
    assert by_load[3.0].batch_served < 0.5, "it was an overload"
    assert by_load[3.0].batch_served > 0.05, "and batch was served all the same"
    assert by_load[3.0].longest_queue <= 500


def test_too_much_interactive_alone_is_served_in_its_limit_as_far_as_it_goes() -> None:
    """Nothing to push back but itself: misses are refused at once, and goodput stays."""
    at_capacity, beyond = simulate(1.0, LENDERS_BIND, interactive=1.0), simulate(3.0, LENDERS_BIND, interactive=1.0)
    assert beyond.goodput >= 0.95 * at_capacity.goodput, (at_capacity, beyond)
    assert beyond.interactive_p99_s <= MAX_TTFT_S


def test_it_is_deterministic() -> None:
    assert simulate(1.5, POOLS_BIND) == simulate(1.5, POOLS_BIND)
