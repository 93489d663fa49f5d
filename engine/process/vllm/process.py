"""The engine process of a vLLM worker: `python -m cluster.launch engine.process.vllm.process FD`.

It runs in vLLM's own environment, where Tandem is installed without its dependencies.
`engine/process/engine_loop.py` has its loop. vLLM's batches overlap as in its own `step_with_batch_queue`: the next one
is scheduled and launched while the one before it computes. On a GPU the main thread launches Model Runner V2's batches,
and a second thread waits for the results. On a CPU a launch takes as long as the batch, so the second thread does it.
Batches of several ranks are sent to vLLM's worker processes, and the second thread waits for their results.

A rank of a data-parallel group launches exactly the steps that are granted to the group, with dummy batches where it
has no work (`lockstep.py`). Each launch waits for the other ranks', within vLLM.
"""

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from cluster.errors import StartError
from engine.backends.vllm.arguments import computes_at_launch
from engine.core.loan_host import EngineParts
from engine.errors import RankLost
from engine.messages.from_engine import FromEngine
from engine.model.model_dir import ModelDir
from engine.process.assembly import limits_of, open_network
from engine.process.data_parallel.step_group import StepGroup
from engine.process.engine_loop import OpenedEngine, Steps, WarmUp, run_engine, turn_of
from engine.process.engine_process import ComputeThread
from engine.process.front_link import FrontLink
from engine.process.ranks.worker_ranks import WorkerRanks
from engine.process.spec import EngineSpec
from engine.process.start_up import own_transport
from engine.process.vllm.start import StartedVllm, prepare_vllm, start_vllm, why_not_started
from engine.sampling.grammar_gate import GrammarGate
from kvcache.layout import Allocate, private_rows
from kvcache.store.kv_store import KvStore
from kvcache.store.local import open_stores
from loans.network import LoanNetwork, NoNetwork

if TYPE_CHECKING:
    from engine.backends.vllm.batch_runner import Batches

log = logging.getLogger(__name__)


def main() -> None:
    """Serve the front at the other end of the socket whose descriptor is the argument."""
    run_engine(_open, WorkerRanks)


class VllmSteps(Steps):
    """Steps of vLLM's scheduler, as many in flight as vLLM wants."""

    def __init__(
        self,
        core: Any,
        batches: Any,
        threads: Sequence[ComputeThread[Any]],
        depth: int,
        group: StepGroup | None = None,
    ) -> None:
        """Create it.

        `batches` are `Batches`, of which at most `depth` are in flight. `threads` are the one that batches use, and the
        one that computes fingerprints. Ranks of a `group` step together.
        """
        self._core, self._batches, self._depth, self._group = core, batches, depth, group
        self._thread, self._hashes = threads
        self._num_flying = 0
        """Number of batches in flight that are sampled or will be without waiting for another batch."""
        self._num_dummies = 0
        """Number of dummy batches among them."""
        self._deferred: Any = None
        """Batch that is launched, and is sampled once the tokens of the batch before it are known."""

    @property
    def _is_full(self) -> bool:
        return self._deferred is not None or self._num_flying >= self._depth

    @property
    def ready(self) -> bool:
        return bool(self._batches.has_ended or (not self._is_full and self._could_launch))

    @property
    def _could_launch(self) -> bool:
        if self._group is None:
            return bool(self._core.may_schedule)
        return self._group.may_launch and bool(self._core.may_schedule or self._may_idle)

    @property
    def _may_idle(self) -> bool:
        """Whether a dummy batch may be launched: what is in flight may be followed by a better one."""
        return self._num_flying == self._num_dummies

    def begin(self) -> None:
        if self._group is not None:
            self._begin_together(self._group)
            return
        while not self._is_full and self._begin_next() is not None:
            pass

    def _begin_next(self) -> Any:
        """Begin the core's next batch; return its SchedulerOutput, None when there is nothing to do."""
        if (output := self._core.schedule()) is None:
            return None
        if output.total_num_scheduled_tokens and output.pending_structured_output_tokens:
            self._batches.launch(output)
            self._deferred = output
        else:
            self._num_flying += 1
            self._batches.start(output, self._core.grammar_of(output))
        return output

    def _begin_together(self, group: StepGroup) -> None:
        """Launch granted steps of the group; the core schedules nothing for others.

        A batch without tokens is no step: vLLM runs no forward pass for it.
        """
        self._core.take_jobs()
        if self._core.may_schedule:
            group.ask()
        while group.may_launch and not self._is_full:
            output = self._begin_next()
            if output is None:
                if not self._may_idle:
                    return
                self._num_flying += 1
                self._num_dummies += 1
                self._batches.start_dummy()
            if output is None or output.total_num_scheduled_tokens:
                group.launched()

    def end(self) -> bool:
        while (hashed := self._hashes.take()) is not None:
            self._core.name(*hashed)
        if (computed := self._batches.take()) is None:
            return False
        self._num_flying -= 1
        if computed[0] is None:
            self._num_dummies -= 1
        else:
            self._core.end_step(*computed)
        if self._deferred is not None and not self._num_flying:
            deferred, self._deferred = self._deferred, None
            self._num_flying += 1
            self._batches.sample(deferred, self._core.deferred_grammar_of(deferred))
        return True

    def settle(self, turn: Callable[[], None]) -> None:
        """Wait for dummy batches in flight, which nothing else follows; `turn` waits until one may have ended."""
        while self._num_flying:
            if not self.end():
                turn()

    def stop(self) -> None:
        if self._group is not None:
            self._group.leave()
        self._thread.stop()
        self._hashes.stop()


def _open(spec: EngineSpec, front: FrontLink, ranks: WorkerRanks | None) -> OpenedEngine:
    prepare_vllm(spec.config)
    transport = own_transport(spec.config, spec.agent_name) if ranks is None else None
    group = StepGroup(config, spec.worker_id, front.wake) if (config := spec.config).data_parallel > 1 else None
    started, thread = _start(spec, front, ranks, group)
    from engine.backends.vllm.batch_runner import ComputedBatches, LaunchedBatches, SentBatches, mark_launched
    from engine.backends.vllm.core import VllmCore

    memory, layout = started.memory, started.memory.layout
    links, grid = (ranks.links, memory.grid) if ranks is not None else ((), None)
    allocate: Allocate = private_rows if ranks is None else ranks.memory.take
    hashes, depth = ComputeThread(lambda: None, front.wake), started.num_batches
    hashes_later = depth > 1 or ranks is not None  # the loop waits for no other process

    def core_of(emit: Callable[[FromEngine], None], network: LoanNetwork, stores: Sequence[KvStore]) -> Any:
        return VllmCore(
            EngineParts(transport, limits_of(spec, started.gpu), emit, front.wake, network, links, grid),
            started.engine,
            memory,
            started.block_pool,
            started.info,
            started.sampling,
            started.lora,
            stores,
            hashes.submit if hashes_later else None,
        )

    def steps_of(core: Any) -> VllmSteps:
        executor, samples = started.engine.model_executor, started.info.pooler is None
        batches: Batches
        if ranks is not None:
            batches = SentBatches(executor, thread, samples)
        elif started.is_native and not computes_at_launch():
            batches = LaunchedBatches(executor, thread, mark_launched if started.writes_drafts else None, samples)
        else:
            batches = ComputedBatches(executor, thread)
        return VllmSteps(core, batches, (thread, hashes), depth, group)

    num_blocks = memory.num_blocks - 1  # without vLLM's null block
    warming = WarmUp(started.info, layout.block_tokens, num_blocks, ModelDir.open(config.model).has_tokenizer)
    bare = core_of(warming.emit, NoNetwork(), ())
    steps, turn = steps_of(bare), turn_of(front, ranks)
    warm_up_s = warming.run(bare, steps, turn)
    steps.settle(turn)
    core = core_of(
        front.send,
        open_network(spec, front),
        open_stores(config, layout, layout.fingerprint(started.info.weights_fingerprint), allocate),
    )
    ready = core.start()._replace(gpu=started.gpu, warm_up_s=warm_up_s)
    return OpenedEngine(core, steps_of(core), ready, GrammarGate(None, front.wake), group=group)


def _start(
    spec: EngineSpec, front: FrontLink, ranks: WorkerRanks | None, group: StepGroup | None
) -> tuple[StartedVllm, ComputeThread[Any]]:
    """Start vLLM; return it, and the thread beside the loop, which on a CPU is the one that started it.

    Raises EngineStartError or RankLost.
    """
    make = partial(_make, spec, ranks, group)
    if ranks is not None or not computes_at_launch():
        return make(), ComputeThread(lambda: None, front.wake)
    thread = ComputeThread(make, front.wake)
    return thread.made(), thread


def _make(spec: EngineSpec, ranks: WorkerRanks | None, group: StepGroup | None) -> StartedVllm:
    try:
        return start_vllm(spec.config, spec.role, ranks, group)
    except (StartError, RankLost):
        raise
    except Exception as error:
        log.exception("vLLM did not start")
        of_rank = ranks.why_not_started() if ranks is not None else None
        raise of_rank or why_not_started(error) from error
