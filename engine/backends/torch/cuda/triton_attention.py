"""The `triton` backend: paged attention on GPUs by Tandem's own kernels, for KV that flashinfer cannot read.

It serves quantised KV, whose scales lie in the blocks, and heads and dtypes that flashinfer lacks. A tile of blocks is
dequantised where it is multiplied, so memory is read once and at the smaller size. There is no planning: kernels need
only a step's tables, also in graphs.
"""

import itertools
from array import array
from typing import Any

import torch
from torch import Tensor

from engine.backends.torch.cuda.step import GpuAttention
from engine.backends.torch.cuda.tables import LAST_LENS, POSITIONS, ROWS, TABLE_STARTS, TABLES, StepTables
from engine.backends.torch.kv.rows import LARGEST, TYPES
from engine.errors import KernelsUnavailable
from engine.kv.layout import KvLayout

PROMPT_ROWS, PROMPT_WARPS = 64, 8
"""Query rows (tokens times heads of a KV head) of a prompt's tile, and its warps.

With 4 warps registers spill, and on Ampere also with 128 rows of int8 (`tests/support/compiled_attention.py`)."""
LEAST_ROWS = 16
"""Smallest number of rows of a tile: tensor cores multiply as many at once."""
KEYS = 64
"""Keys read at a time."""
MAX_SPLITS = 32
"""Largest number of programs that share a tile's keys, used when few tiles would leave processors idle."""
FLOAT8_CAPABILITY = (8, 9)
"""Smallest compute capability (Ada) for which Triton converts float8."""
TILES = LAST_LENS + 1
"""Place of the array of tiles in a step."""


def load_kernels(layout: KvLayout, device: torch.device) -> Any:
    """Return the module of kernels.

    Raises KernelsUnavailable, with the reason, when Triton is missing or does not support this GPU.
    """
    if layout.kept == "fp8" and torch.cuda.get_device_capability(device) < FLOAT8_CAPABILITY:
        raise KernelsUnavailable(f"fp8 needs a GPU of compute capability {'.'.join(map(str, FLOAT8_CAPABILITY))}")
    try:
        from engine.backends.torch.cuda import attention_kernels
    except Exception as error:  # importing Triton looks for drivers and compilers, whose errors are of any type
        raise KernelsUnavailable(f"Triton cannot be imported: {error}") from error
    return attention_kernels


class TritonPagedAttention(GpuAttention):
    """Paged attention over a pool shaped as `KvMemory.tensor`, for `heads` query heads.

    `processors` is the GPU's number of SMs.
    """

    def __init__(self, kernels: Any, pool: Tensor, layout: KvLayout, heads: int, processors: int) -> None:
        super().__init__(layout, pool.device)
        self._kernels = kernels
        self._heads = heads
        self._processors = processors
        self._group = heads // layout.kv_heads
        self._group_width = _power_of_two(self._group)
        self._tile_tokens = max(1, PROMPT_ROWS // self._group_width)
        self._kept = pool.view(TYPES[layout.kept]) if layout.quantised else pool
        self._scales = pool.view(torch.bfloat16) if layout.quantised else pool  # without scales, any valid pointer
        row_bytes = layout.block_tokens * layout.vector_bytes
        self._of_pool = {
            "HEAD_DIM": layout.head_dim,
            "WIDTH": max(LEAST_ROWS, _power_of_two(layout.head_dim)),
            "BLOCK_TOKENS": layout.block_tokens,
            "BLOCK_ROWS": layout.kv_heads * layout.layers * 2,
            "HEAD_ROWS": layout.layers * 2,
            "ROW": row_bytes // self._kept.element_size(),
            "SCALE_ROW": row_bytes // self._scales.element_size(),
        }

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float, window: int | None, softcap: float
    ) -> Tensor:
        step = self.step
        for part, new in enumerate((key, value)):
            self._write(new[0], 2 * layer + part)
        heads = query[0] if query.stride(-1) == 1 else query[0].contiguous()  # [heads, tokens, head_dim]
        out = torch.empty(step.num_tokens, self._heads, self._layout.head_dim, dtype=query.dtype, device=query.device)
        options: dict[str, Any] = {
            "key_part": 2 * layer,
            "scaling": scaling,
            "softcap": softcap,
            "WINDOW": window or 0,
            "SOFTCAP": softcap != 0,
        }
        if decodes := step.num_decodes:
            self._attend(heads, out, decodes, 0, decodes, max(LEAST_ROWS, self._group_width), **options)
        if step.num_tokens > decodes:
            tiles = len(step.device[TILES])
            rows = max(LEAST_ROWS, self._tile_tokens * self._group_width)
            self._attend(heads, out, tiles, decodes, step.num_tokens, rows, tiled=True, **options)
        return out[None]

    def _of_prompts(self, tables: StepTables) -> "list[array[int]]":
        """Return the first token of each tile."""
        tiles = array("i")
        for first, end in itertools.pairwise(tables.query_starts[tables.num_decodes :]):
            tiles.extend(range(first, end, self._tile_tokens))
        return [tiles]

    def _write(self, new: Tensor, part: int) -> None:
        """Write `new` [kv_heads, tokens, head_dim] into row `part` of each head."""
        new = new if new.stride(-1) == 1 else new.contiguous()
        device = self.step.device
        self._kernels.write_kv[(new.shape[1], new.shape[0])](
            new,
            self._kept,
            self._scales,
            device[ROWS],
            device[POSITIONS],
            device[TABLE_STARTS],
            device[TABLES],
            new.stride(1),
            new.stride(0),
            part,
            **self._of_pool,
            LARGEST=LARGEST.get(self._layout.kept, 0),
        )

    def _attend(
        self,
        heads: Tensor,
        out: Tensor,
        tiles: int,
        first_token: int,
        end_token: int,
        query_rows: int,
        *,
        key_part: int,
        scaling: float,
        softcap: float,
        tiled: bool = False,
        **chosen: Any,
    ) -> None:
        """Attend for tokens [first_token, end_token) of the step, in `tiles` tiles, into `out`."""
        step, layout = self.step, self._layout
        splits = self._splits(tiles)
        tokens = end_token - first_token
        parts = sums = out
        if splits > 1:
            parts = torch.empty(tokens, self._heads, splits, layout.head_dim, dtype=torch.float32, device=self.device)
            sums = torch.empty(tokens, self._heads, splits, 2, dtype=torch.float32, device=self.device)
        self._kernels.attend[(tiles, layout.kv_heads, splits)](
            heads,
            self._kept,
            self._scales,
            parts,
            sums,
            step.device[ROWS],
            step.device[POSITIONS],
            step.device[TABLE_STARTS],
            step.device[TABLES],
            step.device[TILES] if tiled else step.device[ROWS],
            first_token,
            step.num_tokens,
            heads.stride(1),
            heads.stride(0),
            key_part,
            scaling,
            softcap,
            HEADS=self._heads,
            GROUP=self._group,
            GROUP_WIDTH=self._group_width,
            QUANTISED=layout.quantised,
            TILED=tiled,
            QUERY_ROWS=query_rows,
            KEYS=KEYS,
            SPLITS=splits,
            PRECISION="ieee" if heads.dtype == torch.float32 else "tf32",
            num_warps=PROMPT_WARPS if tiled else 4,
            **self._of_pool,
            **chosen,
        )
        if splits > 1:
            self._kernels.join_splits[(tokens, self._heads)](
                parts,
                sums,
                out[first_token:end_token],
                HEADS=self._heads,
                HEAD_DIM=layout.head_dim,
                WIDTH=self._of_pool["WIDTH"],
                SPLITS=splits,
            )

    def _splits(self, tiles: int) -> int:
        """Return the number of splits, a power of two.

        It depends only on the number of tiles, so that a graph computes exactly as the plain path does.
        """
        wanted = 2 * self._processors // (tiles * self._layout.kv_heads)
        return min(MAX_SPLITS, _power_of_two(wanted + 1) // 2) if wanted > 1 else 1


def _power_of_two(number: int) -> int:
    """Return the smallest power of two that is not below the number."""
    return 1 << max(0, number - 1).bit_length()
