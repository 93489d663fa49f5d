"""What an engine must bring: memory for KV blocks, and a way to compute one batch."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from engine.layout import KvLayout
from engine.vocabulary import Chunk, Sampled
from kvtransfer.transport import Pool


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What the world needs to know of a loaded model."""

    weights_fingerprint: bytes
    vocab_size: int
    max_context_tokens: int
    eos_token_ids: frozenset[int]


class Runner(ABC):
    """One model with its KV memory. Used by one thread."""

    layout: KvLayout
    info: ModelInfo
    pool: Pool
    """[num_blocks, block_bytes] of uint8: what `execute` writes, transports move and fingerprints cover."""

    @abstractmethod
    def execute(self, batch: Sequence[Chunk]) -> list[Sampled]:
        """Compute the KV of every chunk's tokens into its sequence's blocks; blocks before a chunk are full.

        Returns one Sampled per chunk with `chunk.samples`, in order. Writes only into slots of the chunks' own
        tokens. Does not change the sequences.
        """
