"""Preemption policy: which sequence gives its blocks back, and which restarts.

Pure; `running_set.py` performs it.

A request is admitted with blocks for its prompt and some of its output, so it may need more later. When none is
available, requests are preempted: they give all blocks back and wait to be computed again. The bound on that wait rests
on the oldest request, the first arrival among those that are not borrowing. It is never preempted, and if it was
preempted before it became the oldest, it restarts at once, at the cost of others. So it gets each of its tokens within
the scheduler's `max_wait_steps`, and when it is over the next one is the oldest. A request gets its first token, and
each next one, within

    max_wait_steps * (1 + sum over those that arrived before it of (1 + tokens they may still sample))   steps

after it was admitted (or its loan was over), or after the previous token, or from any step between. Later arrivals do
not count, whatever their priority. The inner 1 is for a borrowing request: when its loan is over it becomes the oldest,
and the previous oldest may have waited in vain. Each choice of a request is a sequence of its own here, in order; its
fork (`engine/sampling/parallel_sampling.py`) counts as one more token of the first.

Blocks held by loans given, by borrowing requests and by quarantined reads are not taken back. They return by
themselves, since no loan starts that could wait for this engine in turn. Steps in which they keep the oldest from its
blocks do not count in the bound.
"""

from collections.abc import Iterable

from engine.core_types import EngineSequence


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
