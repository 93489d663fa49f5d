"""The planner's policy: bounds, patience, and what it does when load comes and goes."""

import dataclasses
import itertools
import math
import random
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.errors import StartError
from cluster.roles import ROLES
from planner.config import PolicyConfig
from planner.estimates import ArrivalForecast, Counters, Observation, PoolLoad, PoolObservation, Ratio
from planner.policy import DesiredSizes, PolicyState, decide
from support.tuned import tuned

POOL_BLOCKS = 1000


@dataclass
class Fluid:
    """Requests flow in at a rate, through as many workers as there are; what they cannot do waits."""

    config: PolicyConfig
    prefill: int
    decode: int
    prompt_tokens: float = 2000.0
    worker_tokens_per_s: float = 4000.0
    stream_s: float = 10.0
    worker_streams: float = 25.0
    stream_blocks: float = 30.0
    every_s: float = 5.0
    now_s: float = 0.0
    waiting: float = 0.0
    state: PolicyState | None = None
    counters: Counters = field(default_factory=Counters)
    desired_sizes: list[DesiredSizes] = field(default_factory=list)
    _starting: list[tuple[float, str]] = field(default_factory=list)

    def run(self, rate: float, for_s: float) -> None:
        """Requests a second."""
        for _ in range(round(for_s / self.every_s)):
            self.step(rate)

    def step(self, rate: float) -> DesiredSizes:
        self.now_s += self.every_s
        for due_s, role in [start for start in self._starting if start[0] <= self.now_s]:
            self._starting.remove((due_s, role))
            setattr(self, role, getattr(self, role) + 1)
        seen = self._flow(rate)
        self.state, wish = decide(self.state, seen, self.config)
        self.desired_sizes.append(wish)
        self._obey(wish)
        return wish

    def _flow(self, rate: float) -> Observation:
        came = rate * self.every_s
        most = self.prefill * self.worker_tokens_per_s * self.every_s / self.prompt_tokens
        room = max(0.0, self.decode * self.worker_streams / self.stream_s * self.every_s)
        served = min(self.waiting + came, most, room)
        self.waiting += came - served
        busy = 0 if not most else min(self.prefill, round(self.prefill * served / most + 0.499))
        running = round(served / self.every_s * self.stream_s)
        before, tokens = self.counters, round(served * self.prompt_tokens)
        streams = running / self.decode if self.decode else 0.0
        itl_s = 0.02 + 0.001 * streams
        self.counters = dataclasses.replace(
            before,
            arrived=before.arrived + round(came),
            arrived_tokens=before.arrived_tokens + round(came * self.prompt_tokens),
            ended_tokens=before.ended_tokens + tokens,
            lent_tokens=before.lent_tokens + tokens,
            first_tokens=before.first_tokens + served,
            ttft_missed=before.ttft_missed + (served if self.waiting > 1 else 0),
            streams=before.streams + served,
            itl_sum_s=before.itl_sum_s + served * itl_s,
        )
        starting = {role: sum(other == role for _, other in self._starting) for role in ("prefill", "decode")}
        return Observation(
            self.now_s,
            PoolObservation(self.prefill, starting["prefill"], busy),
            PoolObservation(
                self.decode,
                starting["decode"],
                running=running,
                num_blocks=POOL_BLOCKS * self.decode,
                used_blocks=min(POOL_BLOCKS * self.decode, round(running * self.stream_blocks)),
            ),
            waiting=int(self.waiting),
            waiting_tokens=int(self.waiting * self.prompt_tokens),
            counters=self.counters,
        )

    def _obey(self, wish: DesiredSizes) -> None:
        for role, switched in (("prefill", wish.to_prefill), ("decode", wish.to_decode)):
            other = "decode" if role == "prefill" else "prefill"
            setattr(self, other, getattr(self, other) - switched)
            self._starting += [(self.now_s + self.config.switch_s, role)] * switched
        for role, wanted in (("prefill", wish.prefill), ("decode", wish.decode)):
            there = getattr(self, role) + sum(other == role for _, other in self._starting)
            self._starting += [(self.now_s + self.config.start_s, role)] * (wanted - there)
            for _ in range(there - wanted):
                if (late := next((start for start in self._starting[::-1] if start[1] == role), None)) is not None:
                    self._starting.remove(late)
                else:
                    setattr(self, role, getattr(self, role) - 1)


def config_of(**values: object) -> PolicyConfig:
    pools = {"prefill": {"max_workers": 12}, "decode": {"max_workers": 12}}
    config = tuned(PolicyConfig, pools | values)
    config.check()
    return config


# ------------------------------------------------------------------ what it is made of


def test_square_root_staffing_exactly() -> None:
    assert PoolLoad(4.0, 0.0, 1.0).workers(headroom=1.0) == 6  # 4 + 2
    assert PoolLoad(4.0, 1.5, 1.0).workers(headroom=1.0) == 6  # which does that, too
    assert PoolLoad(4.0, 2.5, 1.0).workers(headroom=1.0) == 7
    assert PoolLoad(4.0, 0.0, 1.0).workers(headroom=1.0, margin=0.5625) == 9  # 6.25 + 2.5, rounded up
    assert PoolLoad(100.0, 0.0, 25.0).workers(headroom=1.0) == 5  # 110 streams
    assert PoolLoad(0.0, 0.0, 1.0).workers(headroom=1.0) == 0


def test_a_forecast_knows_a_steady_rise_and_never_promises_less_than_there_is() -> None:
    forecast = ArrivalForecast()
    for at_s in range(0, 1200, 5):
        forecast = forecast.updated(5 * (1 + at_s / 600), 5)
    now = 1 + 1195 / 600
    assert forecast.at(60) == pytest.approx(now + 60 / 600, rel=0.05)
    for _ in range(60):
        forecast = forecast.updated(0, 5)
    assert forecast.trend < 0
    assert forecast.at(60) == forecast.level


def test_a_ratio_begins_with_its_prior_and_goes_to_what_is_seen() -> None:
    ratio = Ratio.prior(1000.0, memory=300)
    assert ratio.value == pytest.approx(1000)
    assert ratio.updated(0, 0) == ratio
    for _ in range(200):
        ratio = ratio.updated(10 * 4000, 10)
    assert ratio.value == pytest.approx(4000, rel=0.01)


def test_settings_that_contradict_each_other_are_named() -> None:
    with pytest.raises(StartError, match="max_total"):
        config_of(max_total=3, prefill={"min_workers": 2}, decode={"min_workers": 2})
    with pytest.raises(StartError, match=r"decode\.min_workers"):
        config_of(decode={"min_workers": 9, "max_workers": 8})


# ------------------------------------------------------------------ behaviour over time


def test_it_grows_before_anything_waits_long_and_shrinks_again() -> None:
    """2 requests/s x 2,000 tokens are one busy prefill worker; 10 s each are 20 streams."""
    fluid = Fluid(config_of(), prefill=1, decode=1)
    fluid.run(rate=1, for_s=900)
    assert fluid.desired_sizes[-1].prefill <= 2
    quiet = len(fluid.desired_sizes)
    for minute in range(20):
        fluid.run(rate=1 + minute / 2, for_s=60)
    top = fluid.desired_sizes[-1]
    assert top.prefill >= 6
    assert top.decode >= 5
    assert fluid.waiting < 20
    fluid.run(rate=10.5, for_s=600)
    fluid.run(rate=1, for_s=1800)
    assert fluid.desired_sizes[-1].prefill <= fluid.desired_sizes[quiet - 1].prefill + 1
    assert fluid.desired_sizes[-1].decode <= 2


def test_a_queue_is_answered_at_once() -> None:
    fluid = Fluid(config_of(), prefill=1, decode=3)
    fluid.run(rate=1, for_s=300)
    before = fluid.desired_sizes[-1].prefill
    fluid.waiting = 60
    assert fluid.step(rate=1).prefill > before


def test_it_waits_before_it_shrinks_and_takes_small_steps() -> None:
    fluid = Fluid(config_of(down_after_s=300), prefill=6, decode=6)
    fluid.run(rate=0.5, for_s=295)
    assert {(desired.prefill, desired.decode) for desired in fluid.desired_sizes} == {(6, 6)}
    fluid.run(rate=0.5, for_s=600)
    sizes = [desired.prefill for desired in fluid.desired_sizes]
    falls = [place for place in range(1, len(sizes)) if sizes[place] < sizes[place - 1]]
    assert sizes[-1] <= 2
    assert all(sizes[place - 1] - sizes[place] == 1 for place in falls)
    assert all((after - before) * fluid.every_s >= 50 for before, after in itertools.pairwise(falls))


def test_a_pool_goes_to_nothing_only_where_it_may_and_comes_back_with_the_first_request() -> None:
    zero = config_of(prefill={"min_workers": 0}, decode={"min_workers": 0})
    fluid = Fluid(zero, prefill=1, decode=1)
    fluid.run(rate=1, for_s=300)
    fluid.run(rate=0, for_s=zero.down_after_s + 60)
    assert (fluid.desired_sizes[-1].prefill, fluid.desired_sizes[-1].decode) == (0, 0)
    assert (fluid.step(rate=0.2).prefill, fluid.desired_sizes[-1].decode) == (1, 1)
    kept = Fluid(config_of(), prefill=1, decode=1)
    kept.run(rate=0, for_s=1200)
    assert (kept.desired_sizes[-1].prefill, kept.desired_sizes[-1].decode) == (1, 1)


def test_a_pool_that_died_is_wanted_still() -> None:
    fluid = Fluid(config_of(), prefill=3, decode=3)
    fluid.run(rate=4, for_s=600)
    before = fluid.desired_sizes[-1]
    fluid.prefill = fluid.decode = 0
    fluid.run(rate=4, for_s=50)
    assert fluid.desired_sizes[-1].prefill >= before.prefill
    assert fluid.desired_sizes[-1].decode >= before.decode
    fluid.run(rate=4, for_s=600)
    assert fluid.waiting < 5


def test_who_is_not_needed_switches_where_that_is_quicker() -> None:
    settings_of = {"switch": True, "max_total": 8, "switch_s": 3.0}
    fluid = Fluid(config_of(**settings_of), prefill=6, decode=2)
    fluid.run(rate=1, for_s=170)
    fluid.stream_s = 80.0  # answers grow longer, prompts do not
    fluid.run(rate=1, for_s=400)
    assert sum(desired.to_decode for desired in fluid.desired_sizes) > 0
    assert fluid.desired_sizes[-1].decode >= 4
    slow = Fluid(config_of(**settings_of | {"switch_s": 60.0}), prefill=6, decode=2)
    slow.run(rate=1, for_s=170)
    slow.stream_s = 80.0
    slow.run(rate=1, for_s=400)
    assert sum(desired.to_decode for desired in slow.desired_sizes) == 0


# ------------------------------------------------------------------ whatever is seen

counts = st.integers(0, 20)
pools = st.builds(
    PoolObservation,
    serving=counts,
    starting=counts,
    busy=counts,
    queued_tokens=st.integers(0, 10**7),
    running=st.integers(0, 2000),
    num_blocks=st.integers(0, 10**6),
    used_blocks=st.integers(0, 10**6),
)
big = st.integers(0, 10**9)
some_counters = st.builds(
    Counters, big, big, big, big, big, big, st.floats(0, 1e9), st.floats(0, 1e9), st.floats(0, 1e9), st.floats(0, 1e9)
)
observations = st.builds(
    Observation,
    at_s=st.just(0.0),
    prefill=pools,
    decode=pools,
    waiting=st.integers(0, 10**5),
    waiting_tokens=st.integers(0, 10**9),
    counters=some_counters,
)


@st.composite
def configs(draw: st.DrawFn) -> PolicyConfig:
    least = {role: draw(st.integers(0, 4)) for role in ROLES}
    most = {role: least[role] + draw(st.integers(1, 10)) for role in ROLES}
    total = draw(st.none() | st.integers(max(1, sum(least.values())), 30))
    return config_of(
        **{role: {"min_workers": least[role], "max_workers": most[role]} for role in ROLES},
        max_total=total,
        switch=draw(st.booleans()),
        down_after_s=draw(st.sampled_from([0.0, 20.0, 200.0])),
    )


@settings(max_examples=80)
@given(config=configs(), seen=st.lists(st.tuples(st.floats(0.1, 120), observations), min_size=1, max_size=12))
def test_whatever_is_seen_wishes_are_within_their_bounds(
    config: PolicyConfig, seen: list[tuple[float, Observation]]
) -> None:
    state: PolicyState | None = None
    now, before = 0.0, None
    for gap_s, each in seen:
        now += gap_s
        state, desired = decide(state, dataclasses.replace(each, at_s=now), config)
        for role in ROLES:
            assert config.pool(role).min_workers <= desired.pool(role) <= config.pool(role).max_workers
        if config.max_total is not None:
            assert desired.prefill + desired.decode <= config.max_total
        assert desired.to_prefill >= 0
        assert desired.to_decode >= 0
        assert not (desired.to_prefill and desired.to_decode)
        if before is not None:
            if desired.to_prefill:
                assert desired.prefill - before.prefill >= desired.to_prefill <= before.decode - desired.decode
            if desired.to_decode:
                assert desired.decode - before.decode >= desired.to_decode <= before.prefill - desired.prefill
        for role in ROLES:
            assert math.isfinite(state.pool(role).headroom)
            assert state.pool(role).wanted == desired.pool(role)
        before = desired


@settings(max_examples=60)
@given(
    config=configs(),
    seen=st.lists(st.tuples(st.floats(0.1, 120), observations), min_size=2, max_size=6),
    more=st.integers(1, 10**6),
)
def test_more_prompt_tokens_that_wait_never_make_the_prefill_pool_smaller(
    config: PolicyConfig, seen: list[tuple[float, Observation]], more: int
) -> None:
    """Pools that share no limit and do not switch."""
    config = config.model_copy(update={"switch": False, "max_total": None})
    state: PolicyState | None = None
    now = 0.0
    for gap_s, each in seen[:-1]:
        now += gap_s
        state, _ = decide(state, dataclasses.replace(each, at_s=now), config)
    last = dataclasses.replace(seen[-1][1], at_s=now + seen[-1][0])
    _, desired = decide(state, last, config)
    _, busier = decide(state, dataclasses.replace(last, waiting_tokens=last.waiting_tokens + more), config)
    assert busier.prefill >= desired.prefill
    assert busier.decode >= desired.decode


@settings(max_examples=12, deadline=None)
@given(rate=st.sampled_from([0.2, 0.6, 1.0, 1.4, 2.2, 3.0, 5.0]), start=st.integers(1, 8), switch=st.booleans())
def test_a_constant_load_comes_to_rest(rate: float, start: int, switch: bool) -> None:
    fluid = Fluid(config_of(switch=switch), prefill=start, decode=start)
    fluid.run(rate, for_s=3600)
    there = len(fluid.desired_sizes)
    fluid.run(rate, for_s=3600)
    assert len({(desired.prefill, desired.decode) for desired in fluid.desired_sizes[there:]}) == 1
    assert fluid.waiting < 10


@settings(max_examples=12, deadline=None)
@given(seed=st.integers(0, 1000), rate=st.sampled_from([1.0, 2.0, 4.0]))
def test_a_load_that_wavers_turns_no_pool_around_within_its_patience(seed: int, rate: float) -> None:
    """Who grew does not shrink within `down_after_s`; and there is little of either."""
    config, rng = config_of(), random.Random(seed)
    fluid = Fluid(config, prefill=4, decode=4)
    fluid.run(rate, for_s=1800)
    there = len(fluid.desired_sizes)
    for _ in range(720):
        fluid.step(rate * rng.uniform(0.7, 1.3))
    for role in ROLES:
        sizes = [desired.pool(role) for desired in fluid.desired_sizes[there:]]
        changes = [place for place in range(1, len(sizes)) if sizes[place] != sizes[place - 1]]
        falls = [place for place in changes if sizes[place] < sizes[place - 1]]
        for fall in falls:
            rises = [place for place in changes if sizes[place] > sizes[place - 1] and place < fall]
            assert not rises or (fall - rises[-1]) * fluid.every_s >= config.down_after_s
        assert len(changes) <= 12  # in an hour
