"""KV memory of a vLLM engine: where vLLM allocates it, how a block lies in it, and its fingerprints."""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.overrides import TorchFunctionMode

from engine.backends.torch.kv import BlockBytes, TensorFingerprints
from engine.backends.vllm.kv.stages import HEADS, LAYERS, Stage
from engine.block_parts.messages import FingerprintingRank, GatheredBlocks, Joined
from engine.errors import EngineStartError
from engine.host.memory import pool_memory
from kvcache.layout import KV_FORMAT, Allocate, KvLayout
from kvtransfer.fingerprint import WORD_BYTES, Cut, Fingerprints, PlaneFingerprints
from kvtransfer.ranks import ALL, MAX_PLANES, BlockPart, RankGrid, Share
from kvtransfer.transport import AnyPool, DevicePool, Pool

if TYPE_CHECKING:
    from engine.backends.vllm.kv.groups import KvGroups


class LayerPlace(NamedTuple):
    """Place of a layer's part of blocks: it begins at `offset` + block number * `stride`, in bytes of the pool."""

    offset: int
    stride: int


@dataclass(frozen=True, slots=True)
class VllmLayout(KvLayout):
    """Layout of a block in vLLM's memory, all ranks together.

    A block is one span per plane, with keys and values as vLLM's attention packs them. `kv_heads` is 1 where the bytes
    of a head do not lie together: then a head has no fingerprint of its own, and ranks cannot share blocks.

        layout of vLLM   planes   span                        kv_heads
        BHLNC            1        [heads, layers, tokens, c]  heads
        BLHNC, BLNHC     1        a block of all layers       1
        LBHNC            layers   [heads, tokens, c]          heads
        LBNHC            layers   [tokens, heads, c]          1
    """

    planes: int = 1
    """Spans per block: 1 where all layers of a block lie together, or the number of layers."""
    span_bytes: int = 0
    backend: str = ""
    """Attention backend and vLLM version, which decide how keys and values are packed."""
    groups: "KvGroups | None" = None
    """KV groups of the model; None for one group of full attention."""
    division: str = ""
    """Text of the pipeline stages where blocks are not those of a worker with one stage."""

    def blocks_for(self, num_tokens: int) -> int:
        """Return the number of blocks, of all KV groups, that hold `num_tokens` tokens."""
        if self.groups is None:  # the zero-argument super() does not work in a class with slots
            return KvLayout.blocks_for(self, num_tokens)
        return self.groups.blocks_for(num_tokens)

    @property
    def block_bytes(self) -> int:
        """Bytes of a whole block."""
        return self.planes * self.span_bytes

    @property
    def head_bytes(self) -> int:
        """Bytes of one KV head within a block, all planes together."""
        return self.block_bytes // self.kv_heads

    def fingerprint(self, weights: bytes) -> bytes:
        """Return the fingerprint that workers must share to exchange blocks: weights, layout, backend and dtype.

        32 bytes.
        """
        shape = f"vllm,{self.backend},{self.planes},{self.span_bytes},{self.layers},{self.kv_heads}"
        shape += f",{self.block_tokens},{self.dtype},{KV_FORMAT}"
        shape += f",{self.groups.shape}" if self.groups is not None else ""
        shape += f",{self.division}" if self.division else ""
        return blake2b(shape.encode() + weights, digest_size=32).digest()


class PoolAllocation(TorchFunctionMode):
    """Context in which vLLM's allocation of KV memory on a CPU is served from `pool_memory`.

    Other engines of the host can then map it. vLLM allocates all layers as one tensor of bytes.
    """

    def __init__(self, in_file: bool) -> None:
        super().__init__()
        self._in_file = in_file
        self.pools: list[Pool] = []
        """Memory handed out, each uint8 [1, num_bytes]."""

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        named = dict(kwargs or {})
        is_pool = func is torch.zeros and len(args) == 1 and isinstance(args[0], int)
        on_cpu = torch.device(named.get("device") or "cpu").type == "cpu"
        if not is_pool or not on_cpu or named.get("dtype") is not torch.int8:
            return func(*args, **named)
        pool = pool_memory(1, args[0], self._in_file)
        self.pools.append(pool)
        return torch.from_numpy(pool.memory.reshape(-1).view(np.int8))


@contextlib.contextmanager
def pool_allocation(in_file: bool, pools: list[Pool]) -> Iterator[None]:
    """Serve vLLM's KV memory from `pool_memory` within the block; what was handed out is appended to `pools`."""
    with PoolAllocation(in_file) as allocation:
        yield
    pools += allocation.pools


class PlaneBytes:
    """Reader and writer of blocks of a pool in main memory, their spans in the order of the planes.

    Safe from any thread, but only for blocks that no running step writes or reads.
    """

    def __init__(self, pool: NDArray[np.uint8], num_blocks: int, planes: int) -> None:
        """Create it for a contiguous uint8 pool [planes, num_blocks, span_bytes] of any shape."""
        self._spans = pool.reshape(planes, num_blocks, -1)

    def read(self, blocks: Sequence[int]) -> list[NDArray[np.uint8]]:
        """Return the bytes of the blocks, [block_bytes] each; copies where a block is several spans."""
        return [self._spans[:, block].reshape(-1) for block in blocks]

    def write(self, block: int, content: NDArray[np.uint8]) -> None:
        """Set the bytes of a block."""
        self._spans[:, block] = content.reshape(len(self._spans), -1)


KvTensors = Mapping[str, Tensor | Sequence[Tensor]]
"""vLLM's KV tensors by layer name, [num_blocks, ...] each; a layer with a recurrent state has several."""


def _tensors_of(caches: KvTensors) -> list[Tensor]:
    """Return the tensors of all layers; those that several layers share count once."""
    by_layer = ([cache] if isinstance(cache, Tensor) else list(cache) for cache in caches.values())
    return list({tensor.data_ptr(): tensor for layer in by_layer for tensor in layer}.values())


def orders_of(caches: KvTensors, offsets: Sequence[int], step: int) -> frozenset[str]:
    """Return what lies together in a span of a block: HEADS and LAYERS, as far as they are true.

    `offsets` are those of the layers within the first block, and `step` is the distance of blocks.
    """
    tensors = _tensors_of(caches)
    kinds = {(tensor.shape, tensor.dtype) for tensor in tensors}
    has_heads = len(kinds) == 1 and all(tensor.stride(1) * tensor.shape[1] == tensor.stride(0) for tensor in tensors)
    has_layers = [offset * len(offsets) for offset in offsets] == [number * step for number in range(len(offsets))]
    return frozenset(name for name, is_true in ((HEADS, has_heads), (LAYERS, has_layers)) if is_true)


class VllmKvMemory:
    """KV memory of one rank after vLLM has allocated it."""

    def __init__(
        self,
        caches: KvTensors,
        places: Iterable[LayerPlace],
        num_blocks: int,
        block_tokens: int,
        backend: str,
        pools: Sequence[Pool] | None,
        groups: "KvGroups | None" = None,
        ranks: int = 1,
        rank: int = 0,
        stage: Stage | None = None,
    ) -> None:
        """Read the layout off vLLM's tensors.

        `places` tell where the layers' parts of blocks lie. Layers of different groups may have the same place, since a
        block belongs to one group at a time. `pools` is the main memory that vLLM was given for them; None: they are
        in a device's memory. This process has share `rank` of `ranks` of the heads, in the layers of its pipeline
        `stage`; None: in all layers.

        Raises EngineStartError for a layout in which a block is not one span per layer, or one span in all, and for
        several ranks with a layout in which a head's bytes do not lie together.
        """
        tensors = _tensors_of(caches)
        first = tensors[0]
        storage = first.untyped_storage()
        if any(tensor.untyped_storage().data_ptr() != storage.data_ptr() for tensor in tensors):
            raise EngineStartError("model", "vLLM keeps the KV of its layers in several allocations; Tandem needs one")
        offsets, strides = sorted({place.offset for place in places}), {place.stride for place in places}
        total, step = storage.nbytes(), min(strides)
        planes = 1 if step * num_blocks == total else len(offsets)
        apart = all(offset == plane * step * num_blocks for plane, offset in enumerate(offsets))
        if len(strides) > 1 or planes * step * num_blocks != total or not (planes == 1 or apart):
            reason = f"vLLM's KV memory has an unknown layout: {total} bytes, {num_blocks} blocks, places {offsets}, "
            raise EngineStartError("model", f"{reason}strides {strides}; unset VLLM_KV_CACHE_LAYOUT if it is set")
        if stage is None:
            stage = Stage(ALL, planes, planes * step, len(caches), HEADS in orders_of(caches, offsets, step))
        if stage.planes > MAX_PLANES:
            raise EngineStartError(
                "model", f"a block of this model has {stage.planes} spans; Tandem moves at most {MAX_PLANES}"
            )
        if ranks > 1 and not stage.has_heads:
            reason = f"{ranks} needs a KV layout in which a head's bytes lie together, BHLNC or LBHNC; vLLM chose "
            reason += "another for this model: set vllm_options.attention_backend"
            raise EngineStartError("tensor_parallel", reason)
        kv_heads = int(first.shape[1]) if first.dim() == 4 and stage.has_heads else 1
        self.layout = VllmLayout(
            layers=stage.layers,
            kv_heads=kv_heads * ranks,
            head_dim=first.shape[-1],
            block_tokens=block_tokens,
            dtype=str(first.dtype).removeprefix("torch."),
            planes=stage.planes,
            span_bytes=stage.block_bytes * ranks // stage.planes,
            backend=backend,
            groups=groups,
            division=stage.division,
        )
        self.num_blocks = num_blocks
        self.shares: Sequence[Share] = (ALL,)
        heads = self.layout.kv_heads
        self.part = BlockPart(self.layout.block_bytes, rank, ranks, stage.planes, num_blocks, stage.share, heads)
        """Part of each block that this rank holds."""
        assert self.part.num_bytes == planes * step, (self.part, planes, step)
        self.part_fingerprints: Callable[[Sequence[int]], NDArray[np.uint64]]
        """Function that returns fingerprints of this rank's part of blocks, [blocks, this rank's KV heads]."""
        self._bytes: BlockBytes | PlaneBytes
        self.pool = self._pool_of(first, total, pools, kv_heads)

    def _pool_of(self, tensor: Tensor, num_bytes: int, pools: Sequence[Pool] | None, heads: int) -> AnyPool:
        part, planes = self.part, len(self.part.own_planes)
        address, block_bytes = tensor.untyped_storage().data_ptr(), part.num_bytes
        plane_cut = head_cut = None
        if part.planes > 1:
            plane_cut = Cut(part.own_planes.start, part.planes)
        else:
            head_cut = Cut(part.columns.start // WORD_BYTES, part.block_bytes // self.layout.kv_heads // WORD_BYTES)
        if pools is None:
            raw = torch.empty(0, dtype=torch.uint8, device=tensor.device)
            shape = (self.num_blocks, block_bytes) if planes == 1 else (planes, self.num_blocks, block_bytes // planes)
            raw.set_(tensor.untyped_storage(), 0, shape)  # type: ignore[call-overload]
            self.part_fingerprints = TensorFingerprints(raw, heads, planes, self.num_blocks, plane_cut, head_cut).of
            self._bytes = BlockBytes(raw, planes)
            return DevicePool(address, self.num_blocks, block_bytes, tensor.device.index or 0, owner=tensor)
        if len(pools) != 1 or pools[0].memory.ctypes.data != address or pools[0].num_bytes != num_bytes:
            raise EngineStartError("model", f"vLLM allocated KV memory in {len(pools)} parts; Tandem needs one")
        memory = pools[0].memory.reshape(self.num_blocks, block_bytes)
        self._bytes = PlaneBytes(memory, self.num_blocks, planes)
        if plane_cut is None:
            self.part_fingerprints = Fingerprints(memory, heads, head_cut).of
        else:
            self.part_fingerprints = PlaneFingerprints(memory, self.num_blocks, planes, heads, plane_cut).of
        return Pool(memory, file=pools[0].file)

    def fingerprints(self, blocks: Sequence[int]) -> NDArray[np.uint64]:
        """Return fingerprints of whole blocks, [blocks, KV heads], of the only rank."""
        return self.part_fingerprints(blocks)

    def read_blocks(self, blocks: Sequence[int]) -> Sequence[NDArray[np.uint8]]:
        """Return the bytes of this rank's part of blocks that no step writes."""
        return self._bytes.read(blocks)

    def write_block(self, block: int, content: NDArray[np.uint8]) -> None:
        """Set this rank's part of a block that no step uses; it is visible on return."""
        self._bytes.write(block, content)


class RankedKvMemory:
    """KV memory of an engine whose ranks are all in other processes; this one has none."""

    pool: AnyPool | None = None

    def __init__(
        self,
        layout: VllmLayout,
        num_blocks: int,
        ranks: Sequence[FingerprintingRank],
        allocate: Allocate,
        grid: RankGrid,
        shares: Sequence[Share] = (ALL,),
    ) -> None:
        """Create it.

        `allocate` returns memory that all `ranks` map. They are a `grid`, whose stages have `shares` of the layers.
        """
        self.layout = layout
        self.num_blocks = num_blocks
        self.grid, self.shares = grid, shares
        self._ranks = ranks[:: grid.replicas]
        self._gathered = GatheredBlocks(layout.block_bytes, self._ranks, allocate)

    def fingerprints(self, blocks: Sequence[int]) -> NDArray[np.uint64]:
        """Return fingerprints of whole blocks that no step writes, [blocks, KV heads]; all ranks compute at once.

        From any thread. Raises RankLost.
        """
        begun = [rank.begin_fingerprints(blocks) for rank in self._ranks]
        return self.grid.joined([rank.end_fingerprints(each) for rank, each in zip(self._ranks, begun, strict=True)])

    def read_blocks(self, blocks: Sequence[int]) -> Iterable[NDArray[np.uint8]]:
        """Return the bytes of whole blocks that no step writes; each valid until the next is asked for."""
        return self._gathered.read(blocks)

    def write_block(self, block: int, content: NDArray[np.uint8]) -> None:
        """Write this process's part of a block: nothing."""


def joined_memory(
    joined: Sequence[Joined],
    ranks: Sequence[FingerprintingRank],
    groups: "KvGroups",
    grid: RankGrid,
    stages: Sequence[Stage | None],
    allocate: Allocate,
) -> RankedKvMemory:
    """Return the KV memory of all ranks, which have `joined` and are a `grid` of pipeline `stages`.

    Raises EngineStartError for ranks with unlike memory.
    """
    layouts = [each.layout for each in joined if isinstance(each.layout, VllmLayout)]
    facts = {(each, of.num_blocks) for each, of in zip(layouts, joined, strict=False)}
    if grid.stages > 1:  # the first layer of a stage may be of another kind
        facts = {(replace(each, dtype="", head_dim=0), num_blocks) for each, num_blocks in facts}
    if len(facts) != 1 or len(layouts) != len(joined):
        raise EngineStartError("model", f"vLLM gave the ranks unlike KV memory: {facts}")
    layout, shares = replace(layouts[0], groups=groups), [ALL if each is None else each.share for each in stages]
    return RankedKvMemory(layout, joined[0].num_blocks, ranks, allocate, grid, shares)


KvMemory = VllmKvMemory | RankedKvMemory
