"""Chunks of a step on the GPU, in the form that all attention backends there use."""

from abc import abstractmethod
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from engine.backends.torch.attention import PagedAttention
from engine.backends.torch.cuda.tables import Sections, StepTables, host_buffer
from engine.core_types import Chunk
from engine.kv.layout import KvLayout


@dataclass(slots=True)
class Step:
    """Arrays of `StepTables`: CPU views to plan by, and the same arrays on the device."""

    num_decodes: int
    num_tokens: int
    host: list[Tensor]
    device: list[Tensor]
    fixed: bool = False
    """Whether the step is a bucket, whose device views stay where they are."""
    num_blocks: int = 0
    """Entries of `tables` in use."""
    num_decode_blocks: int = 0
    planned: dict[Any, Any] = field(default_factory=dict)
    """Plans that a backend made for the step."""


class GpuAttention(PagedAttention):
    """Paged attention whose decodes may be captured in graphs (`graphs.py`)."""

    def __init__(self, layout: KvLayout, device: torch.device) -> None:
        self._layout = layout
        self.device = device
        self.step = Step(0, 0, [], [])

    def prepare(self, chunks: Sequence[Chunk]) -> None:
        tables = StepTables.of(self._layout, chunks)
        arrays = [*tables.arrays, *self._of_prompts(tables), tables.tables]
        sections = Sections([len(values) for values in arrays])
        buffer = host_buffer(sections.num_elements, self.device)
        sections.fill(buffer, arrays)
        on_device = buffer.to(self.device, non_blocking=True)
        self.step = Step(tables.num_decodes, tables.num_tokens, sections.views(buffer), sections.views(on_device))
        self.step.num_blocks = len(tables.tables)
        self.step.num_decode_blocks = tables.table_starts[tables.num_decodes]

    def bucket(self, num_decodes: int, device_buffer: Tensor, sections: Sections) -> Step:
        """Return a step for graphs: `num_decodes` single tokens, with arrays in a buffer that stays where it is.

        The arrays are those up to LAST_LENS, then TABLES. `refill` the step and forward it once before capture.
        """
        return Step(num_decodes, num_decodes, [], sections.views(device_buffer), fixed=True)

    def refill(self, step: Step, host: list[Tensor], num_blocks: int) -> None:
        """Plan a bucket again after its arrays changed.

        `host` holds the arrays on the CPU, in the order of the buffer.
        """
        step.host = host
        step.num_blocks = step.num_decode_blocks = num_blocks

    @abstractmethod
    def _of_prompts(self, tables: StepTables) -> "list[array[int]]":
        """Return the arrays that the backend needs for the chunks from `num_decodes` on."""
