"""Verification of blocks that arrived in a GPU's memory, and their corruption for drills.

A pass is a few kernels and one wait, however many blocks it covers, and each read of its own would pay for them. While
a pass runs, further reads complete; they share the next one. Passes have a thread of their own: neither the transport,
which posts the next reads, nor the engine's loop waits for the GPU.
"""

import logging
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

log = logging.getLogger(__name__)


Entries = tuple[bytes, ...]
"""Fingerprints of blocks, one entry per block."""


class Arrival(Protocol):
    """Blocks that no read writes any more."""

    @property
    def blocks(self) -> Sequence[int]: ...

    @property
    def withdrawn(self) -> bool:
        """Whether nobody needs the fingerprints: the blocks may be in use by others."""

    def verified(self, entries: Entries | None) -> None:
        """Take the fingerprints; None where there are none. Called once, on any thread."""


class BatchVerifier:
    """Fingerprints of arrivals, computed for all that wait in one pass.

    At most one pass runs at a time. From any thread.
    """

    def __init__(
        self, fingerprints: Callable[[Sequence[int]], NDArray[np.uint64]], executor: Executor | None = None
    ) -> None:
        """Create it; `fingerprints` of blocks are [blocks, KV heads]. `executor` replaces the thread of the passes."""
        self._fingerprints = fingerprints
        self._executor = executor or ThreadPoolExecutor(1, "verify-blocks")  # starts its thread when it is needed
        self._lock = threading.Lock()
        self.waiting: list[Arrival] = []
        """Arrivals that no pass has taken yet."""
        self._running = False
        self.num_passes = 0

    def add(self, arrival: Arrival) -> None:
        """Verify an arrival in the next pass."""
        with self._lock:
            self.waiting.append(arrival)
            if self._running:
                return
            self._running = True
        self._executor.submit(self._run)

    def _run(self) -> None:
        while arrivals := self._take():
            self._pass(arrivals)

    def _take(self) -> list[Arrival]:
        """Return all that wait; when nothing does, the next arrival starts the passes again."""
        with self._lock:
            arrivals, self.waiting = self.waiting, []
            self._running = bool(arrivals)
        return arrivals

    def _pass(self, arrivals: list[Arrival]) -> None:
        wanted, unwanted = list[Arrival](), list[Arrival]()
        for arrival in arrivals:
            (unwanted if arrival.withdrawn else wanted).append(arrival)
        fingerprints, at = self._look(wanted), 0
        for arrival in wanted:
            end = at + len(arrival.blocks)
            _report(arrival, None if fingerprints is None else fingerprints[at:end])
            at = end
        for arrival in unwanted:
            _report(arrival, None)

    def _look(self, arrivals: Sequence[Arrival]) -> Entries | None:
        """Return the fingerprints of all blocks in order; None where they could not be computed."""
        blocks = [block for arrival in arrivals for block in arrival.blocks]
        if not blocks:
            return ()
        self.num_passes += 1
        try:
            return entries_of(self._fingerprints(blocks))
        except Exception:  # the reads fail, and their blocks are computed here
            log.exception("%d blocks that arrived could not be verified", len(blocks))
            return None


def _report(arrival: Arrival, entries: Entries | None) -> None:
    try:
        arrival.verified(entries)
    except Exception:  # the others of this pass must hear of their blocks
        log.exception("the end of a block read could not be reported")


def entries_of(fingerprints: NDArray[np.uint64]) -> Entries:
    """Convert [blocks, KV heads] to one bytes entry per block."""
    joined, width = fingerprints.tobytes(), fingerprints.shape[1] * fingerprints.itemsize
    return tuple(joined[at : at + width] for at in range(0, len(joined), width))


BIT = 16
"""Flipped bit of a block's first byte."""


class PartMemory(Protocol):
    """This rank's parts of the pool's blocks."""

    def read_blocks(self, blocks: Sequence[int]) -> Iterable[NDArray[np.uint8]]:
        """Return this rank's part of blocks that no step writes."""

    def write_block(self, block: int, content: NDArray[np.uint8]) -> None:
        """Set this rank's part of a block; it is visible on return. From any thread."""


class Corruption:
    """Corruption of the next blocks that arrive: one bit of each is flipped before the block is verified.

    It takes place at the borrower. A lender that corrupted its own pool would compute further blocks from wrong KV and
    give them right fingerprints.
    """

    def __init__(self, memory: PartMemory, num_blocks: int) -> None:
        self._memory = memory
        self._lock = threading.Lock()
        self._num_left = num_blocks

    @property
    def active(self) -> bool:
        return self._num_left > 0

    def strike(self, blocks: Sequence[int]) -> None:
        """Flip a bit in each of `blocks`, as far as the number allows; nothing else may read or write them.

        From any thread.
        """
        with self._lock:
            struck = blocks[: self._num_left]
            self._num_left -= len(struck)
        for block in struck:
            content = np.array(next(iter(self._memory.read_blocks([block]))))
            content.reshape(-1)[0] ^= BIT
            self._memory.write_block(block, content)
