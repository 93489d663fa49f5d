"""Bytes of blocks in each layout of vLLM's KV memory, and settings that the engine refuses before it imports vLLM."""

import numpy as np
import pytest
import torch
from torch import Tensor

from engine.backends.vllm.kv_memory import VllmKvMemory, pool_allocation
from engine.config import WorkerConfig
from engine.errors import EngineStartError
from engine.process.vllm_arguments import engine_arguments
from kvtransfer.transport import Pool

LAYERS, HEADS, TOKENS, ELEMENTS = 3, 2, 4, 8
LAYOUTS = ("LBHNC", "BHLNC")


class Allocated:
    """Random KV memory of three layers, allocated as vLLM does on a CPU."""

    def __init__(self, layout: str, num_blocks: int, seed: int) -> None:
        pools: list[Pool] = []
        with pool_allocation(False, pools):
            raw = torch.zeros(num_blocks * LAYERS * HEADS * TOKENS * ELEMENTS * 4, dtype=torch.int8)
        sizes = {"L": LAYERS, "B": num_blocks, "H": HEADS, "N": TOKENS, "C": ELEMENTS}
        whole = raw.view(torch.float32).view([sizes[letter] for letter in layout])
        whole.copy_(torch.randn(whole.shape, generator=torch.Generator().manual_seed(seed)))
        self.layers: list[Tensor] = list(whole.unbind(layout.index("L")))
        caches = {f"layer {number}": layer for number, layer in enumerate(self.layers)}
        self.memory = VllmKvMemory(caches, num_blocks, TOKENS, "backend", pools)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_block_read_from_one_memory_is_written_into_another(layout: str) -> None:
    """The pools are of unlike sizes, so that spans of a block lie at unlike distances."""
    source, target = Allocated(layout, 5, 1), Allocated(layout, 7, 2)
    assert source.memory.layout.planes == (LAYERS if layout == "LBHNC" else 1)
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
    layers = torch.stack([layer[3] for layer in allocated.layers], dim=layout.replace("B", "").index("L"))
    assert content.tobytes() == layers.numpy().tobytes()


def test_unlike_layouts_share_no_fingerprint() -> None:
    first, second = (Allocated(layout, 5, 3).memory.layout.fingerprint(b"weights") for layout in LAYOUTS)
    assert first != second


@pytest.mark.parametrize(
    ("settings", "field", "reason"),
    [
        ({"kv_host_memory_mib": 64}, "kv_host_memory_mib", "set kv_store"),
        ({"kv_disk_dir": "d", "kv_host_memory_mib": 64}, "kv_host_memory_mib", "set kv_store"),
        ({"vllm_options": {"kv_offloading_size": 1.0}}, "vllm_options", "kv_offloading_size: it would replace"),
        ({"vllm_options": {"block_size": 16}}, "vllm_options", "block_size is set by Tandem: set block_tokens"),
    ],
)
def test_what_the_engine_cannot_do_is_refused_by_name(settings: dict[str, object], field: str, reason: str) -> None:
    with pytest.raises(EngineStartError, match=reason) as refused:
        engine_arguments(WorkerConfig.parse({"model": "m", "engine": "vllm"} | settings))
    assert refused.value.field == field


def test_the_shared_store_is_taken() -> None:
    engine_arguments(WorkerConfig.parse({"model": "m", "engine": "vllm", "kv_store": "d"}))
