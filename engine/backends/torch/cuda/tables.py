"""Tables of a step's chunks for the kernels: int32 arrays that cross to the GPU in one copy."""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from engine.core_types import Chunk
from engine.kv.layout import KvLayout

TOKENS, POSITIONS, ROWS, TABLE_STARTS, LAST_LENS = range(5)
"""Order of `StepTables.arrays`. A backend's arrays for prompts (not in buckets) and the tables follow."""
TABLES = -1
ALIGNMENT = 16
"""Alignment of the arrays, in elements: 64 bytes."""


def _ints() -> "array[int]":
    return array("i")


@dataclass(slots=True)
class StepTables:
    """Tables of one step.

    Chunk i has tokens `query_starts[i:i+2]` of the flattened batch and blocks `tables[table_starts[i:i+2]]`.

    The chunks before `num_decodes` are one token each. Later chunks, single tokens among them as well, go to the prompt
    kernel. Decoding sequences come first in a batch, those with draft tokens after those without.
    """

    num_decodes: int = 0
    token_ids: "array[int]" = field(default_factory=_ints)
    positions: "array[int]" = field(default_factory=_ints)
    rows: "array[int]" = field(default_factory=_ints)
    """Number of each token's chunk."""
    query_starts: "array[int]" = field(default_factory=lambda: array("i", [0]))
    table_starts: "array[int]" = field(default_factory=lambda: array("i", [0]))
    last_lens: "array[int]" = field(default_factory=_ints)
    """Filled slots of each chunk's last block after the step."""
    tables: "array[int]" = field(default_factory=_ints)

    @classmethod
    def of(cls, layout: KvLayout, chunks: Sequence[Chunk]) -> "StepTables":
        step = cls()
        for chunk in chunks:
            end = chunk.start + chunk.num_rows
            if chunk.num_rows == 1 and step.num_decodes == len(step.last_lens):
                step.num_decodes += 1
            step.token_ids.extend(chunk.token_ids)
            step.positions.extend(range(chunk.start, end))
            step._end_chunk(layout, chunk.sequence.blocks[: layout.blocks_for(end)], chunk.num_rows, end)
        return step

    @property
    def arrays(self) -> "list[array[int]]":
        """All arrays but the tables, in the order in which they cross to the GPU."""
        return [self.token_ids, self.positions, self.rows, self.table_starts, self.last_lens]

    @property
    def num_chunks(self) -> int:
        return len(self.last_lens)

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    def pad(self, layout: KvLayout, num_chunks: int, block: int) -> None:
        """Add decodes of one token at position 0, with KV in `block`, until there are `num_chunks`."""
        for _ in range(num_chunks - self.num_chunks):
            self.num_decodes += 1
            self.token_ids.append(0)
            self.positions.append(0)
            self._end_chunk(layout, [block], 1, 1)

    def prefill_starts(self) -> tuple["array[int]", "array[int]"]:
        """Return `query_starts` and `table_starts` of the chunks from `num_decodes` on, counted from there."""
        first = self.num_decodes
        queries, tables = self.query_starts[first:], self.table_starts[first:]
        return array("i", [q - queries[0] for q in queries]), array("i", [t - tables[0] for t in tables])

    def _end_chunk(self, layout: KvLayout, blocks: list[int], count: int, end: int) -> None:
        self.rows.extend([len(self.last_lens)] * count)
        self.query_starts.append(self.query_starts[-1] + count)
        self.tables.extend(blocks)
        self.table_starts.append(len(self.tables))
        self.last_lens.append((end - 1) % layout.block_tokens + 1)


class Sections:
    """Layout of arrays of given lengths side by side in one int32 buffer."""

    def __init__(self, lengths: Sequence[int]) -> None:
        self.lengths = list(lengths)
        self.offsets = [0]
        for length in lengths:
            self.offsets.append(self.offsets[-1] - (-length // ALIGNMENT) * ALIGNMENT)

    @property
    def num_elements(self) -> int:
        return self.offsets[-1]

    def views(self, buffer: Tensor) -> list[Tensor]:
        """Return one view of the buffer for each array."""
        return [buffer[first : first + n] for first, n in zip(self.offsets, self.lengths, strict=False)]

    def fill(self, buffer: Tensor, arrays: Sequence["array[int]"]) -> int:
        """Write the arrays, which may be shorter than their sections, and return the length of the buffer in use."""
        target = buffer.numpy()
        for first, values in zip(self.offsets, arrays, strict=False):
            target[first : first + len(values)] = np.frombuffer(values, np.int32)
        return self.offsets[len(arrays) - 1] + len(arrays[-1])


def host_buffer(num_elements: int, device: torch.device) -> Tensor:
    """Return int32 memory from which `device` can copy without waiting."""
    return torch.empty(num_elements, dtype=torch.int32, pin_memory=device.type == "cuda")
