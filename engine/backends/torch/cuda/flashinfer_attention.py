"""The `flashinfer` backend: paged attention on NVIDIA GPUs.

The blocks are read where they are: per layer, K and V are strided views of the pool, [blocks, kv_heads, block_tokens,
head_dim], and flashinfer takes the strides of pages, heads and tokens ("HND"; those of K and of V must be equal, and
are). One kernel writes the new keys and values.

Single tokens and prompts go to different kernels. The one for prompts picks one tile size for all its rows, and on
Hopper it does not split a long context among thread blocks: decodes in the company of a prompt would be computed on
tiles of 128 rows, one thread block a KV head, and the step would wait for them.

A plan holds for one (scale, window, softcap), which is the same for all layers of most models; where it is not, each
has wrappers and plans of its own. Plans are made on the CPU, from arrays that are there, so they wait for nothing.
"""

from array import array
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from engine.backends.torch.cuda.step import GpuAttention, Step
from engine.backends.torch.cuda.tables import LAST_LENS, POSITIONS, ROWS, TABLE_STARTS, TABLES, StepTables
from engine.kv.layout import KvLayout

WORKSPACE_BYTES = 384 << 20
"""For partial results of contexts that are split. flashinfer asks for 128 MiB, and overflows that with 256 decodes of
many heads; shared by all wrappers, whose kernels run one after the other."""
TENSOR_CORE_GROUP = 4
"""Query heads per KV head from which on decoding is faster on tensor cores."""
PLAIN_GROUPS = (1, 2, 3)
"""Smaller groups that the decode kernel without them is compiled for."""
HND = "HND"


@dataclass(frozen=True, slots=True)
class Variant:
    """What a plan is made for besides the tables."""

    scaling: float
    window: int | None
    softcap: float

    def options(self) -> dict[str, Any]:
        """In flashinfer's words: its window does not count the token itself."""
        return {
            "sm_scale": self.scaling,
            "window_left": -1 if self.window is None else self.window - 1,
            "logits_soft_cap": self.softcap,
        }


@dataclass(slots=True)
class Planned:
    """Wrappers planned for one step."""

    decode: Any = None
    prefill: Any = None


QUERY_STARTS, PREFILL_STARTS = LAST_LENS + 1, LAST_LENS + 2


class FlashInferPagedAttention(GpuAttention):
    """Over a pool [blocks, kv_heads, layers, 2, block_tokens, head_dim] of `heads` query heads."""

    def __init__(self, flashinfer: Any, pool: Tensor, layout: KvLayout, heads: int, prefill_kernel: str) -> None:
        super().__init__(layout, pool.device)
        self._flashinfer = flashinfer
        self._heads = heads
        self._dtype = pool.dtype
        self._prefill_kernel = prefill_kernel
        self._caches = [(pool[:, :, layer, 0], pool[:, :, layer, 1]) for layer in range(layout.layers)]
        self._workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=pool.device)
        group = heads // layout.kv_heads
        self._tensor_cores = group >= TENSOR_CORE_GROUP or group not in PLAIN_GROUPS
        self._wrappers: dict[Variant, Planned] = {}

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float, window: int | None, softcap: float
    ) -> Tensor:
        step, cache = self.step, self._caches[layer]
        self._write(step, cache, key, value)
        planned = self._planned(step, Variant(scaling, window, softcap))
        rows = _last_contiguous(query[0].transpose(0, 1))  # [tokens, heads, head_dim]
        out = torch.empty(rows.shape, dtype=rows.dtype, device=rows.device)
        if decodes := step.num_decodes:
            planned.decode.run(rows[:decodes], cache, out=out[:decodes])
        if step.num_tokens > decodes:
            planned.prefill.run(rows[decodes:], cache, out=out[decodes:])
        return out[None]

    def refill(self, step: Step, host: list[Tensor], num_blocks: int) -> None:
        super().refill(step, host, num_blocks)
        for variant, planned in step.planned.items():
            self._flashinfer.fast_decode_plan(
                planned.decode,
                step.host[TABLE_STARTS],
                step.device[TABLES][:num_blocks],
                step.host[LAST_LENS],
                *self._shape(),
                **self._types(),
                **variant.options(),
                global_override_indptr_cpu=step.host[TABLE_STARTS],
            )

    # ------------------------------------------------------------------ parts

    def _of_prompts(self, tables: StepTables) -> "list[array[int]]":
        return list(tables.prefill_starts())

    def _write(self, step: Step, cache: tuple[Tensor, Tensor], key: Tensor, value: Tensor) -> None:
        self._flashinfer.append_paged_kv_cache(
            _last_contiguous(key[0].transpose(0, 1)),
            _last_contiguous(value[0].transpose(0, 1)),
            step.device[ROWS],
            step.device[POSITIONS],
            cache,
            step.device[TABLES],
            step.device[TABLE_STARTS],
            step.device[LAST_LENS],
            kv_layout=HND,
        )

    def _planned(self, step: Step, variant: Variant) -> Planned:
        if (planned := step.planned.get(variant)) is None:
            plan: Callable[[Step, Variant], Planned] = self._plan_bucket if step.fixed else self._plan_step
            planned = step.planned[variant] = plan(step, variant)
        return planned

    def _plan_step(self, step: Step, variant: Variant) -> Planned:
        wrappers = self._wrappers.setdefault(variant, Planned())
        decodes, split = step.num_decodes, step.num_decode_blocks
        host, tables = step.host, step.device[TABLES]
        if decodes:
            wrappers.decode = wrappers.decode or self._decode_wrapper()
            wrappers.decode.plan(
                host[TABLE_STARTS][: decodes + 1],
                tables[:split],
                host[LAST_LENS][:decodes],
                *self._shape(),
                **self._types(),
                **variant.options(),
            )
        if step.num_tokens > decodes:
            wrappers.prefill = wrappers.prefill or self._flashinfer.BatchPrefillWithPagedKVCacheWrapper(
                self._workspace, HND, backend=self._prefill_kernel
            )
            wrappers.prefill.plan(
                host[QUERY_STARTS],
                host[PREFILL_STARTS],
                tables[split:],
                host[LAST_LENS][decodes:],
                *self._shape(),
                causal=True,
                **self._types(),
                **variant.options(),
            )
        return wrappers

    def _plan_bucket(self, step: Step, variant: Variant) -> Planned:
        wrapper = self._decode_wrapper(
            use_cuda_graph=True,
            paged_kv_indptr_buffer=step.device[TABLE_STARTS],
            paged_kv_indices_buffer=step.device[TABLES],
            paged_kv_last_page_len_buffer=step.device[LAST_LENS],
        )
        wrapper.plan(
            step.host[TABLE_STARTS],
            step.device[TABLES][: step.num_blocks].clone(),  # it is copied to where it came from
            step.host[LAST_LENS],
            *self._shape(),
            **self._types(),
            **variant.options(),
        )
        return Planned(decode=wrapper)

    def _decode_wrapper(self, **options: Any) -> Any:
        """Its kernel is named: left to choose, newer versions may take another library's, which was not tried."""
        return self._flashinfer.BatchDecodeWithPagedKVCacheWrapper(
            self._workspace, HND, use_tensor_cores=self._tensor_cores, backend="fa2", **options
        )

    def _shape(self) -> tuple[int, int, int, int]:
        return self._heads, self._layout.kv_heads, self._layout.head_dim, self._layout.block_tokens

    def _types(self) -> dict[str, torch.dtype]:
        return {"q_data_type": self._dtype, "kv_data_type": self._dtype}


def _last_contiguous(heads: Tensor) -> Tensor:
    """[tokens, heads, head_dim] whose last dimension is contiguous."""
    return heads if heads.stride(-1) == 1 else heads.contiguous()
