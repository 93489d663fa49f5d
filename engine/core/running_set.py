"""Running and preempted sequences of requests, and the policy by which they are preempted.

A *running* sequence may be computed and holds blocks for all its computed tokens. A *preempted* one holds none and
waits. A borrowing one holds blocks and is neither: it is added by `run` when its loan is over. A running sequence with
nothing to compute is about to be forked (`engine/sampling/parallel_sampling.py`).

The policy is pure. A request is admitted with blocks for its prompt and some of its output, so it may need more later.
When none is available, requests are preempted: they give all blocks back and wait to be computed again. The bound on
that wait rests on the oldest request, the first arrival among those that are not borrowing. It is never preempted, and
if it was preempted before it became the oldest, it restarts at once, at the cost of others. So it gets each of its
tokens within the scheduler's `max_wait_steps`, and when it is over the next one is the oldest. A request gets its first
token, and each next one, within

    max_wait_steps * (1 + sum over those that arrived before it of (1 + tokens they may still sample))   steps

after it was admitted (or its loan was over), or after the previous token, or from any step between. Later arrivals do
not count, whatever their priority. The inner 1 is for a borrowing request: when its loan is over it becomes the oldest,
and the previous oldest may have waited in vain. Each choice of a request is a sequence of its own here, in order; its
fork (`engine/sampling/parallel_sampling.py`) counts as one more token of the first.

Blocks held by loans given, by borrowing requests and by quarantined reads are not taken back. They return by
themselves, since no loan starts that could wait for this engine in turn. Steps in which they keep the oldest from its
blocks do not count in the bound.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from engine.core_types import Chunk, EngineSequence
from kvcache.block_keys import BlockKey
from kvcache.kv_cache_manager import KVCacheManager


def oldest_of(sequences: Iterable[EngineSequence]) -> EngineSequence | None:
    """Return the sequence that is never preempted."""
    return min(sequences, key=lambda sequence: sequence.arrival, default=None)


def next_victim(running: Iterable[EngineSequence], oldest: EngineSequence | None) -> EngineSequence | None:
    """Return the next sequence to preempt: lowest priority, then youngest.

    None when no candidate is left.
    """
    victims = [sequence for sequence in running if sequence is not oldest]
    return min(victims, key=lambda sequence: (sequence.priority, -sequence.arrival), default=None)


def restart_order(waiting: Iterable[EngineSequence], oldest: EngineSequence | None) -> list[EngineSequence]:
    """Return the order of restarts: the oldest first, then by priority and arrival.

    One that does not fit blocks those behind it.
    """
    return sorted(waiting, key=lambda sequence: (sequence is not oldest, -sequence.priority, sequence.arrival))


def admits(priority: int, waiting: Iterable[EngineSequence], oldest: EngineSequence | None) -> bool:
    """Return whether a new request may start before the waiting ones.

    It may when all of those have lower priority and the oldest is not among them.
    """
    return all(sequence.priority < priority and sequence is not oldest for sequence in waiting)


@dataclass(frozen=True, slots=True)
class _PreemptedState:
    """State kept for a preempted sequence until it restarts."""

    num_computed: int
    keys: list[BlockKey]
    """Keys of its full blocks, which may still be cached when it restarts."""


class RunningSet:
    """Running and preempted sequences of requests.

    Loans are never among them, since their blocks are never taken.
    """

    def __init__(
        self,
        kv_cache: KVCacheManager,
        reserve_output_tokens: int,
        next_turn: Callable[[], int],
        copy_block: Callable[[int, int], None],
    ) -> None:
        """Create an empty set.

        `reserve_output_tokens`: output tokens for which a starting sequence reserves blocks, unless its request says
        how many are expected.
        """
        self._kv_cache = kv_cache
        self._copy_block = copy_block
        self._reserve_output_tokens = reserve_output_tokens
        self._next_turn = next_turn
        self._running: dict[EngineSequence, None] = {}
        self._preempted: dict[EngineSequence, _PreemptedState] = {}
        self._stalled: EngineSequence | None = None
        """The oldest sequence when it lacks a block whose holders cannot be preempted. Valid for one step."""
        self.num_preemptions = 0

    @property
    def running(self) -> list[EngineSequence]:
        """Sequences that may be computed."""
        return [s for s in self._running if s is not self._stalled and s.num_remaining]

    def __contains__(self, sequence: EngineSequence) -> bool:
        """Return whether a sequence has its blocks and may be computed."""
        return sequence in self._running

    @property
    def forkable(self) -> list[EngineSequence]:
        """Sequences that have computed all tokens their siblings share."""
        return [s for s in self._running if s.siblings and not s.num_remaining and not s.hedged]

    @property
    def _preemptible(self) -> list[EngineSequence]:
        """Sequences whose blocks may be taken: transfers may still write into those of a hedged one."""
        return [sequence for sequence in self._running if not sequence.hedged]

    @property
    def preempted(self) -> list[EngineSequence]:
        """Sequences that wait to be computed again."""
        return list(self._preempted)

    @property
    def short(self) -> bool:
        """Whether any sequence is waiting for blocks."""
        return bool(self._preempted) or self._stalled is not None

    def admit(self, sequence: EngineSequence, keys: Sequence[BlockKey]) -> bool:
        """Give a new sequence the cached blocks of `keys` and reserve the rest, or return False and do nothing."""
        waiting = [*self._preempted, *([self._stalled] if self._stalled else [])]
        if waiting and not admits(sequence.priority, waiting, self._oldest()):
            return False
        return self._kv_cache.start(sequence, keys, self.num_blocks_to_reserve(sequence))

    def num_blocks_to_reserve(self, sequence: EngineSequence) -> int:
        """Return the number of blocks with which a sequence starts or restarts.

        They cover its tokens, some of those it may sample, and its siblings still to be forked, without the full blocks
        they will share.
        """
        shared = sequence.fork_at // self._kv_cache.layout.block_tokens
        return self._num_own_blocks(sequence) + sum(self._num_own_blocks(s) - shared for s in sequence.siblings)

    def run(self, sequence: EngineSequence) -> None:
        """Add a sequence that has its blocks; it may be computed from now on."""
        sequence.turn = self._next_turn()
        self._running[sequence] = None

    def fork(self, parent: EngineSequence, children: Sequence[EngineSequence], num_tokens: int) -> None:
        """Let `children` continue from the first `num_tokens` that `parent` has computed.

        Children without capacity, or whose parent was preempted, wait as preempted. No step may run.
        """
        if parent in self._running:
            self._kv_cache.lower_reservation(parent, self._num_own_blocks(parent))
        num_shared = min(num_tokens, parent.num_computed)  # less when the parent was preempted and has just restarted
        for child in children:
            copies = None
            if parent in self._running:
                copies = self._kv_cache.fork(parent, child, num_shared, self._num_own_blocks(child))
            if copies is None:
                self._preempted[child] = _PreemptedState(0, self._kv_cache.usable_keys(child))
                continue
            for source, target in copies:
                self._copy_block(source, target)
            self.run(child)

    def drop(self, sequence: EngineSequence) -> None:
        """Remove a sequence that is over; the caller frees its blocks."""
        self._running.pop(sequence, None)
        self._preempted.pop(sequence, None)
        if sequence is self._stalled:
            self._stalled = None

    def restart(self) -> None:
        """Restart preempted sequences that fit."""
        if not self._preempted:
            return
        for sequence in restart_order(self._preempted, self._oldest()):
            if not self._try_restart(sequence, self.num_blocks_to_reserve(sequence)):
                return

    def begin_step(self) -> None:
        """Restart preempted sequences that fit, and the oldest at the cost of others.

        No step may run.
        """
        self._stalled = None
        if not self._preempted:
            return
        self.restart()
        oldest = self._oldest()
        if oldest in self._preempted:
            self._rescue(oldest)

    def make_room(self, batch: Sequence[Chunk]) -> bool:
        """Reserve all blocks that the batch lacks.

        Returns False after preempting one sequence: make another batch.
        """
        lacking = [self._kv_cache.num_lacking(chunk.sequence, chunk.start + chunk.count) for chunk in batch]
        if not any(lacking):
            return True
        if sum(lacking) <= self._kv_cache.pool.num_available:
            for chunk, count in zip(batch, lacking, strict=True):
                if count:
                    self._kv_cache.extend(chunk.sequence, count)
            return True
        if self._kv_cache.cached.pins.shrink(sum(lacking) - max(0, self._kv_cache.pool.num_available)):
            return False
        oldest = self._oldest()
        victim = next_victim(self._preemptible, oldest)
        if victim is not None:
            self._preempt(victim)
        else:
            self._stalled = oldest
        return False

    def _num_own_blocks(self, sequence: EngineSequence) -> int:
        return self._kv_cache.layout.blocks_for(sequence.num_tokens_reserved(self._reserve_output_tokens))

    def _rescue(self, oldest: EngineSequence) -> None:
        """Restart the oldest sequence with a block for its next token, if that is possible at all."""
        num_blocks, victims = self._kv_cache.layout.blocks_for(oldest.num_tokens + 1), self._preemptible
        if self._try_restart(oldest, num_blocks):
            return
        self._kv_cache.cached.pins.shrink(num_blocks)
        if not self._kv_cache.could_start_without(victims, oldest, self._preempted[oldest].keys, num_blocks):
            return  # it is tried again before the next step
        while not self._try_restart(oldest, num_blocks):
            victim = next_victim(self._preemptible, oldest)
            assert victim is not None
            self._preempt(victim)

    def _preempt(self, sequence: EngineSequence) -> None:
        del self._running[sequence]
        self._preempted[sequence] = _PreemptedState(sequence.num_computed, self._kv_cache.usable_keys(sequence))
        self._kv_cache.preempt(sequence)
        sequence.num_preemptions += 1
        self.num_preemptions += 1

    def _try_restart(self, sequence: EngineSequence, num_blocks: int) -> bool:
        lost = self._preempted[sequence]
        if not self._kv_cache.start(sequence, lost.keys, num_blocks):
            return False
        del self._preempted[sequence]
        sequence.num_recomputed += max(0, lost.num_computed - sequence.num_computed)
        self.run(sequence)
        return True

    def _oldest(self) -> EngineSequence | None:
        return oldest_of(s for s in [*self._running, *self._preempted] if s.num_remaining)
