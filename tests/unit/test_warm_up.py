"""The warm-up of an engine: it leaves nothing, and its errors are errors of the start."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.backends.sim.runner import SimRunner
from engine.core.engine_core import EngineCore
from engine.core.loan_host import EngineLimits
from engine.core_types import Chunk, SampleResult
from engine.errors import EngineStartError
from engine.messages.from_engine import CacheChanged, FromEngine
from engine.messages.to_engine import TakeSnapshot
from engine.process.engine_loop import Steps, WarmUp
from kvtransfer.local import LocalNetwork, LocalTransport
from support.checked_core import NOTHING_LEFT, CheckedCore, ToPeer, held
from support.core_engine import WIDE, generate, lend
from support.sim_model import LAYOUT, VOCAB

LIMITS = EngineLimits(WIDE, report_interval_s=0.0, min_report_interval_s=0.0)


class StepsAtOnce(Steps):
    """Steps that compute when they begin."""

    def __init__(self, core: EngineCore, execute: Callable[[Sequence[Chunk]], list[SampleResult]]) -> None:
        self._core, self._execute = core, execute
        self._results: list[tuple[list[Chunk], list[SampleResult]]] = []
        self.count = 0

    @property
    def ready(self) -> bool:
        return self._core.busy

    def begin(self) -> None:
        if not self._results and (batch := self._core.begin_step()):
            self.count += 1
            self._results.append((batch, self._execute(batch)))

    def end(self) -> bool:
        if not self._results:
            return False
        self._core.end_step(*self._results.pop())
        return True

    def stop(self) -> None: ...


def warmed(runner: SimRunner, execute: Callable[[Sequence[Chunk]], list[SampleResult]]) -> tuple[EngineCore, int]:
    """The core of the warm-up, and the number of its steps."""
    warming = WarmUp(runner.info, LAYOUT.block_tokens, runner.pool.num_blocks)
    core = EngineCore(runner, LocalTransport(LocalNetwork(), "warming"), LIMITS, warming.emit)
    steps = StepsAtOnce(core, execute)
    warming.run(core, steps, lambda: None)
    return core, steps.count


@pytest.mark.parametrize("num_blocks", [1, 2, 4, 5, 8, 12])
def test_a_prompt_and_a_decode_step_are_computed_in_any_pool(num_blocks: int) -> None:
    runner = SimRunner(LAYOUT, num_blocks, VOCAB)
    computed: list[tuple[bool, bool]] = []
    """Of each chunk, whether it decoded and whether it sampled."""

    def execute(batch: Sequence[Chunk]) -> list[SampleResult]:
        computed.extend((chunk.sequence.decoding, chunk.samples) for chunk in batch)
        return runner.execute(batch)

    core, _ = warmed(runner, execute)
    assert {(False, True), (True, True)} <= set(computed)
    assert held(core) == NOTHING_LEFT
    assert (core.cached.pool.num_held, core.cached.pool.num_filled) == (0, 0)


def test_a_context_of_two_tokens_is_warmed_up_without_a_request() -> None:
    runner = SimRunner(LAYOUT, 8, VOCAB)
    runner.info = replace(runner.info, max_context_tokens=2)
    assert warmed(runner, runner.execute)[1] == 0


work = st.lists(
    st.tuples(st.booleans(), st.integers(0, 3), st.integers(1, 20), st.integers(1, 4)), min_size=1, max_size=6
)


def said_by(runner: SimRunner, work: list[tuple[bool, int, int, int]]) -> list[FromEngine | ToPeer]:
    """All that a new core over `runner` says to this work, its reports and its cache included."""
    core = CheckedCore(runner, LocalTransport(LocalNetwork(), "serving"), LIMITS)
    core.core.kv_cache.cached.clock = lambda: 0.0
    for number, (is_loan, first_token, length, max_tokens) in enumerate(work):
        prompt = range(first_token, first_token + length)
        core.send(lend(f"{number}", prompt) if is_loan else generate(f"{number}", prompt, max_tokens))
        core.run()
    core.send(TakeSnapshot())
    core.run()
    return core.said


@given(work)
def test_an_engine_says_the_same_whether_it_was_warmed_up_or_not(work: list[tuple[bool, int, int, int]]) -> None:
    plain = said_by(SimRunner(LAYOUT, 8, VOCAB), work)
    runner = SimRunner(LAYOUT, 8, VOCAB)
    warmed(runner, runner.execute)
    after = said_by(runner, work)
    assert [_timeless(message) for message in after] == [_timeless(message) for message in plain]
    assert any(isinstance(message, CacheChanged) for message in after)


def _timeless(message: FromEngine | ToPeer) -> str:
    account = getattr(message, "account", None)
    if account is not None:
        account.times = dict.fromkeys(account.times, 0.0)
    return str(message)


def test_what_computing_raises_fails_the_start() -> None:
    def execute(batch: Sequence[Chunk]) -> list[SampleResult]:
        raise RuntimeError("no kernel image\nis available")

    with pytest.raises(EngineStartError, match="engine: cannot compute: RuntimeError: no kernel image is available"):
        warmed(SimRunner(LAYOUT, 8, VOCAB), execute)
