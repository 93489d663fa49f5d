"""Bytes of blocks in each layout of vLLM's KV memory, and settings that the engine refuses before it imports vLLM."""

import numpy as np
import pytest
import torch
from torch import Tensor

from engine.backends.vllm.kv.memory import LayerPlace, VllmKvMemory, pool_allocation
from engine.config import WorkerConfig
from engine.errors import EngineStartError
from kvtransfer.transport import Pool
from support.refusals import refusal_of

LAYERS, HEADS, TOKENS, ELEMENTS = 3, 2, 4, 8
LAYOUTS = ("LBHNC", "LBNHC", "BHLNC", "BLHNC", "BLNHC")
WHOLE_HEADS = ("LBHNC", "BHLNC")
"""Layouts in which the bytes of a head lie together."""


class Allocated:
    """Random KV memory of three layers, allocated as vLLM does on a CPU, or taken for a device's memory."""

    def __init__(self, layout: str, num_blocks: int, seed: int, on_device: bool = False, ranks: int = 1) -> None:
        pools: list[Pool] = []
        with pool_allocation(False, pools):
            raw = torch.zeros(num_blocks * LAYERS * HEADS * TOKENS * ELEMENTS * 4, dtype=torch.int8)
        sizes = {"L": LAYERS, "B": num_blocks, "H": HEADS, "N": TOKENS, "C": ELEMENTS}
        whole = raw.view(torch.float32).view([sizes[letter] for letter in layout])
        whole.copy_(torch.randn(whole.shape, generator=torch.Generator().manual_seed(seed)))
        # vLLM's view of a layer is [blocks, heads, tokens, elements], whatever lies where
        whole = whole.permute([layout.index(letter) for letter in "LBHNC"])
        self.layers: list[Tensor] = list(whole.unbind(0))
        caches = {f"layer {number}": layer for number, layer in enumerate(self.layers)}
        places = [LayerPlace(4 * layer.storage_offset(), 4 * layer.stride(0)) for layer in self.layers]
        memory = None if on_device else pools
        self.memory = VllmKvMemory(caches, places, num_blocks, TOKENS, "backend", memory, ranks=ranks)
        self.pools = pools


@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_block_read_from_one_memory_is_written_into_another(layout: str, on_device: bool) -> None:
    """The pools are of unlike sizes, so that spans of a block lie at unlike distances."""
    source, target = Allocated(layout, 5, 1), Allocated(layout, 7, 2, on_device)
    found = source.memory.layout
    assert (found.planes, found.kv_heads) == (LAYERS if layout[0] == "L" else 1, HEADS if layout in WHOLE_HEADS else 1)
    before = [layer.clone() for layer in target.layers]
    contents = source.memory.read_blocks([4, 1])
    assert [content.shape for content in contents] == 2 * [(source.memory.layout.block_bytes,)]
    for block, content in zip((6, 2), contents, strict=True):
        target.memory.write_block(block, content.copy())
    for number, layer in enumerate(target.layers):
        assert torch.equal(layer[6], source.layers[number][4])
        assert torch.equal(layer[2], source.layers[number][1])
        others = [0, 1, 3, 4, 5]
        assert torch.equal(layer[others], before[number][others]), "no other block has changed"
    assert np.array_equal(target.memory.fingerprints([6, 2]), source.memory.fingerprints([4, 1]))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_bytes_of_a_block_have_one_order(layout: str) -> None:
    """One span as it lies in memory; several in the order of the layers."""
    allocated = Allocated(layout, 5, 3)
    (content,) = allocated.memory.read_blocks([3])
    layers = torch.stack([layer[3] for layer in allocated.layers])  # [layers, heads, tokens, elements]
    in_order = layers.permute(["LHNC".index(letter) for letter in layout.replace("B", "")])
    assert content.tobytes() == in_order.contiguous().numpy().tobytes()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_spans_of_a_device_are_those_of_main_memory(layout: str) -> None:
    """What only runs on a GPU reads the same bytes, and finds the same fingerprints."""
    host, device = Allocated(layout, 5, 3), Allocated(layout, 5, 3, on_device=True)
    for ours, others in zip(device.memory.read_blocks([3, 1]), host.memory.read_blocks([3, 1]), strict=True):
        assert ours.tobytes() == others.tobytes()
    assert np.array_equal(device.memory.fingerprints([0, 3, 4]), host.memory.fingerprints([0, 3, 4]))
    assert device.memory.pool.num_bytes == host.memory.pool.num_bytes
    assert device.memory.part == host.memory.part


@pytest.mark.parametrize("layout", LAYOUTS)
def test_ranks_need_heads_that_lie_together(layout: str) -> None:
    if layout in WHOLE_HEADS:
        assert Allocated(layout, 5, 1, ranks=2).memory.layout.kv_heads == 2 * HEADS
        return
    with refusal_of("tensor_parallel", EngineStartError, match="attention_backend"):
        Allocated(layout, 5, 1, ranks=2)


def test_a_layout_whose_blocks_lie_in_more_spans_is_refused() -> None:
    with pytest.raises(EngineStartError, match="VLLM_KV_CACHE_LAYOUT"):
        Allocated("LHBNC", 5, 1)


def test_unlike_layouts_share_no_fingerprint() -> None:
    found = {Allocated(layout, 5, 3).memory.layout.fingerprint(b"weights") for layout in WHOLE_HEADS}
    assert len(found) == len(WHOLE_HEADS)


def check(settings: dict[str, object]) -> None:
    config = WorkerConfig.parse({"model": "m", "engine": "vllm"} | settings)
    config.kind.check(config, "decode")


@pytest.mark.parametrize(
    ("settings", "field", "reason"),
    [
        ({"vllm_options": {"kv_offloading_size": 1.0}}, "vllm_options", "kv_offloading_size: it would replace"),
        ({"vllm_options": {"block_size": 16}}, "vllm_options", "block_size is set by Tandem: set block_tokens"),
    ],
)
def test_what_the_engine_cannot_do_is_refused_by_name(settings: dict[str, object], field: str, reason: str) -> None:
    with refusal_of(field, EngineStartError, match=reason):
        check(settings)


def test_stores_are_taken() -> None:
    check({"kv_store": "d", "kv_disk_dir": "d", "kv_host_memory_mib": 64})


@pytest.mark.parametrize("block_major", [False, True])
def test_layers_of_several_groups_lie_at_the_same_places(block_major: bool) -> None:
    """A block belongs to one group at a time: two layers of attention, or two states of two tensors each."""
    num_blocks, page = 5, HEADS * TOKENS * ELEMENTS * 4
    pools: list[Pool] = []
    with pool_allocation(False, pools):
        raw = torch.zeros(num_blocks * 2 * page, dtype=torch.int8)
    offsets, stride = ((0, page), 2 * page) if block_major else ((0, num_blocks * page), page)
    caches: dict[str, Tensor | list[Tensor]] = {}
    for number, offset in enumerate(offsets):
        pages = raw.as_strided((num_blocks, page), (stride, 1), offset)
        caches[f"attention {number}"] = pages.view(torch.float32).unflatten(1, (HEADS, TOKENS, ELEMENTS))
        caches[f"state {number}"] = [pages[:, : page // 4], pages[:, page // 4 :]]
    places = [LayerPlace(offset, stride) for offset in offsets for _ in ("attention", "state")]
    memory = VllmKvMemory(caches, places, num_blocks, TOKENS, "backend", pools)
    assert (memory.layout.planes, memory.layout.kv_heads) == (1 if block_major else 2, 1)
    assert memory.layout.block_bytes == 2 * page
    content = np.random.default_rng(3).integers(0, 256, 2 * page, np.uint8)
    memory.write_block(3, content)
    for number in range(2):
        conv, rest = caches[f"state {number}"]
        written = torch.cat([conv[3], rest[3]]).numpy().view(np.uint8)
        assert np.array_equal(written, content[number * page :][:page])
        assert not conv[[0, 1, 2, 4]].any()
    (found,) = memory.read_blocks([3])
    assert np.array_equal(found, content)


def test_layers_of_unlike_places_are_refused() -> None:
    pools: list[Pool] = []
    with pool_allocation(False, pools):
        raw = torch.zeros(4 * 96, dtype=torch.int8)
    caches = {"a": raw[: 4 * 64].view(4, 1, 64), "b": raw[4 * 64 :].view(4, 1, 32)}
    with pytest.raises(EngineStartError, match="unknown layout"):
        VllmKvMemory(caches, [LayerPlace(0, 64), LayerPlace(4 * 64, 32)], 4, TOKENS, "backend", pools)
