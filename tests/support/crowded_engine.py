"""An engine whose pool is too small for what it admits: its books and its bounds are checked at every step."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from engine.backends.sim.runner import SimRunner
from engine.core.engine_core import EngineCore, max_wait_steps
from engine.core.loan_host import EngineLimits
from engine.core_types import Chunk, FinishReason, SamplingParams, StepBudget
from engine.messages.from_engine import FromEngine, Rejected, Token
from engine.messages.to_engine import Cancel, Generate, ToEngine
from kvtransfer.local import LocalNetwork, LocalTransport
from loans.account import KvAccount
from loans.network import Lender
from support.checked_core import NOTHING_LEFT, FromPeer, M, PeerLoans, ToPeer, held, of_kinds, spread
from support.core_engine import WIDE
from support.hand_network import HandNetwork
from support.sim_model import LAYOUT, VOCAB, WIDTH, undisturbed


@dataclass
class Wait:
    """That a request waits for its next token, as seen from one step on."""

    since: int
    """The last step before it."""
    num_periods: int
    """How often at most somebody becomes, or goes on as, the oldest before that token."""
    longest_period: int = 0
    """What such a period may last, in steps: the most that the scheduler's bound came to meanwhile."""


@dataclass
class Stream:
    """One admitted request as its client sees it."""

    request: Generate
    arrival: int
    choice: int = 0
    waits: list[Wait] = field(default_factory=list)
    """For its next token, as seen from where it began and from wherever an older request was over."""
    tokens: list[int] = field(default_factory=list)
    accounts: list[KvAccount] = field(default_factory=list)
    over: bool = False

    @property
    def num_left(self) -> int:
        return self.request.sampling.max_tokens - len(self.tokens)

    @property
    def parts(self) -> bool:
        """Its request is of several choices."""
        return self.request.sampling.n > 1


def name_of(request_id: str, choice: int) -> str:
    return f"{request_id}#{choice}" if choice else request_id


class Engine:
    """An engine core that nobody lends to, unless a test does, held to its bound at every step."""

    def __init__(self, num_blocks: int = 8, budget: StepBudget = WIDE, reserve: int = 1, bounded: bool = True) -> None:
        self.said: list[FromEngine | Token | ToPeer] = []
        self.network = HandNetwork({}, "engine")
        self._peers = PeerLoans(self.said)
        self.budget = budget
        runner = SimRunner(LAYOUT, num_blocks, VOCAB)
        self.runner = runner
        limits = EngineLimits(budget, 4, reserve, report_interval_s=0.0, min_report_interval_s=0.0)
        transport = LocalTransport(LocalNetwork(), "engine")
        self.core = EngineCore(
            runner, transport, limits, lambda message: self.said.extend(spread(message)), network=self.network
        )
        self.core.start()
        self.streams: dict[str, Stream] = {}
        self.num_steps = 0
        self.rejected: list[Rejected] = []
        self.others: list[FromEngine | Token | ToPeer] = []
        self.served: list[str] = []
        """Of every token, whose it was."""
        self._bounded = bounded
        self._max_wait = max_wait_steps(budget, num_blocks, WIDTH)

    def ask(
        self,
        request_id: str,
        prompt: Sequence[int],
        max_tokens: int,
        priority: int = 0,
        lender: Lender | None = None,
        **sampling: Any,
    ) -> bool:
        """False when it was rejected."""
        params = SamplingParams(max_tokens, **sampling)
        request = Generate(request_id, tuple(prompt), (), params, "", priority, lender)
        num_rejected = len(self.rejected)
        self.send(request)
        if len(self.rejected) > num_rejected:
            return False
        for choice in range(params.n):
            name = name_of(request_id, choice)
            self.streams[name] = Stream(request, len(self.streams), choice)
            self._wait(self.streams[name])
        return True

    def send(self, *messages: ToEngine | FromPeer) -> None:
        for message in messages:
            if isinstance(message, FromPeer):
                self._peers.send(self.core, message)
                continue
            self.core.handle(message)
            if isinstance(message, Cancel) and message.request_id in self.streams:
                for stream in list(self.streams.values()):
                    if stream.request.request_id == message.request_id and message.choice in (None, stream.choice):
                        self._on_over(stream)
        self.check()

    def begin_step(self) -> list[Chunk]:
        batch = self.core.begin_step()
        self.check()
        assert sum(chunk.count for chunk in batch) <= self.budget.max_tokens
        prompts = [chunk for chunk in batch if not chunk.sequence.decoding]
        assert sum(chunk.count for chunk in prompts) <= self.budget.max_prefill_tokens
        runnable = self.core.runnable()
        period = sum(-(-sequence.num_remaining // self.budget.guaranteed_tokens) for sequence in runnable)
        assert period <= self._max_wait
        for stream in self.streams.values():
            for wait in stream.waits:
                wait.longest_period = max(wait.longest_period, period)
        return batch

    def end_step(self, batch: list[Chunk]) -> None:
        self.core.end_step(batch, self.runner.execute(batch))
        self.num_steps += 1
        self.check()
        for name, stream in self.streams.items() if self._bounded else ():
            for wait in stream.waits:
                waited, bound = self.num_steps - wait.since, wait.longest_period * wait.num_periods
                assert waited < max(bound, 1), f"{name} waits for {waited} steps, the bound is {bound}"

    def step(self) -> bool:
        batch = self.begin_step()
        if batch:
            self.end_step(batch)
        return bool(batch)

    def run(self, steps: int = 10_000) -> None:
        while steps and self.step():
            steps -= 1

    def check(self) -> None:
        """The books balance, and every token is the one that an undisturbed model gives, once."""
        assert self.core.audit().fault == ""
        for message in self.said:
            if isinstance(message, Rejected):
                self.rejected.append(message)
            elif isinstance(message, Token):
                self._on_token(message)
            else:
                self.others.append(message)
        self.said.clear()

    def block_counts(self) -> tuple[int, int, int, int, int]:
        """Blocks held, reserved and quarantined; requests; loans given."""
        return held(self.core)

    def receive(self, *kinds: type[M]) -> list[M]:
        heard = of_kinds(self.others, *kinds)
        self.others.clear()
        return heard

    def preempted(self) -> list[str]:
        return sorted(sequence.request_id for sequence in self.core.requests.running_set.preempted)

    def finish(self) -> None:
        self.run()
        self.check_finished()

    def check_finished(self) -> None:
        """Everybody who was admitted has all its tokens, or went away by itself."""
        for stream in self.streams.values():
            assert stream.over
            assert stream.tokens == self._expected(stream)[: len(stream.tokens)]
        assert self.block_counts() == NOTHING_LEFT

    def _on_token(self, message: Token) -> None:
        stream = self.streams[name_of(message.request_id, message.choice)]
        assert not stream.over
        stream.tokens.append(message.token_id)
        self.served.append(message.request_id)
        if message.account is not None:
            stream.accounts.append(message.account)
        assert (message.finish is None) == (stream.num_left > 0)
        if message.finish is not None:
            assert message.finish is FinishReason.LENGTH
            assert stream.tokens == self._expected(stream), "a wrong token"
            self._on_over(stream)
        else:
            stream.waits.clear()
            self._wait(stream)

    def _expected(self, stream: Stream) -> list[int]:
        return undisturbed(stream.request.prompt, stream.request.sampling.max_tokens, stream.choice)

    def _on_over(self, stream: Stream) -> None:
        stream.over = True
        stream.waits.clear()
        for other in self.streams.values():
            if not other.over and other.arrival > stream.arrival:
                self._wait(other)

    def _wait(self, stream: Stream) -> None:
        """Count a wait for the next token, bounded as `engine/core/running_set.py` states, with the scheduler's actual
        bound."""
        older = [s for s in self.streams.values() if not s.over and s.arrival < stream.arrival]
        since = self.num_steps + self.core.kv_cache.in_step  # a step under way does not count
        forks = len({s.request.request_id for s in [*older, stream] if s.parts})
        stream.waits.append(Wait(since, 1 + sum(1 + s.num_left for s in older) + forks))


def tokens(base: int, count: int) -> tuple[int, ...]:
    return tuple(range(base, base + count))
