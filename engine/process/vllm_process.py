"""The engine process of a vLLM worker: `python -m cluster.launch engine.process.vllm_process FD`.

It runs in vLLM's own environment, where Tandem is installed without its dependencies.
`engine/process/engine_loop.py` has its loop. vLLM's batches overlap as in its own `step_with_batch_queue`: the next one
is scheduled and launched while the one before it computes. On a GPU the main thread launches Model Runner V2's batches,
and a second thread waits for the results. On a CPU a launch takes as long as the batch, so the second thread does it.
Batches of several ranks are sent to vLLM's worker processes, and the second thread waits for their results.
"""

import logging
from collections.abc import Callable
from collections.abc import Sequence as Seq
from functools import partial
from typing import TYPE_CHECKING, Any

from engine.core.loan_host import EngineParts
from engine.errors import EngineStartError, RankLost
from engine.kv.rows import Allocate, private_rows
from engine.kv.store.opening import open_store
from engine.kv.store.shared_store import SharedStore
from engine.lending.fast_path import FastPathLink
from engine.messages.from_engine import FromEngine
from engine.model.model_dir import ModelDir
from engine.process.assembly import limits_of
from engine.process.compute_thread import ComputeThread
from engine.process.engine_loop import OpenedEngine, Steps, run_engine
from engine.process.fast_path_socket import open_fast_path_socket
from engine.process.front_link import FrontLink
from engine.process.spec import EngineSpec
from engine.process.start_up import own_transport
from engine.process.vllm_start import StartedVllm, computes_at_launch, prepare_vllm, start_vllm, why_not_started
from engine.process.warm_up import WarmUp, turn_of
from engine.process.worker_ranks import WorkerRanks
from engine.sampling.grammar_gate import GrammarGate

if TYPE_CHECKING:
    from engine.backends.vllm.batch_runner import Batches

log = logging.getLogger(__name__)


def main() -> None:
    """Serve the front at the other end of the socket whose descriptor is the argument."""
    run_engine(_open, WorkerRanks)


class VllmSteps(Steps):
    """Steps of vLLM's scheduler, as many in flight as vLLM wants."""

    def __init__(self, core: Any, batches: Any, threads: Seq[ComputeThread[Any]], depth: int) -> None:
        """Create it.

        `batches` are `Batches`, of which at most `depth` are in flight. `threads` are the one that batches use, and the
        one that computes fingerprints.
        """
        self._core, self._batches, self._depth = core, batches, depth
        self._thread, self._hashes = threads
        self._num_flying = 0
        """Number of batches in flight that are sampled or will be without waiting for another batch."""
        self._deferred: Any = None
        """Batch that is launched, and is sampled once the tokens of the batch before it are known."""

    @property
    def _is_full(self) -> bool:
        return self._deferred is not None or self._num_flying >= self._depth

    @property
    def ready(self) -> bool:
        return bool(self._batches.has_ended or (not self._is_full and self._core.may_schedule))

    def begin(self) -> None:
        while not self._is_full and (output := self._core.schedule()) is not None:
            if output.total_num_scheduled_tokens and output.pending_structured_output_tokens:
                self._batches.launch(output)
                self._deferred = output
            else:
                self._num_flying += 1
                self._batches.start(output, self._core.grammar_of(output))

    def end(self) -> bool:
        while (hashed := self._hashes.take()) is not None:
            self._core.name(*hashed)
        if (computed := self._batches.take()) is None:
            return False
        self._num_flying -= 1
        self._core.end_step(*computed)
        if self._deferred is not None and not self._num_flying:
            deferred, self._deferred = self._deferred, None
            self._num_flying += 1
            self._batches.sample(deferred, self._core.deferred_grammar_of(deferred))
        return True

    def stop(self) -> None:
        self._thread.stop()
        self._hashes.stop()


def _open(spec: EngineSpec, front: FrontLink, ranks: WorkerRanks | None) -> OpenedEngine:
    prepare_vllm(spec.config)
    transport = own_transport(spec.config, spec.agent_name) if ranks is None else None
    started, thread = _start(spec, front, ranks)
    from engine.backends.vllm.batch_runner import ComputedBatches, LaunchedBatches, SentBatches, mark_launched
    from engine.backends.vllm.core import VllmCore

    config, memory, layout = spec.config, started.memory, started.memory.layout
    links, grid = (ranks.links, memory.grid) if ranks is not None else ((), None)
    allocate: Allocate = private_rows if ranks is None else ranks.memory.take
    hashes, depth = ComputeThread(lambda: None, front.wake), started.num_batches
    hashes_later = depth > 1 or ranks is not None  # the loop waits for no other process

    def core_of(emit: Callable[[FromEngine], None], fast_path: FastPathLink | None, store: SharedStore | None) -> Any:
        return VllmCore(
            EngineParts(transport, limits_of(spec, started.gpu), emit, front.wake, fast_path, links, grid),
            started.engine,
            memory,
            started.block_pool,
            started.info,
            started.sampling,
            started.lora,
            store,
            hashes.submit if hashes_later else None,
        )

    def steps_of(core: Any) -> Steps:
        executor = started.engine.model_executor
        batches: Batches
        if ranks is not None:
            batches = SentBatches(executor, thread)
        elif started.is_native and not computes_at_launch():
            batches = LaunchedBatches(executor, thread, mark_launched if started.writes_drafts else None)
        else:
            batches = ComputedBatches(executor, thread)
        return VllmSteps(core, batches, (thread, hashes), depth)

    num_blocks = memory.num_blocks - 1  # without vLLM's null block
    warming = WarmUp(started.info, layout.block_tokens, num_blocks, ModelDir.open(config.model).has_tokenizer)
    bare = core_of(warming.emit, None, None)
    warm_up_s = warming.run(bare, steps_of(bare), turn_of(front, ranks))
    if (fast_path := open_fast_path_socket()) is not None:
        front.watch(fast_path.fileno())
    core = core_of(
        front.send,
        fast_path,
        open_store(config, layout, layout.fingerprint(started.info.weights_fingerprint), allocate),
    )
    ready = core.start()._replace(gpu=started.gpu, warm_up_s=warm_up_s)
    return OpenedEngine(core, steps_of(core), ready, GrammarGate(None, front.wake))


def _start(spec: EngineSpec, front: FrontLink, ranks: WorkerRanks | None) -> tuple[StartedVllm, ComputeThread[Any]]:
    """Start vLLM; return it, and the thread beside the loop, which on a CPU is the one that started it.

    Raises EngineStartError or RankLost.
    """
    make = partial(_make, spec, ranks)
    if ranks is not None or not computes_at_launch():
        return make(), ComputeThread(lambda: None, front.wake)
    thread = ComputeThread(make, front.wake)
    return thread.made(), thread


def _make(spec: EngineSpec, ranks: WorkerRanks | None) -> StartedVllm:
    try:
        return start_vllm(spec.config, spec.role, ranks)
    except (EngineStartError, RankLost):
        raise
    except Exception as error:
        log.exception("vLLM did not start")
        of_rank = ranks.why_not_started() if ranks is not None else None
        raise of_rank or why_not_started(error) from error
