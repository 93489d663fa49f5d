"""Time between steps: Tandem's loop beside vLLM's own, over one EngineCore, on Model Runner V2.

Triton's interpreter runs V2 and asynchronous scheduling on a CPU (tests/support/vllm_v2). Tandem's loop gives a loan
and takes one all the while; a second engine is the other end of both. This process is the front of both engines.
"""

import os
import random
import selectors
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from itertools import count
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from rich.console import Console

from bench.report import Bar, of_rounds, percentile
from bench.vllm.compared import BLOCK, VLLM
from bench.vllm.step_engine import FIRST_TOKEN, Gaps, RunPlain, TakeGaps
from cluster.roles import Role
from engine.config import WorkerConfig
from engine.core_types import SamplingParams
from engine.messages.from_engine import (
    CloseLoan,
    Failed,
    LendReady,
    LendRefused,
    LendStarting,
    OpenLoan,
    Ready,
    Rejected,
    ReleaseLoan,
    StartFailed,
    Token,
)
from engine.messages.to_engine import (
    Generate,
    Lend,
    LendClosed,
    LendReleased,
    LoanBlocks,
    LoanFailed,
    LoanStarted,
)
from engine.process.message_socket import MessageSocket
from engine.process.spec import EngineSpec
from tandem.storyteller import STORYTELLER

MODEL = STORYTELLER
V2 = Path("tests/support/vllm_v2/python").absolute()
STREAMS, PROMPT, OUTPUT = 8, 64, 48
LOAN_PROMPT = 321
"""Tokens of a lent prompt: ten blocks and one token."""
ROUNDS = 5
LIMIT = 1.2
PATIENCE_S = 180.0


class Engine:
    """An engine process, as its front sees it."""

    def __init__(self, name: str, python: Path, program: str, role: Role, core: int, **settings: Any) -> None:
        options = {"enforce_eager": True, "max_model_len": 1024, "max_num_seqs": 16}
        common = {"model": MODEL, "engine": "vllm", "device": "cpu", "dtype": "float32", "block_tokens": BLOCK}
        common |= {"kv_memory_mib": 64, "max_prefill_tokens": 64, "threads": 1, "vllm_options": options}
        spec = EngineSpec(WorkerConfig.parse(common | settings), role, f"{name}-{os.getpid()}", name)
        own, other = socket.socketpair()
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed by `stop`
        with other:
            self._process = subprocess.Popen(
                [str(python), "-m", "cluster.launch", program, str(other.fileno())],
                pass_fds=[other.fileno()],
                stdin=subprocess.DEVNULL,
                stderr=self._log,
                # only the threads that compute are bound: the loop beside them may use any core
                env=os.environ | {"PYTHONPATH": os.getcwd(), "VLLM_CPU_OMP_THREADS_BIND": str(core)},
            )
        self.link = MessageSocket(own)
        self.name = name
        self.ready: Ready
        self.link.send(spec)

    def send(self, *messages: Any) -> None:
        self.link.send(messages)

    def last_lines(self) -> str:
        self._log.seek(0)
        return "\n".join(self._log.read().splitlines()[-15:])

    def stop(self) -> None:
        self._process.kill()
        self._process.wait()
        self._log.close()


class TwoEngines:
    """The measured engine and its peer, each of which lends to the other; a context manager."""

    def __init__(self, cores: Sequence[int]) -> None:
        self._numbers = count()
        self.running: dict[str, Generate] = {}
        """Requests that have not ended, by id."""
        self.gaps: list[float] | None = None
        """Gaps of the last answer."""
        self.measured = Engine("measured", V2, "bench.vllm.step_engine", "decode", cores[0])
        self.peer = Engine(
            "peer", VLLM.absolute() / "bin" / "python", "engine.process.vllm_process", "prefill", cores[-1]
        )
        self._engines = {self.measured.link.fileno(): self.measured, self.peer.link.fileno(): self.peer}
        self.num_loans = {self.measured.name: 0, self.peer.name: 0}
        """Verified loans by borrower."""

    def __enter__(self) -> Self:
        self._selector = selectors.DefaultSelector()
        for descriptor in self._engines:
            self._selector.register(descriptor, selectors.EVENT_READ)
        try:
            self.until(lambda: all(hasattr(engine, "ready") for engine in self._engines.values()))
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop()

    def _stop(self) -> None:
        for engine in self._engines.values():
            engine.stop()
        self._selector.close()

    def ask(self, engine: Engine, num_prompt: int, max_tokens: int, borrows: bool = False) -> str:
        """Send a greedy request with a new prompt; return its id."""
        number = next(self._numbers)
        drawn = random.Random(number)
        prompt = drawn.choices(range(FIRST_TOKEN, engine.ready.vocab_size), k=num_prompt)
        sampling = SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True)
        request = Generate(f"r{number}", prompt, (), sampling, "", 0, borrow=borrows)
        self.running[request.request_id] = request
        engine.send(request)
        return request.request_id

    def until(self, condition: Callable[[], bool]) -> None:
        """Carry messages until the condition holds. Raises RuntimeError when an engine fails or is silent too long."""
        give_up_at = time.monotonic() + PATIENCE_S
        while not condition():
            if time.monotonic() > give_up_at:
                raise RuntimeError(f"no progress within {PATIENCE_S:g} s")
            for key, _ in self._selector.select(0.01):
                engine = self._engines[key.fd]
                try:
                    batches = engine.link.receive()
                except EOFError:
                    raise RuntimeError(f"engine {engine.name} ended: {engine.last_lines()}") from None
                for message in (each for batch in batches for each in batch):
                    self._carry(engine, message)
            for engine in self._engines.values():
                engine.link.flush()

    def take_gaps(self, message: RunPlain | TakeGaps) -> list[float]:
        """Return the measured engine's gaps."""
        self.gaps = None
        self.measured.send(message)
        self.until(lambda: self.gaps is not None)
        assert self.gaps is not None
        return self.gaps

    def _carry(self, engine: Engine, message: Any) -> None:
        """Process a message of an engine; those about loans go to the other engine."""
        other = self.peer if engine is self.measured else self.measured
        match message:
            case Ready():
                engine.ready = message
            case Gaps(milliseconds):
                self.gaps = milliseconds
            case Token(request_id):
                if message.account is not None and message.account.moved_blocks:
                    self.num_loans[engine.name] += 1
                if message.finish is not None:
                    del self.running[request_id]
            case OpenLoan(request_id, first, end, may_compute):
                tokens = self.running[request_id].prompt[: end * BLOCK]
                other.send(Lend(request_id, tokens, first, "", may_compute, 0))
            case ReleaseLoan(request_id, first, num_blocks):
                other.send(LendReleased(request_id, first, num_blocks))
            case CloseLoan(request_id):
                other.send(LendClosed(request_id))
            case LendStarting(loan_id, end, cached_end, queued_ms):
                other.send(LoanStarted(loan_id, engine.ready.endpoint, end, cached_end, queued_ms))
            case LendReady(loan_id, first, block_ids, fingerprints, fetched):
                other.send(LoanBlocks(loan_id, first, block_ids, fingerprints, fetched))
            case LendRefused(loan_id, reason):
                other.send(LoanFailed(loan_id, reason))
            case StartFailed() | Rejected() | Failed():
                raise RuntimeError(f"engine {engine.name}: {message}")


def measure_steps(cores: Sequence[int], console: Console) -> dict[str, Any]:
    """Measure both loops in turns."""
    sides: dict[str, list[list[float]]] = {"vllm": [], "tandem": []}
    with TwoEngines(cores) as engines:
        for number in range(ROUNDS + 1):
            plain = engines.take_gaps(RunPlain(STREAMS, PROMPT, OUTPUT, engines.measured.ready.vocab_size, number))
            tandem = _run_tandem(engines)
            medians = [round(percentile(gaps, 0.5), 3) for gaps in (plain, tandem)]
            console.print(f"round {number}, median ms between steps: vLLM's loop, Tandem's:", medians)
            if number:  # the first round compiles
                sides["vllm"].append(plain)
                sides["tandem"].append(tandem)
        loans = dict(engines.num_loans)
    figures: dict[str, Any] = {
        f"{name}_ms": {side: of_rounds(rounds, share) for side, rounds in sides.items()}
        for name, share in (("median", 0.5), ("p90", 0.9))
    }
    figures |= {"gaps": {side: sum(map(len, rounds)) for side, rounds in sides.items()}, "loans by borrower": loans}
    console.print("between steps:", figures)
    return figures


def _run_tandem(engines: TwoEngines) -> list[float]:
    """Return the gaps of Tandem's loop while streams run, and a loan is given and one taken all the while."""
    measured, peer = engines.measured, engines.peer
    engines.take_gaps(TakeGaps(STREAMS))
    streams = {engines.ask(measured, PROMPT, OUTPUT) for _ in range(STREAMS)}
    loans = {borrower.name: engines.ask(borrower, LOAN_PROMPT, 1, borrows=True) for borrower in (measured, peer)}
    while not streams.isdisjoint(engines.running):
        for borrower in (measured, peer):
            if loans[borrower.name] not in engines.running:
                loans[borrower.name] = engines.ask(borrower, LOAN_PROMPT, 1, borrows=True)
        engines.until(lambda: streams.isdisjoint(engines.running) or not engines.running.keys() >= set(loans.values()))
    gaps = engines.take_gaps(TakeGaps(STREAMS))
    engines.until(lambda: not engines.running)
    return gaps


def step_bars(figures: dict[str, Any]) -> list[Bar]:
    """Return the bars."""
    what = "8 streams, V2, two loans meanwhile: {} time between steps / vLLM's own loop"
    return [
        Bar(what.format(name), figures[f"{name}_ms"]["tandem"] / figures[f"{name}_ms"]["vllm"], LIMIT)
        for name in ("median", "p90")
    ]


if __name__ == "__main__":
    print(step_bars(measure_steps(sorted(os.sched_getaffinity(0)), Console())))
