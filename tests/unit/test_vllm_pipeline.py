"""Whole blocks of a worker with pipeline stages, from what vLLM allocates on each stage."""

import numpy as np
import pytest
import torch

from engine.backends.vllm.kv.memory import LayerPlace, VllmKvMemory, orders_of, pool_allocation
from engine.backends.vllm.kv.stages import Stage, StagePool, stages_of
from engine.errors import EngineStartError
from kvtransfer.ranks import RankGrid, part_spans
from kvtransfer.transport import Pool
from support.refusals import refusal_of

LAYERS, HEADS, TOKENS, ELEMENTS, BLOCKS = 5, 4, 4, 8, 6
LAYOUTS = ("LBHNC", "LBNHC", "BHLNC", "BLHNC", "BLNHC")
WHOLE_HEADS = ("LBHNC", "BHLNC")


class Allocated:
    """KV memory of one rank: some heads of some layers, as vLLM allocates it."""

    def __init__(self, content: torch.Tensor, layout: str, on_device: bool = False) -> None:
        """`content` is [layers, blocks, heads, tokens, elements]."""
        self.pools: list[Pool] = []
        with pool_allocation(False, self.pools):
            raw = torch.zeros(content.numel() * 4, dtype=torch.int8)
        sizes = dict(zip("LBHNC", content.shape, strict=True))
        whole = raw.view(torch.float32).view([sizes[letter] for letter in layout])
        whole = whole.permute([layout.index(letter) for letter in "LBHNC"])
        whole.copy_(content)
        layers = list(whole.unbind(0))
        self.caches = {f"layer {number}": layer for number, layer in enumerate(layers)}
        self.places = [LayerPlace(4 * layer.storage_offset(), 4 * layer.stride(0)) for layer in layers]
        self.on_device = on_device

    def facts(self) -> StagePool:
        offsets, step = sorted(place.offset for place in self.places), self.places[0].stride
        block_bytes = self.pools[0].num_bytes // BLOCKS
        return StagePool((len(self.caches),), block_bytes, orders_of(self.caches, offsets, step), ("Attention",))

    def memory(self, ranks: int = 1, rank: int = 0, stage: Stage | None = None) -> VllmKvMemory:
        pools = None if self.on_device else self.pools
        return VllmKvMemory(
            self.caches, self.places, BLOCKS, TOKENS, "backend", pools, ranks=ranks, rank=rank, stage=stage
        )


@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize("cuts", [(2,), (1, 4)])
@pytest.mark.parametrize(("layout", "ranks"), [*((each, 1) for each in LAYOUTS), *((each, 2) for each in WHOLE_HEADS)])
def test_parts_of_stages_are_the_blocks_of_one_process(
    layout: str, ranks: int, cuts: tuple[int, ...], on_device: bool
) -> None:
    content = torch.randn((LAYERS, BLOCKS, HEADS, TOKENS, ELEMENTS), generator=torch.Generator().manual_seed(3))
    one = Allocated(content, layout).memory()
    bounds = list(zip((0, *cuts), (*cuts, LAYERS), strict=True))
    each = HEADS // ranks
    allocated = [
        [Allocated(content[first:end, :, rank * each : (rank + 1) * each], layout, on_device) for rank in range(ranks)]
        for first, end in bounds
    ]
    stages = stages_of([of_stage[0].facts() for of_stage in allocated], layout.startswith("L"))
    parts = [
        allocated[number][rank].memory(ranks, rank, stage)
        for number, stage in enumerate(stages)
        for rank in range(ranks)
    ]
    assert {part.layout.fingerprint(b"weights") for part in parts} == {one.layout.fingerprint(b"weights")}
    prints = [part.part_fingerprints([3, 1]) for part in parts]
    np.testing.assert_array_equal(RankGrid(len(parts), len(stages)).joined(prints), one.fingerprints([3, 1]))
    rows = np.zeros((2, one.layout.block_bytes), np.uint8)
    for part in parts:
        for row, piece in zip(rows, part.read_blocks([3, 1]), strict=True):
            part.part.put(piece, row)
    assert [row.tobytes() for row in rows] == [block.tobytes() for block in one.read_blocks([3, 1])]
    assert all(part_spans(one.part, part.part, [(0, 0)]) for part in parts)


def test_groups_share_the_places_of_their_layers() -> None:
    heads = frozenset({"heads"})
    alike = stages_of([StagePool((1, 1), 64, heads, ()), StagePool((2, 2), 128, heads, ())], True)
    assert [(stage.share, stage.planes, stage.division) for stage in alike] == [((0, 1, 3), 3, ""), ((1, 3, 3), 3, "")]
    padded = stages_of([StagePool((1, 1), 64, heads, ()), StagePool((2, 1), 128, heads, ())], True)
    assert {stage.division for stage in padded} == {""}, "the group with fewer layers ends before the other"
    with refusal_of("pipeline_parallel", EngineStartError, match=r"have \(2, 0\), \(0, 2\) layers by group"):
        stages_of([StagePool((2, 0), 128, heads, ()), StagePool((0, 2), 128, heads, ())], True)


def test_layers_of_unlike_shapes_in_one_span_are_a_layout_of_their_own() -> None:
    unlike = stages_of([StagePool((2,), 96, frozenset(), ()), StagePool((2,), 64, frozenset(), ())], False)
    assert [(stage.share, stage.has_heads) for stage in unlike] == [((0, 3, 5), False), ((3, 5, 5), False)]
    assert {stage.division for stage in unlike} == {"[(2,), (2,)]"}


def test_a_stage_without_layers_is_refused() -> None:
    pools = [StagePool((1,), 64, frozenset({"heads"}), ()), StagePool((0,), 0, frozenset(), ())]
    with refusal_of("pipeline_parallel", EngineStartError, match="leaves stage 1 without attention layers"):
        stages_of(pools, True)
