"""Sequences that vLLM schedules: requests, and the jobs of loans.

vLLM may schedule a step before the outcome of the one before it is known. A block is *full* once a step that has ended
wrote its last token: `num_computed_tokens` counts the steps in flight, and draft tokens, and is corrected when vLLM
processes a step's output. So blocks are named afterwards. Their bytes stay, although vLLM may have freed them by then:
it gives none of them to another owner before it is asked for the next step, by the same thread.

Requests of a vLLM engine that runs vLLM's pooling runner: it answers with vectors and samples nothing.

The pooler is vLLM's own, with its projection, activation and scaling. A vector that depends on all hidden states of a
prompt is made of one step, so such a prompt is neither cut into chunks nor begun after cached blocks.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from vllm.pooling_params import PoolingParams
from vllm.v1.core.kv_cache_utils import BlockHash
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.request import Request, RequestStatus

from engine.backends.vllm.kv.block_pool import GroupPlace
from engine.backends.vllm.kv.cache import VllmKVCache
from engine.backends.vllm.media.features import Media
from engine.backends.vllm.sampling.native_sampling import Sampling
from engine.core_types import EngineSequence, Pooler, RequestFailure, SampleResult
from engine.errors import EngineStartError
from engine.messages.to_engine import Generate
from kvcache.block_keys import block_keys

_numbers = count(1)
"""Ids of vLLM's requests. None is used twice in a process: vLLM keeps states of an id that it has not forgotten yet."""


@dataclass(slots=True, eq=False)
class Submitted:
    """One vLLM request, and the sequence it computes."""

    sequence: EngineSequence
    request: Any
    """vLLM's `Request`."""
    num_blocks: int
    """Blocks that the sequence was admitted with."""
    blocks: list[list[int]] = field(default_factory=list)
    """Blocks that vLLM gave it, by group, in order; 0 where it has none. Empty while it waits."""
    num_filled: list[int] = field(default_factory=list)
    """Leading `blocks` of each group that were looked at when a step filled them."""
    due: int = 0
    """Number of the ended step with which its next block may be full."""
    is_plain: bool = False
    """Whether its request has its first token and its pins, so that most of its tokens have nothing but an id."""

    @property
    def request_id(self) -> str:
        """Id of the vLLM request, never used twice."""
        return str(self.request.request_id)

    @property
    def num_computed(self) -> int:
        """Tokens computed by steps that have ended."""
        # below zero when a request was preempted while a step of it was in flight
        return max(0, int(self.request.num_computed_tokens - self.request.num_in_flight_tokens))

    @property
    def is_preempted(self) -> bool:
        return bool(self.request.status == RequestStatus.PREEMPTED)


@dataclass(frozen=True, slots=True)
class Full:
    """Blocks of a sequence that a step filled, of all groups."""

    submitted: Submitted
    end: int
    """Number of computed keys of the chain."""
    places: list[GroupPlace]


class Submissions:
    """Sequences in vLLM's scheduler.

    Where vLLM does not defer freeing, no sequence is removed from it while a step computes.
    """

    def __init__(
        self,
        scheduler: Any,
        kv_cache: VllmKVCache,
        sampling: Sampling,
        lora: Mapping[bytes, Any],
        media: Media,
        on_scheduled: Callable[[Submitted, int], None],
        unblock: Callable[[], None],
    ) -> None:
        """Create it.

        `lora` has vLLM's LoRARequest of each adapter. `on_scheduled` is called with the blocks found in the cache when
        vLLM starts to compute a sequence, `unblock` on any thread when it could schedule more than before.
        """
        self._scheduler = scheduler
        self._kv_cache = kv_cache
        self._sampling = sampling
        self._lora = lora
        self._media = media
        self._on_scheduled = on_scheduled
        self._unblock = unblock
        self._by_id: dict[str, Submitted] = {}
        self._of_sequence: dict[EngineSequence, Submitted] = {}
        self._to_abort: list[str] = []
        self._due: dict[int, dict[Submitted, None]] = {}
        """Sequences by the number of the ended step with which their next block may be full."""
        self._num_ended = 0
        """Number of steps that have ended."""
        self._preempted: list[Submitted] | None = []
        """Requests that vLLM has preempted; None: not looked at since it scheduled."""

    @property
    def of_requests(self) -> Iterable[Submitted]:
        return (each for each in self._by_id.values() if each.sequence.sampling is not None)

    @property
    def preempted(self) -> list[Submitted]:
        """Requests that wait to be computed again: only vLLM's scheduling preempts them, or lets them go on."""
        if self._preempted is None:
            self._preempted = [each for each in self.of_requests if each.is_preempted]
        return self._preempted

    def count_computed(self) -> None:
        """Set the requests' numbers of computed tokens, which steps set only where a block is full."""
        for submitted in self.of_requests:
            if submitted.blocks:
                submitted.sequence.num_computed = submitted.num_computed

    def __contains__(self, sequence: EngineSequence) -> bool:
        return sequence in self._of_sequence

    def holdings(self) -> list[list[int]]:
        """Return the block lists that vLLM holds, including those that it frees when a step in flight has ended."""
        manager = self._scheduler.kv_cache_manager
        held = [
            [block for blocks in manager.get_block_ids(request_id) for block in blocks if block]
            for request_id in self._scheduler.requests
        ]
        deferred = self._scheduler.deferred_frees
        return held + [[block.block_id for block in blocks if not block.is_null] for _, blocks in deferred]

    def get(self, request_id: str) -> Submitted | None:
        return self._by_id.get(request_id)

    def add(self, sequence: EngineSequence, num_blocks: int) -> None:
        """Let vLLM compute the sequence, which waits for the blobs of its items first; then this is called again.

        Raises ValueError for a blob that cannot be read.
        """
        if self._media.awaits(sequence, num_blocks):
            return
        request_id = str(next(_numbers))
        features = self._media.features(sequence, request_id)
        self._kv_cache.release_unfound(sequence)
        arguments = {
            "pooling_params": None,
            "arrival_time": float(sequence.arrival),
            "priority": -sequence.priority,
            "lora_request": self._lora[sequence.adapter] if sequence.adapter else None,
            "block_hasher": _hasher(sequence, self._kv_cache.groups.unit),
            "mm_features": features,
        }
        request = self._sampling.request(sequence, request_id, arguments, self._unblock)
        submitted = Submitted(sequence, request, num_blocks)
        self._by_id[request_id] = self._of_sequence[sequence] = submitted
        self._scheduler.add_request(request)

    def remove(self, sequence: EngineSequence) -> None:
        """End the vLLM request of a sequence that is over, if it has one.

        While a step computes that might write its blocks, vLLM defers freeing them, or the request ends after the step.
        """
        submitted = self._of_sequence.pop(sequence, None)
        self._media.forget(sequence, None if submitted is None else submitted.request_id)
        if submitted is None:
            return
        del self._by_id[submitted.request_id]
        self._preempted = None
        self._sampling.forget(submitted.request_id)
        self._to_abort.append(submitted.request_id)
        if not self._by_id:
            self._due.clear()
        if not self._kv_cache.in_step or self._scheduler.defer_block_free:
            self.abort_removed()

    def abort_removed(self) -> None:
        """Have vLLM end removed requests; those that it has ended itself are skipped by it."""
        if self._to_abort:
            removed, self._to_abort = self._to_abort, []
            self._scheduler.finish_requests(removed, RequestStatus.FINISHED_ABORTED)

    def num_lacking(self) -> int:
        """Return how many blocks the pool lacks for the tokens that vLLM's running and preempted requests have now.

        Without any, for the first request that waits: nobody else would make room for it.
        """
        scheduler = self._scheduler
        preempted = [each for each in scheduler.waiting if each.status == RequestStatus.PREEMPTED]
        lacking = 0
        for request in [*scheduler.running, *preempted]:
            num_tokens = request.num_tokens_with_spec + request.num_output_placeholders
            lacking += self._num_new_blocks(request, num_tokens + scheduler.num_lookahead_tokens)
        if not lacking and not scheduler.running and scheduler.waiting:
            first = scheduler.waiting.peek_request()
            lacking = self._num_new_blocks(first, first.num_tokens + scheduler.num_lookahead_tokens)
        return max(0, lacking - self._kv_cache.pool.num_unused)

    def _num_new_blocks(self, request: Any, num_tokens: int) -> int:
        """Return how many blocks a request needs beyond its own to have `num_tokens` computed."""
        submitted, unit = self._by_id.get(request.request_id), self._kv_cache.groups.unit
        if submitted is None:
            return 0
        widths = self._kv_cache.groups.widths
        blocks = submitted.blocks or [[] for _ in widths]
        return sum(
            max(0, -(-num_tokens // (width * unit)) - len(its)) for width, its in zip(widths, blocks, strict=True)
        )

    def after_schedule(self, output: SchedulerOutput) -> None:
        """Record which blocks vLLM gave to the sequences of a step, and lower their reservations by these."""
        width = self._kv_cache.layout.block_tokens
        self._preempted = None
        for new in output.scheduled_new_reqs:  # on V2 also those that resume after a preemption
            submitted = self._by_id[new.req_id]
            self._begin(submitted, new.block_ids)
            self._started(submitted, new.num_computed_tokens // width)
        cached = output.scheduled_cached_reqs
        for request_id, block_ids, computed in zip(
            cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True
        ):
            if block_ids is None:  # most steps of a stream take no block
                continue
            submitted = self._by_id[request_id]
            if request_id in cached.resumed_req_ids:
                self._begin(submitted, block_ids)
                self._started(submitted, computed // width)
            elif any(block_ids):
                for blocks, new_blocks in zip(submitted.blocks, block_ids, strict=True):
                    blocks += new_blocks
                self._lower(submitted)

    def filled(self, output: SchedulerOutput) -> list[Full]:
        """Return the blocks that the ended step filled; called after vLLM has processed its output.

        A step computes one token of most sequences, so each is looked at when that many steps have ended as its next
        block needs at least, and after a chunk of a prompt.
        """
        self._num_ended += 1
        counts, most = output.num_scheduled_tokens, 1 + self._scheduler.num_spec_tokens
        looked_at = [each for each in self._due.pop(self._num_ended, ()) if each.due == self._num_ended]
        if output.total_num_scheduled_tokens > len(counts):  # else every sequence has one token
            chunks = (self._by_id.get(request_id) for request_id, count in counts.items() if count > most)
            looked_at += [each for each in chunks if each is not None and each.due != self._num_ended]
        return [full for each in looked_at if each.sequence in self and (full := self._filled_of(each, most))]

    def _filled_of(self, submitted: Submitted, most: int) -> Full | None:
        """Return the blocks of a sequence that are full now, and look at it again when the next one may be.

        `most`: tokens of a sequence that a step computes, but for a chunk of a prompt.
        """
        groups, num_computed = self._kv_cache.groups, submitted.num_computed
        if submitted.sequence.sampling is not None:  # a loan's job has computed what is named, and no more
            submitted.sequence.num_computed = num_computed
        num_tokens = min(num_computed, submitted.request.num_tokens)
        end, full = num_tokens // groups.unit, None
        if any(end // width > known for width, known in zip(groups.widths, submitted.num_filled, strict=True)):
            full = Full(submitted, end, self._places(submitted, end))
        next_ends = ((1 + known) * width for width, known in zip(groups.widths, submitted.num_filled, strict=True))
        self._look_after(submitted, -(-(min(next_ends) * groups.unit - num_tokens) // most))
        return full

    def _look_after(self, submitted: Submitted, num_steps: int) -> None:
        """Look at a sequence's blocks once so many more steps have ended."""
        submitted.due = self._num_ended + num_steps
        self._due.setdefault(submitted.due, {})[submitted] = None

    def _places(self, submitted: Submitted, end: int) -> list[GroupPlace]:
        """Return the places of the blocks that were filled up to `end` keys, ordered by their ends.

        Of windows and states vLLM caches some: those that a boundary may need.
        """
        groups, keys = self._kv_cache.groups, submitted.request.block_hashes
        places = []
        for group, (width, blocks) in enumerate(zip(groups.widths, submitted.blocks, strict=True)):
            for at in range(submitted.num_filled[group], end // width):
                if number := blocks[at]:
                    block = groups.block(keys, group, at, end)
                    place = self._kv_cache.place(submitted.sequence.root, block, number)
                    if groups.is_chain or self._kv_cache.pool.is_cached(place):
                        places.append(place)
            submitted.num_filled[group] = max(submitted.num_filled[group], end // width)
        return places if groups.is_chain else sorted(places, key=lambda place: place.of)

    def _begin(self, submitted: Submitted, block_ids: Iterable[Iterable[int]]) -> None:
        """Record vLLM's first blocks of a sequence that starts or resumes; those computed by now have their names.

        vLLM finds blocks that a step in flight is to fill, or this one. So what the sequence found is looked at once
        this step has ended, the last of those in flight.
        """
        groups, sequence = self._kv_cache.groups, submitted.sequence
        # what a preempted request computes again lies in other blocks
        known = 0 if submitted.blocks and sequence.sampling is not None else sequence.num_computed // groups.unit
        submitted.blocks = [list(blocks) for blocks in block_ids]
        submitted.num_filled = [known // width for width in groups.widths]
        self._look_after(submitted, 1 + self._kv_cache.num_steps)

    def _started(self, submitted: Submitted, num_hits: int) -> None:
        self._kv_cache.release_held(submitted.sequence)
        self._lower(submitted)
        self._on_scheduled(submitted, num_hits)

    def _lower(self, submitted: Submitted) -> None:
        held = sum(map(len, submitted.blocks))
        self._kv_cache.lower_reservation(submitted.sequence, max(0, submitted.num_blocks - held))


def _hasher(sequence: EngineSequence, width: int) -> Callable[[Any], list[BlockHash]]:
    """Return the function that names the next full blocks of a vLLM request by Tandem's block keys."""

    def keys(request: Any) -> list[BlockHash]:
        known = request.block_hashes
        if request.num_tokens - len(known) * width < width:  # the common case
            return []
        given = [] if known else sequence.given_keys[: request.num_tokens // width]
        parent = given[-1] if given else known[-1] if known else sequence.root
        start = (len(given) + len(known)) * width
        keys = block_keys(parent, request.all_token_ids[start:], width, sequence.items, start)
        return [BlockHash(key) for key in (*given, *keys)]

    return keys


TASKS = ("embed", "classify")


class PoolingRequests(Sampling):
    """Way in which a vLLM engine makes vectors."""

    def __init__(self, engine: Any, eos_token_ids: frozenset[int]) -> None:
        """Create it for vLLM's EngineCore.

        Raises EngineStartError for a model that makes other vectors than one for each prompt.
        """
        config = engine.vllm_config.model_config
        task = config.get_pooling_task(engine.get_supported_tasks())
        if task not in TASKS:
            raise EngineStartError("model", f"its task in vLLM is {task}; {' and '.join(TASKS)} are served")
        self._params = PoolingParams(task=task)
        self._params.verify(config)
        self._params.skip_reading_prefix_cache = not config.is_prefix_caching_supported
        classifies = task == "classify"
        self.pooler = Pooler(
            pooling="last" if config.is_prefix_caching_supported else "mean",
            normalize=not classifies and bool(self._params.use_activation),
            dimensions=int(config.hf_config.num_labels if classifies else config.embedding_size),
            classifies=classifies,
        )

    def mismatch(self, message: Generate) -> RequestFailure | None:
        if message.sampling.pooling is not None or message.sampling.max_tokens == 0:
            return None
        return RequestFailure("model", "it runs on vLLM's pooling runner here, which answers with vectors only")

    def request(
        self, sequence: EngineSequence, request_id: str, arguments: dict[str, Any], wake: Callable[[], None]
    ) -> Request:
        fills = sequence.sampling is None or sequence.only_fills
        tokens = self.fill_tokens(sequence) if fills else list(sequence.token_ids)
        return Request(request_id, tokens, None, **arguments | {"pooling_params": self._params.clone()})

    def results(self, sequence: EngineSequence, request: Request, output: Any) -> Sequence[SampleResult]:
        return []
