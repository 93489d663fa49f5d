"""The loop of every engine process, whatever computes in it.

One loop on the main thread handles messages, collects results, starts the next steps and sends answers. It never waits
for a slow front (see `front_link.py`) and never for a step. The process ends with its front: by the closed socket,
or at once by the kernel when the front is killed. With several ranks the others are in processes of their own,
see `engine/process/ranks/ranks.py`.

The warm-up of an engine: what a first request needs is loaded, compiled and captured before the engine is ready.

It computes requests of nobody, in a core of its own over the same model and the same block memory. The core that serves
is made afterwards, so the warm-up leaves nothing in its cache, counters, rates and messages. It has neither tiers nor a
store, so no block leaves the pool.
"""

import logging
import os
import socket
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from cluster.errors import StartError
from cluster.logs import set_up
from cluster.process.memory import spare_the_started
from engine.core.loan_host import LoanHost
from engine.core_types import SamplingParams, StructuredOutput
from engine.errors import EngineStartError, RankLost
from engine.messages.from_engine import Failed, FromEngine, Ready, Rejected, StartFailed
from engine.messages.to_engine import Generate, ToEngine
from engine.model_runner import ModelInfo
from engine.process.assembly import IDLE_TURN_S
from engine.process.data_parallel.step_group import StepGroup
from engine.process.front_link import FrontLink, MessageSocket, receive_spec
from engine.process.ranks.ranks import Ranks, leave, serve, start_failure
from engine.process.spec import EngineSpec
from engine.process.start_up import become_child, prepare
from engine.sampling.grammar_gate import GrammarGate
from kvcache.block_keys import block_keys, root_key
from kvtransfer.errors import TransportUnavailable
from loans.network import Blocks, Lent, LoanGiven, Want

log = logging.getLogger(__name__)


class Steps(ABC):
    """Steps of an engine, computed beside its loop."""

    @property
    @abstractmethod
    def ready(self) -> bool:
        """Whether a step could begin or end now, so that the loop should not wait for messages."""

    @abstractmethod
    def begin(self) -> None:
        """Begin as many steps as may be in flight; do nothing when there is nothing to compute."""

    @abstractmethod
    def end(self) -> bool:
        """Process the results of steps that have ended; return whether there were any.

        Raises what computing raised.
        """

    @abstractmethod
    def stop(self) -> None:
        """Stop computing, after what is in flight if that ends soon."""


@dataclass(frozen=True, slots=True)
class OpenedEngine:
    """An engine that is ready to serve."""

    core: LoanHost
    steps: Steps
    ready: Ready
    grammars: GrammarGate
    group: StepGroup | None = None
    """Data-parallel group with which it steps."""


OtherRanks = TypeVar("OtherRanks", bound=Ranks)
OpenEngine = Callable[[EngineSpec, FrontLink, OtherRanks | None], OpenedEngine]
"""Function that loads a model and makes its engine.

Raises EngineStartError, TransportUnavailable or RankLost."""
OpenRanks = Callable[[EngineSpec, Callable[[], None]], OtherRanks]
"""Function open(spec, wake) that makes the ranks in other processes; `wake` is called when one is lost."""


def run_engine(open_engine: OpenEngine[OtherRanks], open_ranks: OpenRanks[OtherRanks] | None = None) -> None:
    """Serve the front at the other end of the socket whose descriptor is the program's argument.

    `open_ranks`: None for an engine that has no ranks in other processes.
    """
    become_child()
    link = MessageSocket(socket.socket(fileno=int(sys.argv[1])))
    spec = receive_spec(link)
    front = FrontLink(link)
    ranks: OtherRanks | None = None
    set_up(spec.role, f"{spec.worker_id}/engine", spec.config)
    try:
        spec.config.kind.check(spec.config, spec.role)
        if open_ranks is not None and spec.config.num_ranks > 1:
            ranks = open_ranks(spec, front.wake)
        prepare(spec.config if ranks is None else ranks.own_share(spec.config))
        engine = open_engine(spec, front, ranks)
    except (StartError, TransportUnavailable, RankLost) as error:
        front.send(StartFailed(str(error) if isinstance(error, StartError) else start_failure(error)))
        front.finish()
        if ranks is not None:
            ranks.close()
        os._exit(0)  # threads of a half-started engine may hang
    front.send(engine.ready)
    front.flush()
    if engine.group is not None:
        engine.group.serves()
    spare_the_started()
    serve(partial(_loop, engine, front, ranks), ranks is not None or engine.group is not None)
    engine.steps.stop()
    engine.core.close()
    leave(ranks)


def _loop(engine: OpenedEngine, front: FrontLink, ranks: Ranks | None) -> None:
    core, steps, group = engine.core, engine.steps, engine.group
    while True:
        if ranks is not None:
            ranks.check()
        for message in front.listen(0.0 if steps.ready else IDLE_TURN_S):
            if all(part is None or part.passes(message) for part in (engine.grammars, group)):
                core.handle(message)
        for news in group.answers() if group is not None else ():
            front.send(news)
        for released in engine.grammars.released():
            core.handle(released)
        core.handle_posted()
        if not steps.end():  # its messages wait until the next step has begun
            front.flush()  # a caller waits for an answer
        core.flush()  # a borrower reads these blocks while the next step computes
        steps.begin()
        if not any(part is not None and part.silent for part in (ranks, group)):
            core.report()
        core.flush()
        front.flush()


FULL_BLOCKS = 4
"""Full blocks of each prompt."""
TAIL_TOKENS = 3
"""Tokens of each prompt after its full blocks."""
OUTPUT_TOKENS = 2
"""One by the prompt's step, one by a decode step."""
SALT = "tandem warm-up"
"""Cache salt of all of it; another one would do, since no name outlives the warm-up."""
GRAMMAR = StructuredOutput("regex", ("[a-z]+",), SALT)
TURN_S = 0.05
"""Longest pause between looks at the ranks, in seconds."""


class _WarmLoan(LoanGiven):
    """The loan that the warm-up computes."""

    has_blocks = False
    """Whether it is open and has announced blocks."""

    def send(self, message: Lent) -> None:
        self.has_blocks = self.has_blocks or isinstance(message, Blocks)

    def refuse(self, reason: str) -> None:
        log.info("the loan of the warm-up did not fit: %s", reason)


class WarmUp:
    """The warm-up of one engine."""

    def __init__(self, info: ModelInfo, block_tokens: int, num_blocks: int, grammars: bool = False) -> None:
        """Create it for a pool of `num_blocks`; short contexts and small pools get shorter prompts.

        `grammars`: whether requests may have one.
        """
        most = min(info.max_context_tokens, num_blocks * block_tokens) - OUTPUT_TOKENS
        self._num_tokens = min(FULL_BLOCKS * block_tokens + TAIL_TOKENS, most)
        self._block_tokens = block_tokens
        self._vocab_size = info.vocab_size
        self._grammars = grammars
        self._pooler = info.pooler
        self._messages: list[FromEngine] = []
        self._loan = _WarmLoan()

    def emit(self, message: FromEngine) -> None:
        """Take a message of the core that is warmed up."""
        self._messages.append(message)

    def run(self, core: LoanHost, steps: Steps, turn: Callable[[], None]) -> float:
        """Compute a loan and several requests; return the seconds that it took.

        `core` emits to `emit`, and is thrown away afterwards. `turn` waits until there may be more to do, and raises
        RankLost. Raises EngineStartError for an error of the engine.
        """
        began_at = time.monotonic()
        try:
            for messages in self._work(core.model_fingerprint):
                self._compute(core, steps, turn, messages)
        except (StartError, RankLost):
            raise
        except Exception as error:
            log.exception("the warm-up failed")
            cause = " ".join(f"{type(error).__name__}: {error}".split())
            raise EngineStartError("engine", f"cannot compute: {cause}") from error
        core.drop_cache()
        return time.monotonic() - began_at

    def _work(self, model_fingerprint: bytes) -> list[list[ToEngine | Want]]:
        """Return messages by turn: those of one turn are computed beside each other."""
        if self._num_tokens < 1:
            return []
        work: list[list[ToEngine | Want]] = []
        if self._num_tokens >= self._block_tokens:
            work.append([self._want(self._prompt(0), model_fingerprint)])
        if self._pooler is not None:
            pooled = SamplingParams(1, pooling=self._pooler.pooling)
            return [*work, [self._request("pooled", 0, pooled)], [self._request("beside", 1, pooled)]]
        greedy = SamplingParams(OUTPUT_TOKENS, temperature=0.0, ignore_eos=True)
        drawn = SamplingParams(OUTPUT_TOKENS, temperature=0.8, seed=1, ignore_eos=True)
        cut = drawn._replace(top_p=0.9, top_k=20)
        work.append([self._request("greedy", 0, greedy)])  # finds the blocks of the loan
        work.append([self._request("drawn", 1, drawn)])
        work.append([self._request("beside", 2, greedy), self._request("each other", 3, cut)])
        if self._grammars:
            work.append([self._request("structured", 4, drawn._replace(structured=GRAMMAR))])
        return work

    def _prompt(self, number: int) -> tuple[int, ...]:
        return tuple((1 + number + 7 * place) % self._vocab_size for place in range(self._num_tokens))

    def _request(self, name: str, number: int, sampling: SamplingParams) -> Generate:
        return Generate(name, self._prompt(number), (), sampling, SALT, 0, lender=None)

    def _want(self, prompt: Sequence[int], model_fingerprint: bytes) -> Want:
        root = root_key(model_fingerprint, SALT)
        keys = block_keys(root, prompt, self._block_tokens)
        return Want("warm-up", keys, 0, may_compute=True, token_ids=prompt, root=root)

    def _compute(
        self, core: LoanHost, steps: Steps, turn: Callable[[], None], messages: Sequence[ToEngine | Want]
    ) -> None:
        for message in messages:
            if isinstance(message, Want):
                core.lend(self._loan, message)
            else:
                core.handle(message)
        while not core.idle:
            core.handle_posted()
            if not steps.end() and not steps.ready:
                turn()
            steps.begin()
            pending, self._messages = self._messages, []
            for event in pending:
                self._process(event)
            if self._loan.has_blocks and not core.computes_loans:
                core.end_loan(self._loan)
                self._loan.has_blocks = False

    def _process(self, message: FromEngine) -> None:
        match message:
            case Failed(name, failure):
                log.warning("request %r of the warm-up failed: %s: %s", name, failure.field, failure.reason)
            case Rejected(name, reason):
                log.info("%r of the warm-up did not fit: %s", name, reason)


def turn_of(front: FrontLink, ranks: Ranks | None) -> Callable[[], None]:
    """Return the function that waits for more to do in an engine process."""

    def turn() -> None:
        if ranks is not None:
            ranks.check()
        front.pause(TURN_S)

    return turn
