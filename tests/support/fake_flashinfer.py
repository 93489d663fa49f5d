"""flashinfer without a GPU, for tests of what is done with it.

It does on the CPU what flashinfer documents, and no more: it reads pages through the strides of the views it is given,
knows only what was planned, and in graph mode only what its buffers hold. tests/gpu runs the real one.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import silu


class _Wrapper:
    """What decode and prefill wrappers share."""

    def __init__(self, workspace: Tensor, kv_layout: str, backend: str) -> None:
        assert workspace.dtype == torch.uint8
        assert kv_layout == "HND"
        assert backend in ("fa2", "fa3")
        self.planned: dict[str, Any] = {}

    def _remember(self, heads: int, kv_heads: int, head_dim: int, page: int, **options: Any) -> None:
        assert set(options) == {"q_data_type", "kv_data_type", "sm_scale", "window_left", "logits_soft_cap"}
        self.planned = options | {"shape": (heads, kv_heads, head_dim, page)}

    def _attend(
        self,
        q: Tensor,
        cache: tuple[Tensor, Tensor],
        out: Tensor,
        query_starts: Tensor,
        starts: Tensor,
        indices: Tensor,
        last: Tensor,
    ) -> Tensor:
        assert all(t.dtype == torch.int32 for t in (query_starts, starts, indices, last))
        assert q.dtype == self.planned["q_data_type"]
        assert out.is_contiguous()
        assert cache[0].stride() == cache[1].stride()
        heads, kv_heads, _, page = self.planned["shape"]
        for row in range(len(last)):
            pages = indices[starts[row] : starts[row + 1]].long()
            length = (len(pages) - 1) * page + int(last[row])
            keys, values = (part[pages].transpose(1, 2).flatten(0, 1)[:length] for part in cache)
            keys, values = (part.repeat_interleave(heads // kv_heads, 1).float() for part in (keys, values))
            first, end = int(query_starts[row]), int(query_starts[row + 1])
            scores = torch.einsum("qhd,khd->hqk", q[first:end].float(), keys) * self.planned["sm_scale"]
            if cap := self.planned["logits_soft_cap"]:
                scores = torch.tanh(scores / cap) * cap
            own = torch.arange(length - (end - first), length)[:, None]
            seen = torch.arange(length) <= own
            if (left := self.planned["window_left"]) >= 0:
                seen &= torch.arange(length) >= own - left
            weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
            out[first:end] = torch.einsum("hqk,khd->qhd", weights, values).to(out.dtype)
        return out


class DecodeWrapper(_Wrapper):
    def __init__(
        self,
        workspace: Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        use_tensor_cores: bool = False,
        paged_kv_indptr_buffer: Tensor | None = None,
        paged_kv_indices_buffer: Tensor | None = None,
        paged_kv_last_page_len_buffer: Tensor | None = None,
        backend: str = "auto",
    ) -> None:
        super().__init__(workspace, kv_layout, backend)
        self.graph = use_cuda_graph
        self.buffers: list[Any] = [
            paged_kv_indptr_buffer,
            paged_kv_indices_buffer,
            paged_kv_last_page_len_buffer,
        ]

    def plan(self, indptr: Tensor, indices: Tensor, last: Tensor, *shape: int, **options: Any) -> None:
        self._remember(*shape, **options)
        assert len(indices) == indptr[-1]
        if not self.graph:
            self.buffers = [indptr, indices, last]
            return
        self.buffers[0].copy_(indptr)
        self.buffers[1][: len(indices)].copy_(indices)
        self.buffers[2].copy_(last)

    def run(self, q: Tensor, cache: tuple[Tensor, Tensor], out: Tensor) -> Tensor:
        starts, indices, last = self.buffers
        assert len(q) == len(last)
        return self._attend(q, cache, out, torch.arange(len(q) + 1, dtype=torch.int32), starts, indices, last)


class PrefillWrapper(_Wrapper):
    def __init__(self, workspace: Tensor, kv_layout: str = "NHD", backend: str = "auto") -> None:
        super().__init__(workspace, kv_layout, backend)
        self.tables: list[Tensor] = []

    def plan(
        self,
        qo_indptr: Tensor,
        indptr: Tensor,
        indices: Tensor,
        last: Tensor,
        *shape: int,
        causal: bool,
        **options: Any,
    ) -> None:
        assert causal
        assert len(indices) == indptr[-1]
        self._remember(*shape, **options)
        self.tables = [qo_indptr, indptr, indices, last]

    def run(self, q: Tensor, cache: tuple[Tensor, Tensor], out: Tensor) -> Tensor:
        assert len(q) == self.tables[0][-1]
        return self._attend(q, cache, out, *self.tables)


class FakeFlashinfer:
    BatchDecodeWithPagedKVCacheWrapper = DecodeWrapper
    BatchPrefillWithPagedKVCacheWrapper = PrefillWrapper

    @staticmethod
    def append_paged_kv_cache(
        key: Tensor,
        value: Tensor,
        rows: Tensor,
        positions: Tensor,
        cache: tuple[Tensor, Tensor],
        indices: Tensor,
        indptr: Tensor,
        last: Tensor,
        kv_layout: str = "NHD",
    ) -> None:
        assert kv_layout == "HND"
        assert all(t.dtype == torch.int32 for t in (rows, positions, indices, indptr, last))
        assert len(rows) == len(positions) == len(key)
        page = cache[0].shape[2]
        for token, (row, position) in enumerate(zip(rows.tolist(), positions.tolist(), strict=True)):
            block = int(indices[int(indptr[row]) + position // page])
            cache[0][block, :, position % page] = key[token]
            cache[1][block, :, position % page] = value[token]

    @staticmethod
    def fast_decode_plan(
        wrapper: DecodeWrapper,
        indptr: Tensor,
        indices: Tensor,
        last: Tensor,
        *shape: int,
        global_override_indptr_cpu: Tensor,
        **options: Any,
    ) -> None:
        """Copies nothing: the wrapper's buffers must hold the tables by now."""
        wrapper._remember(*shape, **options)
        assert indptr.tolist() == global_override_indptr_cpu.tolist() == wrapper.buffers[0].tolist()
        assert wrapper.buffers[1][: len(indices)].tolist() == indices.tolist()
        assert wrapper.buffers[2].tolist() == last.tolist()

    @staticmethod
    def rmsnorm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
        assert x.dim() == 2
        wide = x.float()
        return (weight.float() * wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)

    @staticmethod
    def silu_and_mul(x: Tensor) -> Tensor:
        gate, up = x.chunk(2, dim=-1)
        return silu(gate) * up

    @staticmethod
    def apply_rope_with_cos_sin_cache_inplace(
        positions: Tensor, query: Tensor, key: Tensor, head_size: int, cos_sin_cache: Tensor, is_neox: bool = True
    ) -> None:
        assert is_neox
        assert cos_sin_cache.dtype == torch.float32
        cos, sin = cos_sin_cache[positions][:, None].chunk(2, dim=-1)
        for heads in (query, key):
            view = heads.view(heads.shape[0], -1, head_size)
            first, second = view.float().chunk(2, dim=-1)
            view.copy_(torch.cat([first * cos - second * sin, second * cos + first * sin], -1).to(heads.dtype))
