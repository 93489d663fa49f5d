"""The parts of the GPU backend that need no GPU: tables, plans, buckets and their padding, replaced modules."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM

from engine.backends.torch.attention import use_attention
from engine.backends.torch.cuda.flashinfer_attention import FlashInferPagedAttention
from engine.backends.torch.cuda.graphs import Captured, DecodeGraphs
from engine.backends.torch.cuda.library import load_flashinfer
from engine.backends.torch.cuda.modules import FusedRotary, fuse, is_linear, join_layers
from engine.backends.torch.cuda.tables import Sections, StepTables
from engine.backends.torch.device import choose_device, read_back, staged
from engine.backends.torch.kv import fingerprint
from engine.backends.torch.kv.block_bytes import BlockBytes
from engine.backends.torch.kv.fingerprint import TensorFingerprints
from engine.backends.torch.loading.loader import kv_layout, load_model
from engine.backends.torch.runner import BuiltModel, TorchRunner
from engine.backends.torch.sdpa import SdpaPagedAttention
from engine.core_types import Chunk, SamplingParams, Sequence
from engine.errors import EngineStartError, KernelsUnavailable
from engine.kv.layout import KvLayout
from engine.model.model_dir import ModelDir
from kvtransfer.errors import EndpointMismatch, TransportUnavailable
from kvtransfer.fingerprint import PlaneFingerprints, fingerprint_blocks
from kvtransfer.local import LocalNetwork, LocalTransport
from kvtransfer.transport import DevicePool, Pool
from kvtransfer.ucx.nixl_agent import FORMAT, Endpoint, Memory, parse_endpoint
from support.fake_flashinfer import FakeFlashinfer

CPU = torch.device("cpu")
no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens without a GPU")


def sequence(length: int, first_block: int, layout: KvLayout, seed: int = 0) -> Sequence:
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(1, 500, (length,), generator=generator).tolist()
    blocks = [first_block + 2 * i for i in range(layout.blocks_for(length))]  # not side by side
    return Sequence("a", tokens, length, b"", SamplingParams(1), 0, 0, blocks=blocks)


LAYOUT = KvLayout(layers=3, kv_heads=2, head_dim=8, block_tokens=4, dtype="float32")


# ---------------------------------------------------------------------------- tables


def test_tables_of_a_mixed_step() -> None:
    decode, prompt, single = sequence(9, 0, LAYOUT), sequence(7, 20, LAYOUT), sequence(5, 40, LAYOUT)
    step = StepTables.of(LAYOUT, [Chunk(decode, 8, 1), Chunk(prompt, 2, 5), Chunk(single, 4, 1)])
    assert step.num_decodes == 1  # a single token after a prompt goes with the prompts
    assert step.positions.tolist() == [8, 2, 3, 4, 5, 6, 4]
    assert step.rows.tolist() == [0, 1, 1, 1, 1, 1, 2]
    assert step.tables.tolist() == [0, 2, 4, 20, 22, 40, 42]
    assert step.table_starts.tolist() == [0, 3, 5, 7]
    assert step.last_lens.tolist() == [1, 3, 1]
    assert [values.tolist() for values in step.prefill_starts()] == [[0, 5, 6], [0, 2, 4]]


def test_a_full_last_block_counts_as_full() -> None:
    assert StepTables.of(LAYOUT, [Chunk(sequence(8, 0, LAYOUT), 7, 1)]).last_lens.tolist() == [4]


def test_padding_is_decodes_in_the_scratch_block() -> None:
    step = StepTables.of(LAYOUT, [Chunk(sequence(5, 0, LAYOUT), 4, 1)])
    step.pad(LAYOUT, 3, block=99)
    assert (step.num_decodes, step.num_chunks, step.num_tokens) == (3, 3, 3)
    assert step.tables.tolist() == [0, 2, 99, 99]
    assert step.table_starts.tolist() == [0, 2, 3, 4]
    assert step.last_lens.tolist() == [1, 1, 1]
    assert step.positions.tolist() == [4, 0, 0]


def test_sections_lie_apart_and_are_aligned() -> None:
    sections = Sections([3, 0, 17])
    assert sections.offsets == [0, 16, 16, 48]
    buffer = torch.zeros(sections.num_elements, dtype=torch.int32)
    step = StepTables.of(LAYOUT, [Chunk(sequence(5, 0, LAYOUT), 2, 3)])
    assert sections.fill(buffer, [step.positions, step.prefill_starts()[0][:0], step.tables]) == 18
    assert sections.views(buffer)[0].tolist() == [2, 3, 4]
    assert sections.views(buffer)[2][:2].tolist() == [0, 2]


def test_what_is_computed_to_warm_up_is_written_into_nobodys_block(tiny_model: Path) -> None:
    runner = TorchRunner(tiny_model, "float32", block_tokens=16, kv_bytes=1 << 20, backend="sdpa", device="cpu")
    scratch = runner.pool.num_blocks - 1
    runner.paged.warm_up(scratch, runner.info.max_context_tokens)
    blocks = runner.paged.memory.byte_blocks
    assert blocks[scratch].any()
    assert not blocks[:scratch].any()


# ---------------------------------------------------------------------------- attention


@pytest.mark.parametrize(("window", "softcap"), [(None, 0.0), (3, 0.0), (None, 20.0), (5, 30.0)])
@pytest.mark.parametrize("heads", [2, 4, 10])
def test_attention_equals_sdpa(window: int | None, softcap: float, heads: int) -> None:
    shape = (64, LAYOUT.kv_heads, LAYOUT.layers, 2, LAYOUT.block_tokens, LAYOUT.head_dim)
    generator = torch.Generator().manual_seed(1)
    pool = torch.randn(shape, generator=generator)
    ours, theirs = pool.clone(), pool.clone()
    fake = FlashInferPagedAttention(FakeFlashinfer(), ours, LAYOUT, heads, "fa2")
    sdpa = SdpaPagedAttention(theirs, LAYOUT)
    first, second, prompt, fresh = (sequence(n, b, LAYOUT) for n, b in ((9, 0), (16, 1), (13, 20), (6, 40)))
    steps = [
        [Chunk(first, 8, 1), Chunk(second, 15, 1), Chunk(prompt, 3, 10), Chunk(fresh, 0, 6)],
        [Chunk(first, 8, 1), Chunk(second, 15, 1)],
        [Chunk(fresh, 0, 5), Chunk(first, 8, 1)],
    ]
    for chunks in steps:
        tokens = sum(chunk.count for chunk in chunks)
        for attention in (fake, sdpa):
            attention.prepare(chunks)
        for layer in (0, 2):
            query = torch.randn(1, tokens, heads, LAYOUT.head_dim, generator=generator).transpose(1, 2)
            key, value = torch.randn(2, 1, LAYOUT.kv_heads, tokens, LAYOUT.head_dim, generator=generator)
            got, wanted = (a.attend(layer, query, key, value, 0.3, window, softcap) for a in (fake, sdpa))
            assert got.shape == wanted.shape
            assert got.is_contiguous()
            assert torch.allclose(got, wanted, atol=1e-5)
            assert torch.equal(ours, theirs)


def test_layers_that_differ_have_plans_of_their_own() -> None:
    pool = torch.zeros(8, LAYOUT.kv_heads, LAYOUT.layers, 2, LAYOUT.block_tokens, LAYOUT.head_dim)
    attention = FlashInferPagedAttention(FakeFlashinfer(), pool, LAYOUT, 4, "fa2")
    attention.prepare([Chunk(sequence(9, 0, LAYOUT), 8, 1)])
    q, kv = torch.randn(1, 4, 1, 8), torch.randn(1, 2, 1, 8)
    for layer, window in enumerate((3, None, 3)):
        attention.attend(layer, q, kv, kv, 0.5, window, 0.0)
    assert sorted(variant.window or 0 for variant in attention.step.planned) == [0, 3]


# ---------------------------------------------------------------------------- graphs, without graphs


def repeated(attention: FlashInferPagedAttention) -> Callable[[Callable[[], Tensor]], Captured]:
    """Stands for capturing: computes again, from what the same inputs hold by then."""

    def capture(compute: Callable[[], Tensor]) -> Captured:
        step, output = attention.step, compute()

        def replay() -> None:
            attention.step = step
            output.copy_(compute())

        return Captured(output, replay)

    return capture


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma2", "qwen3"])
@torch.inference_mode()
def test_buckets_compute_what_sdpa_computes(make_model, family: str) -> None:  # type: ignore[no-untyped-def]
    path = make_model(family)
    reference = TorchRunner(path, "float32", block_tokens=16, kv_bytes=4 << 20, backend="sdpa", device="cpu")
    model = load_model(ModelDir.open(path), "float32", CPU)
    layout, num_blocks = kv_layout(model, 16), reference.pool.num_blocks
    pool = torch.zeros(num_blocks + 1, layout.kv_heads, layout.layers, 2, 16, layout.head_dim)
    attention = FlashInferPagedAttention(FakeFlashinfer(), pool, layout, 4, "fa2")
    use_attention(model, attention)

    def forward(token_ids: Tensor, positions: Tensor) -> Tensor:
        logits: Tensor = model(input_ids=token_ids, position_ids=positions, use_cache=False).logits[0]
        return logits

    graphs = DecodeGraphs(attention, layout, forward, repeated(attention), num_blocks, 8, batches=(1, 2, 4))
    sequences = [sequence(n, 20 * i, layout, seed=i) for i, n in enumerate((40, 17, 16, 33))]
    for some in sequences:
        prompt = Chunk(some, 0, some.num_tokens - 1)
        reference.logits([prompt])
        attention.prepare([prompt])
        forward(torch.tensor([some.token_ids[:-1]]), torch.arange(some.num_tokens - 1)[None])
    for chosen in ([0], [0, 1, 2], [3, 1], [0, 1, 2, 3]):
        chunks = [Chunk(sequences[i], sequences[i].num_tokens - 1, 1) for i in chosen]
        assert graphs.takes(chunks)
        assert torch.allclose(graphs.logits(chunks), reference.logits(chunks), atol=1e-4)
    assert not graphs.takes([])
    assert not graphs.takes([Chunk(sequences[0], 0, 2)])
    assert not graphs.takes([Chunk(sequences[0], 0, 1)] * 5)
    held = {block for some in sequences for block in some.blocks}
    written = set(pool.flatten(1).any(1).nonzero()[:, 0].tolist())
    assert written == held | {num_blocks}  # padding writes into the scratch block only


# ---------------------------------------------------------------------------- replaced modules


@pytest.mark.parametrize(
    ("family", "norms", "mlps"), [("llama", 7, 3), ("qwen2", 7, 3), ("qwen3", 13, 3), ("gemma2", 0, 0)]
)
def test_fused_models_compute_the_same(make_model, family: str, norms: int, mlps: int) -> None:  # type: ignore[no-untyped-def]
    model = AutoModelForCausalLM.from_pretrained(make_model(family)).eval()
    ids = torch.arange(1, 40)[None]
    with torch.inference_mode():
        wanted = model(ids).logits
    fused = fuse(model, FakeFlashinfer())
    assert (fused.norms, fused.mlps, fused.projections) == (norms, mlps, 3)
    with torch.inference_mode():
        assert torch.allclose(model(ids).logits, wanted, atol=1e-4)


def linear(inputs: int, bias: bool = False, dtype: torch.dtype = torch.float32) -> nn.Linear:
    return nn.Linear(inputs, 32, bias=bias, dtype=dtype)


@torch.inference_mode()
def test_layers_that_agree_are_joined() -> None:
    x = torch.randn(3, 64)
    for bias in (False, True):
        one, other = linear(64, bias), linear(64, bias)
        joined = join_layers([one, other])
        assert joined is not None
        assert torch.allclose(joined(x), torch.cat([one(x), other(x)], -1), atol=1e-6)
    for unlike in (linear(48), linear(64, bias=True), linear(64, dtype=torch.bfloat16)):
        assert join_layers([linear(64), unlike]) is None


def test_a_weight_of_another_class_is_not_joined() -> None:
    class Strange(nn.Parameter):
        """As torchao's."""

    one, other = linear(64), linear(64)
    other.weight = Strange(other.weight.data)
    assert is_linear(one)
    assert not is_linear(other)


def test_the_fused_rotary_embedding(make_model) -> None:  # type: ignore[no-untyped-def]
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    original = apply_rotary_pos_emb
    while hasattr(original, "original"):  # earlier tests of this process put others in its place
        original = original.original
    rotary = FusedRotary(FakeFlashinfer(), original)
    whole = torch.randn(1, 5, (4 + 2 + 2) * 64)  # queries, keys and values side by side, as the shared product has them
    q, k = whole[..., : 4 * 64].view(1, 5, 4, 64).transpose(1, 2), whole[..., 256:384].view(1, 5, 2, 64).transpose(1, 2)
    angles = torch.randn(1, 5, 32).repeat(1, 1, 2)
    wanted = original(q.clone(), k.clone(), angles.cos(), angles.sin())
    values = whole[..., 384:].clone()
    rotary.rotate(q, k, angles.cos(), angles.sin())
    assert torch.allclose(q, wanted[0], atol=1e-5)
    assert torch.allclose(k, wanted[1], atol=1e-5)
    assert torch.equal(whole[..., 384:], values)
    assert rotary(q, k, angles.cos(), angles.sin())[0] is not q  # on a CPU the model's own


# ---------------------------------------------------------------------------- fingerprints, devices


def words(seed: int, *shape: int) -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
    content = np.random.default_rng(seed).integers(0, 256, shape, np.uint8)
    content.reshape(-1)[: shape[-1]] = 255  # as far as the sums can wrap
    return content


@pytest.mark.parametrize(("kv_heads", "block_bytes"), [(1, 64), (2, 64), (8, 4096)])
def test_fingerprints_by_torch_are_those_by_numpy(
    kv_heads: int, block_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In several parts, the last of them smaller."""
    monkeypatch.setattr(fingerprint, "WORK_BYTES", 4 * block_bytes)
    pool = words(3, 11, block_bytes)
    blocks = [*range(10, -1, -1), 0, 7]
    prints = TensorFingerprints(torch.from_numpy(pool), kv_heads)
    got = prints.of(blocks)
    assert got.dtype == np.uint64
    assert np.array_equal(got, fingerprint_blocks(pool, blocks, kv_heads))
    assert prints.of([]).shape == (0, kv_heads)
    assert np.array_equal(prints.of([5]), got[5:6]), "calls do not see each other's copies"


@pytest.mark.parametrize("work_blocks", [1, 3, 100])
@pytest.mark.parametrize(("kv_heads", "planes", "span_bytes"), [(1, 2, 16), (2, 3, 64), (8, 5, 1024)])
def test_fingerprints_of_planes_by_torch_are_those_by_numpy(
    kv_heads: int, planes: int, span_bytes: int, work_blocks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fingerprint, "WORK_BYTES", work_blocks * planes * span_bytes)
    pool = words(4, planes, 7, span_bytes)
    blocks = [6, 0, 3, 3, 1]
    wanted = PlaneFingerprints(pool, 7, planes, kv_heads).of(blocks)
    for shape in ((planes, 7, span_bytes), (7, planes * span_bytes), (-1,)):
        prints = TensorFingerprints(torch.from_numpy(pool).view(shape), kv_heads, planes, num_blocks=7)
        assert np.array_equal(prints.of(blocks), wanted)
        pending = prints.begin(blocks, after=cast(torch.cuda.Event, None))
        assert pending.ready
        assert np.array_equal(pending.result(), wanted)


class Operations(TorchDispatchMode):
    """Counts torch's operations, each of which is at most one kernel on a GPU."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("planes", [1, 4])
def test_the_operations_of_a_verification_do_not_grow_with_its_blocks(planes: int) -> None:
    pool = torch.from_numpy(words(5, 64, 256))
    prints = TensorFingerprints(pool, 2, planes, num_blocks=64)

    def operations(blocks: list[int]) -> int:
        with Operations() as counted:
            prints.of(blocks)
        return counted.count

    assert operations([7]) == operations(list(range(64))) <= 20


def test_blocks_are_copied_out_and_written_back() -> None:
    pool = torch.arange(6 * 64, dtype=torch.int64).to(torch.uint8).view(6, 64)
    before = pool.clone()
    contents = BlockBytes(pool).read([4, 1])
    pool[4] = 0
    assert [content.tolist() for content in contents] == [before[4].tolist(), before[1].tolist()], "copies"
    BlockBytes(pool).write(4, contents[0])
    assert torch.equal(pool, before)


@no_gpu
def test_without_a_gpu_auto_is_the_cpu() -> None:
    assert choose_device("auto") == choose_device("cpu") == CPU
    with pytest.raises(EngineStartError, match="no CUDA device"):
        choose_device("cuda")


def test_a_backend_of_another_device_is_refused(tiny_model) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(EngineStartError, match="flashinfer does not run on cpu"):
        TorchRunner(tiny_model, "float32", 16, 1 << 20, backend="flashinfer", device="cpu")


@pytest.mark.parametrize(("dtype", "head_dim", "reason"), [("float32", 64, "float32"), ("bfloat16", 16, "16")])
def test_flashinfer_says_what_it_does_not_serve(dtype: str, head_dim: int, reason: str) -> None:
    with pytest.raises(KernelsUnavailable, match=reason):
        load_flashinfer(KvLayout(layers=1, kv_heads=1, head_dim=head_dim, block_tokens=16, dtype=dtype))


def test_a_built_model_is_served_like_a_loaded_one(tiny_model) -> None:  # type: ignore[no-untyped-def]
    loaded = TorchRunner(tiny_model, "float32", 16, 1 << 20, backend="sdpa", device="cpu")
    model = AutoModelForCausalLM.from_pretrained(tiny_model).eval()
    built = TorchRunner(BuiltModel(model, loaded.info), "auto", 16, 1 << 20, backend="sdpa", device="cpu")
    some = sequence(20, 0, loaded.layout)
    assert torch.equal(*(runner.logits([Chunk(some, 0, 20)]) for runner in (built, loaded)))


def test_blocks_are_copied_within_the_pool(tiny_model) -> None:  # type: ignore[no-untyped-def]
    runner = TorchRunner(tiny_model, "float32", 16, 1 << 20, backend="sdpa", device="cpu")
    runner.logits([Chunk(sequence(16, 0, runner.layout), 0, 16)])
    runner.copy_block(0, 5)
    prints = runner.fingerprints([0, 5, 1])
    assert prints[0].tolist() == prints[1].tolist() != prints[2].tolist()


def test_staged_and_read_back_on_the_cpu() -> None:
    assert read_back(staged([3, 1], torch.long, CPU)) == [3, 1]
    assert staged([], torch.long, CPU).shape == (0,)


# ---------------------------------------------------------------------------- pools on devices


def endpoint(**fields: object) -> bytes:
    return json.dumps({"format": FORMAT, "metadata": ""} | fields).encode()


def test_endpoints_say_where_their_memory_is() -> None:
    on_gpu = Memory.of(DevicePool(4096, num_blocks=3, block_bytes=100, device=1))
    assert on_gpu == Memory(4096, 300, "VRAM", 1)
    assert parse_endpoint(endpoint(**on_gpu.fields())) == Endpoint(on_gpu, b"")
    in_main_memory = Memory.of(Pool(np.zeros((3, 8), np.uint8)))
    assert set(in_main_memory.fields()) == {"base", "bytes"}  # as peers that know of nothing else write and read it
    assert parse_endpoint(endpoint(**in_main_memory.fields())) == Endpoint(in_main_memory, b"")


@pytest.mark.parametrize("wrong", [{"kind": "FILE"}, {"device": -1}, {"device": "0"}, {"device": True}, {"kind": None}])
def test_an_endpoint_of_unknown_memory_is_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(EndpointMismatch, match="memory"):
        parse_endpoint(endpoint(**{"base": 4096, "bytes": 8, "kind": "VRAM", "device": 0} | wrong))


def test_the_local_transport_takes_main_memory_only() -> None:
    with pytest.raises(TransportUnavailable, match="main memory"):
        LocalTransport(LocalNetwork(), "one").register(DevicePool(4096, 1, 8, device=0))
