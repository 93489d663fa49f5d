"""What an engine must bring: memory for KV blocks, and a way to compute one batch."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from engine.core.core_types import Chunk, SampleResult
from engine.kv.layout import KvLayout
from kvtransfer.fingerprint import Fingerprints, Folding
from kvtransfer.transport import AnyPool, Pool


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What the world needs to know of a loaded model."""

    weights_fingerprint: bytes
    vocab_size: int
    max_context_tokens: int
    eos_token_ids: frozenset[int]


class ModelRunner(ABC):
    """One model with its KV memory. Used by one thread."""

    layout: KvLayout
    """Of whole blocks."""
    info: ModelInfo
    pool: AnyPool
    """[num_blocks, block_bytes] of uint8: what `execute` writes, transports move and fingerprints cover. Of an engine
    of several ranks: this rank's part of each block."""
    _fingerprints: Fingerprints | None = None

    @property
    def pool_layout(self) -> KvLayout:
        """Of what `pool` has of each block."""
        return self.layout

    def bind(self, own_cores: Sequence[int], shared_cores: Sequence[int]) -> None:  # noqa: B027 - most need nothing
        """Called between steps, on the thread that calls `execute`: where its threads compute from now on. Without
        `own_cores` where they did."""

    @property
    def draft_pass_s(self) -> float:
        """Seconds that its draft model lately took for one guess of each sequence; 0 where it has none."""
        return 0.0

    @abstractmethod
    def execute(self, batch: Sequence[Chunk]) -> list[SampleResult]:
        """Compute the KV of every chunk's tokens into its sequence's blocks; blocks before a chunk are full. It is
        there for everyone, transports too, when this returns.

        Returns one Sampled per chunk with `chunk.answers`, in order. Writes only into slots of the chunks' own
        tokens and of their guesses. Of `chunk.num_drafts` fewer may be made. Does not change the sequences.
        """

    def copy_block(self, source: int, target: int) -> None:
        """Make block `target` equal to `source`. Called between steps; the next `execute` sees it."""
        assert isinstance(self.pool, Pool)
        self.pool.memory[target] = self.pool.memory[source]

    def read_blocks(self, blocks: Sequence[int]) -> Sequence[NDArray[np.uint8]]:
        """The bytes of blocks that nobody writes, [block_bytes] each; valid until somebody does. From any thread."""
        assert isinstance(self.pool, Pool)
        memory = self.pool.memory
        return [memory[block] for block in blocks]

    def write_block(self, block: int, content: NDArray[np.uint8]) -> None:
        """Set the bytes of a block that no batch uses; they are there when this returns. From any thread."""
        assert isinstance(self.pool, Pool)
        self.pool.memory[block] = content

    def fingerprints(self, blocks: Sequence[int]) -> NDArray[np.uint64]:
        """Those of `kvtransfer/fingerprint.py`, of the blocks' bytes as they are now: [len(blocks), kv_heads].

        Called from any thread, also while `execute` runs. A runner whose pool is not in main memory brings its own. One
        of several ranks is asked only for blocks that its last step filled.
        """
        return self._in_main_memory().of(blocks)

    def part_fingerprints(self, blocks: Sequence[int]) -> NDArray[np.uint64]:
        """Of what `pool` has of the blocks, any of them: [len(blocks), KV heads of this rank]. From any thread."""
        return self.fingerprints(blocks)

    @property
    def folding(self) -> Folding | None:
        """How each KV head of a block in `pool` is fingerprinted; None where that is not for the CPU to do."""
        return self._in_main_memory().folding if isinstance(self.pool, Pool) else None

    def _in_main_memory(self) -> Fingerprints:
        if self._fingerprints is None:
            assert isinstance(self.pool, Pool)
            self._fingerprints = Fingerprints(self.pool.memory, self.pool_layout.kv_heads)
        return self._fingerprints
