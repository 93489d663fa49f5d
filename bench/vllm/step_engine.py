"""A vLLM engine whose worker notes when steps begin and end: `python -m cluster.launch bench.vllm.step_engine FD`.

It is `engine/process/vllm_process.py` with two messages more. One of them runs vLLM's own loop,
`EngineCore.step_with_batch_queue`, over the same EngineCore object, on the thread that computes Tandem's batches.
"""

import random
import time
from concurrent.futures import Future
from typing import Any, NamedTuple

from engine.process import vllm_process
from engine.process.engine_loop import OpenedEngine, run_engine
from engine.process.front_link import FrontLink
from engine.process.spec import EngineSpec
from engine.process.worker_ranks import WorkerRanks

FIRST_TOKEN = 5


class RunPlain(NamedTuple):
    """Run vLLM's own loop until new streams have ended, and answer Gaps."""

    streams: int
    prompt_tokens: int
    output_tokens: int
    vocabulary: int
    seed: int


class TakeGaps(NamedTuple):
    """Answer Gaps, and forget them."""

    streams: int
    """Least number of sequences in the steps whose gaps are noted from now on."""


class Gaps(NamedTuple):
    """Times from the end of a step to the start of the next one, in milliseconds."""

    milliseconds: list[float]


class StepTimes:
    """Gaps between the steps of a vLLM worker.

    A step begins with the worker's `execute_model` and ends when its `sample_tokens` returns. With asynchronous
    scheduling the result is made ready afterwards, in both loops.
    """

    def __init__(self, worker: Any) -> None:
        self.least = 1
        self._gaps: list[float] = []
        self._is_full = False
        self._ended_at: float | None = None
        """End of the last step, if it was full and none has begun since."""
        execute, sample = worker.execute_model, worker.sample_tokens

        def execute_model(output: Any) -> Any:
            began_at = time.perf_counter()
            self._is_full = len(output.num_scheduled_tokens) >= self.least
            if self._is_full and self._ended_at is not None:
                self._gaps.append(1e3 * (began_at - self._ended_at))
            self._ended_at = None
            return execute(output)

        def sample_tokens(grammar: Any) -> Any:
            sampled = sample(grammar)
            self._ended_at = time.perf_counter() if self._is_full else None
            return sampled

        worker.execute_model, worker.sample_tokens = execute_model, sample_tokens

    def take(self) -> Gaps:
        taken, self._gaps, self._ended_at = self._gaps, [], None
        return Gaps(taken)


def main() -> None:
    """Serve the front at the other end of the socket whose descriptor is the argument."""
    run_engine(_open)


def _open(spec: EngineSpec, front: FrontLink, ranks: WorkerRanks | None) -> OpenedEngine:
    # As on any CPU. Launched on the loop's thread, where a launch computes at once, a batch would keep all messages
    # waiting for the moment between two steps.
    vllm_process.computes_at_launch = lambda: True
    opened = vllm_process._open(spec, front, ranks)
    core: Any = opened.core
    steps: Any = opened.steps
    times, original = StepTimes(core._engine.model_executor.driver_worker), core.handle

    def handle(message: Any) -> None:
        if isinstance(message, RunPlain):
            times.least = message.streams
            ended: Future[None] = Future()
            steps._thread.submit(None, lambda: _run_plain(core._engine, message, ended))
            ended.result()
            front.send(times.take())
        elif isinstance(message, TakeGaps):
            times.least = message.streams
            front.send(times.take())
        else:
            original(message)

    core.handle = handle
    return opened


def _run_plain(engine: Any, asked: RunPlain, ended: "Future[None]") -> None:
    from vllm import SamplingParams
    from vllm.v1.request import Request

    try:
        drawn = random.Random(f"plain {asked.seed}")
        for number in range(asked.streams):
            prompt = drawn.choices(range(FIRST_TOKEN, asked.vocabulary), k=asked.prompt_tokens)
            params = SamplingParams(temperature=0, max_tokens=asked.output_tokens, ignore_eos=True, detokenize=False)
            name = f"plain-{asked.seed}-{number}"
            engine.add_request(Request(name, prompt, params, None, block_hasher=engine.request_block_hasher))
        while engine.scheduler.has_requests() or engine.batch_queue:
            _, has_executed = engine.step_with_batch_queue()
            engine.post_step(has_executed)
    except BaseException as error:
        ended.set_exception(error)
        raise
    ended.set_result(None)
