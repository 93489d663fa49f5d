"""Interface of an engine backend: memory for KV blocks, and a way to compute one batch."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from engine.core_types import Chunk, GpuDevice, Pooler, SampleResult
from kvcache.layout import KvLayout
from kvtransfer.fingerprint import Fingerprints, Folding
from kvtransfer.transport import AnyPool, Pool

if TYPE_CHECKING:
    from engine.sampling.grammar import Grammars


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """Facts about a loaded model that other processes need."""

    weights_fingerprint: bytes
    vocab_size: int
    max_context_tokens: int
    eos_token_ids: frozenset[int]
    revision: bytes = b""
    """Fingerprint of what a client knows as the model, whatever the version of the engine and its ways to speculate;
    empty: `weights_fingerprint`."""
    adapters: tuple[tuple[str, bytes], ...] = ()
    """Names and fingerprints of the LoRA adapters that it serves."""
    reads_media: bool = False
    """Whether it computes prompts with items."""
    encoder_fingerprint: bytes = b""
    """Fingerprint of the model, for encode workers (`encoder_fingerprint`); empty: it takes no embeddings from them."""
    pooler: Pooler | None = None
    """Pooler of an engine that answers with vectors only; None: it generates."""

    @property
    def adapter_fingerprints(self) -> frozenset[bytes]:
        return frozenset(fingerprint for _, fingerprint in self.adapters)


class ModelRunner(ABC):
    """One model with its KV memory.

    Used by one thread.
    """

    layout: KvLayout
    """Layout of whole blocks."""
    info: ModelInfo
    pool: AnyPool
    """KV memory, uint8 [num_blocks, block_bytes]: `execute` writes it, transports move it, fingerprints cover it. With
    several ranks it is this rank's part of each block."""
    gpu: GpuDevice | None = None
    """GPU that it computes on; None on a CPU."""
    grammars: "Grammars | None" = None
    """Grammars of structured outputs; None where the runner samples no text."""
    _fingerprints: Fingerprints | None = None

    @property
    def pool_layout(self) -> KvLayout:
        """Layout of the part of a block that `pool` holds."""
        return self.layout

    def bind(self, own_cores: Sequence[int], shared_cores: Sequence[int]) -> None:  # noqa: B027 - most backends need nothing
        """Set the cores of the compute threads; called between steps on the thread that calls `execute`.

        An empty `own_cores` leaves them unchanged.
        """

    @abstractmethod
    def execute(self, batch: Sequence[Chunk]) -> list[SampleResult]:
        """Compute the KV of every chunk's tokens into its sequence's blocks; blocks before a chunk are full.

        On return the KV is visible to everyone, transports included. Returns one SampleResult per chunk with
        `chunk.answers`, in order. Writes only slots of the chunks' own tokens. Does not change the sequences.
        """

    def copy_block(self, source: int, target: int) -> None:
        """Make block `target` equal to `source`.

        Called between steps; the next `execute` sees it.
        """
        assert isinstance(self.pool, Pool)
        self.pool.memory[target] = self.pool.memory[source]

    def read_blocks(self, blocks: Sequence[int]) -> Iterable[NDArray[np.uint8]]:
        """Return the bytes of blocks that are not being written; each valid until the next is asked for.

        A runner of several ranks returns whole blocks, on the loop's thread only. Others return what `pool` holds, from
        any thread.
        """
        assert isinstance(self.pool, Pool)
        memory = self.pool.memory
        return [memory[block] for block in blocks]

    def write_block(self, block: int, content: NDArray[np.uint8]) -> None:
        """Set what `pool` holds of a block that no batch uses; it is visible on return.

        `content` is that part, for rank 0 of several the whole block. From any thread.
        """
        assert isinstance(self.pool, Pool)
        self.pool.memory[block] = content

    def fingerprints(self, blocks: Sequence[int]) -> NDArray[np.uint64]:
        """Return the fingerprints (`kvtransfer/fingerprint.py`) of the blocks' present bytes, [len(blocks), kv_heads].

        Called from any thread, also while `execute` runs. A backend whose pool is not in main memory overrides it. One
        of several ranks is asked only for blocks that its last step filled.
        """
        return self._in_main_memory().of(blocks)

    def part_fingerprints(self, blocks: Sequence[int]) -> NDArray[np.uint64]:
        """Return fingerprints of the part that `pool` holds, [len(blocks), KV heads of this rank].

        From any thread.
        """
        return self.fingerprints(blocks)

    @property
    def folding(self) -> Folding | None:
        """Fold that fingerprints one KV head of a block in `pool`; None where the CPU cannot compute it."""
        return self._in_main_memory().folding if isinstance(self.pool, Pool) else None

    def _in_main_memory(self) -> Fingerprints:
        if self._fingerprints is None:
            assert isinstance(self.pool, Pool)
            self._fingerprints = Fingerprints(self.pool.memory, self.pool_layout.kv_heads)
        return self._fingerprints
