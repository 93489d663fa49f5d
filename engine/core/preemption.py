"""Who gives its blocks back when none is left, and who gets them again. Pure; `engine/core/running_set.py` performs it.

A request is admitted with blocks for its prompt and some of its output, so it may have to ask for more. When there
is none, requests are preempted: they give everything back and wait to be computed anew. The bound on that wait rests
on the oldest request, the one that arrived first of those that are not borrowing: it is never a victim, and when it
was one before it became the oldest, it restarts at once, at the cost of others. So it gets each of its tokens within
the `max_wait_steps` of the scheduler, and when it is over the next one is the oldest. A request gets its first token,
and each next one, within

    max_wait_steps * (1 + sum over those that arrived before it of (1 + tokens they may still sample))   steps

after it was admitted (or its loan was over), or after the token before, or from any step between on. Who arrives later
does not count, whatever its priority. The inner 1 is for one that was borrowing: when it comes back it is the oldest,
and whoever was may have waited in vain. Each choice of a request is a sequence of its own here, in their order; that
they part (`engine/sampling/parallel_sampling.py`) counts as one token more of the first.

A beam that waits for the others of its search is not the oldest, and may be a victim: what was heard of it is kept, so
the search needs nothing more of it now. As a victim it has everything to compute anew, and still is not the oldest:
else it would take the blocks of the beam that it waits for, and that one take them back. So the search goes on as long
as the oldest of its beams does of which nothing was heard yet.

Blocks that others need meanwhile (of loans given, of requests that borrow, of reads that cannot be stopped) are not
taken back. They come back by themselves, since no loan starts that could wait for this engine in turn; steps in which
they keep the oldest from its blocks do not count either.
"""

from collections.abc import Iterable

from engine.core.core_types import Sequence


def oldest_of(sequences: Iterable[Sequence]) -> Sequence | None:
    """The one that is never preempted."""
    return min(sequences, key=lambda sequence: sequence.arrival, default=None)


def next_victim(running: Iterable[Sequence], oldest: Sequence | None) -> Sequence | None:
    """Of those that have blocks and may lose them: the lowest priority, then the youngest. None: nobody is left."""
    victims = [sequence for sequence in running if sequence is not oldest]
    return min(victims, key=lambda sequence: (sequence.priority, -sequence.arrival), default=None)


def restart_order(waiting: Iterable[Sequence], oldest: Sequence | None) -> list[Sequence]:
    """The oldest before all, then by priority and arrival. Who does not fit keeps those behind it waiting."""
    return sorted(waiting, key=lambda sequence: (sequence is not oldest, -sequence.priority, sequence.arrival))


def admits(priority: int, waiting: Iterable[Sequence], oldest: Sequence | None) -> bool:
    """A new request may start before those that wait only when all of them are of lower priority, and when the oldest
    is not among them."""
    return all(sequence.priority < priority and sequence is not oldest for sequence in waiting)
