"""The `flashinfer` backend: paged attention on NVIDIA GPUs.

flashinfer reads the blocks in place. Per layer, K and V are strided views of the pool, [blocks, kv_heads, block_tokens,
head_dim]. flashinfer takes the strides of pages, heads and tokens ("HND"), which are equal for K and V as it requires.
One kernel writes the new keys and values.

Single tokens and prompts go to different kernels. The prompt kernel picks one tile size for all its rows, and on Hopper
it does not split a long context among thread blocks. Decodes batched with a prompt would be computed on tiles of 128
rows, one thread block a KV head, and the step would wait for them.

A plan holds for one (scale, window, softcap), the same for all layers of most models. Where layers differ, each
combination has wrappers and plans of its own. Plans are made on the CPU from host arrays, so they do not wait for the
GPU.
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
"""Bytes for partial results of split contexts, shared by all wrappers, whose kernels run one after the other.

flashinfer asks for 128 MiB, and overflows that with 256 decodes of many heads."""
TENSOR_CORE_GROUP = 4
"""Query heads per KV head from which decoding is faster on tensor cores."""
PLAIN_GROUPS = (1, 2, 3)
"""Group sizes that the decode kernel without tensor cores is compiled for."""
HND = "HND"


@dataclass(frozen=True, slots=True)
class Variant:
    """Attention parameters that a plan is made for, besides the tables."""

    scaling: float
    window: int | None
    softcap: float

    def options(self) -> dict[str, Any]:
        """Return flashinfer's options.

        Its window does not count the token itself.
        """
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
    """Paged attention by flashinfer, for `heads` query heads.

    The pool is [blocks, kv_heads, layers, 2, block_tokens, head_dim].
    """

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
            # a clone, because flashinfer copies it back to the same memory
            step.device[TABLES][: step.num_blocks].clone(),
            step.host[LAST_LENS],
            *self._shape(),
            **self._types(),
            **variant.options(),
        )
        return Planned(decode=wrapper)

    def _decode_wrapper(self, **options: Any) -> Any:
        """Make a decode wrapper with a named kernel.

        Left to choose, newer versions would take another library's kernel, which is untested.
        """
        return self._flashinfer.BatchDecodeWithPagedKVCacheWrapper(
            self._workspace, HND, use_tensor_cores=self._tensor_cores, backend="fa2", **options
        )

    def _shape(self) -> tuple[int, int, int, int]:
        return self._heads, self._layout.kv_heads, self._layout.head_dim, self._layout.block_tokens

    def _types(self) -> dict[str, torch.dtype]:
        return {"q_data_type": self._dtype, "kv_data_type": self._dtype}


def _last_contiguous(heads: Tensor) -> Tensor:
    """Return [tokens, heads, head_dim] with a contiguous last dimension."""
    return heads if heads.stride(-1) == 1 else heads.contiguous()
