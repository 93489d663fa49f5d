"""A made-up cluster that a planner looks at: fluid, without requests, for tests of the policy alone."""

import dataclasses
from dataclasses import dataclass, field

from planner.config import PolicyConfig
from planner.estimates import Counters, Observation, PoolObservation
from planner.policy import DesiredSizes, PolicyState, decide

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
