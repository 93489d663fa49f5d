"""What fits a device: the arithmetic by hand, the settings' own rules, and that what a refusal proposes does fit."""

from dataclasses import replace
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.config import WorkerConfig
from kvcache.store.block_store import BUFFER_BYTES
from sizing.fit.memory import (
    GPU_RESERVE,
    HOST_RESERVE,
    MIB,
    Device,
    Fit,
    PlannedWorker,
    Unchecked,
    check,
    full_context_bytes,
)
from sizing.fit.verdict import Change, nearest
from sizing.gpus import GPUS
from sizing.models.known_models import NAMES, known_shape
from sizing.models.model_shape import ModelShape

H100 = Device("H100", 80e9)


LLAMA_8B, LLAMA_70B = known_shape("llama-3.1-8b"), known_shape("llama-3.1-70b")


def worker(
    device: Device = H100, shape: ModelShape | None = LLAMA_8B, gpus: int | None = None, **others: Any
) -> PlannedWorker:
    ranks = others.get("tensor_parallel", 1)
    others = {"engine": "vllm" if device.is_gpu else "torch", **others}
    return PlannedWorker("decode", {"model": "/m", **others}, device, shape, ranks if gpus is None else gpus)


def need_of(fit: Fit) -> tuple[float, float, float, float]:
    return fit.need.weights, fit.need.kv, fit.need.step, fit.need.reserve


# ------------------------------------------------------------------ the arithmetic


def test_8b_in_bfloat16_on_one_h100() -> None:
    """32 layers of 218.1 M parameters and 1,050.7 M of embeddings and output layer: 16.06 GB."""
    fit = check(worker(kv_memory_mib=49152))
    weights = 2 * (32 * (4096 * 128 * (2 * 32 + 2 * 8) + 3 * 4096 * 14336) + 2 * 128256 * 4096)
    layer = 8192 * 2 * (4 * 4096 + (2 * 32 + 2 * 8) * 128 + 3 * 14336)
    logits = 1024 * 128256 * (2 + 8)
    assert weights == 16_059_990_016
    assert (layer, logits) == (1_140_850_688, 1_313_341_440)
    assert need_of(fit) == (weights, 51_539_607_552, layer + logits, GPU_RESERVE)
    assert fit.left == 80e9 - 72_053_789_696
    assert fit.fits
    assert fit.need.in_words() == "weights 16.1 GB + KV 51.5 GB + step 2.5 GB + reserve 2.0 GB = 72.1 GB"


def test_ranks_have_a_part_of_the_weights_and_of_the_pool() -> None:
    """A step's residual and its logits are on every rank."""
    weights, kv, step, _ = need_of(check(worker(shape=LLAMA_70B, tensor_parallel=4, kv_memory_mib=40960)))
    assert weights == LLAMA_70B.weight_bytes / 4 == pytest.approx(35.28e9, rel=1e-3)
    assert kv == 10240 * MIB
    assert step == 8192 * 2 * (4 * 8192 + (144 * 128 + 3 * 28672) / 4) + 1024 * 128256 * 10


def test_a_containers_memory_holds_all_ranks_and_stores() -> None:
    host = Device("resources.limits.memory", 256e9, is_gpu=False)
    one = need_of(check(worker(host, gpus=0, kv_memory_mib=1024)))
    assert one[0] == LLAMA_8B.weight_bytes
    assert one[3] == HOST_RESERVE
    both = need_of(check(worker(host, gpus=0, engine="vllm", kv_memory_mib=1024, tensor_parallel=2)))
    assert (both[0], both[1], both[3]) == (one[0], one[1], 2 * HOST_RESERVE)
    stored = need_of(check(worker(host, gpus=0, kv_memory_mib=1024, kv_host_memory_mib=512)))
    assert stored[1] == (1024 + 512) * MIB + BUFFER_BYTES


@pytest.mark.parametrize(
    ("others", "size"),
    [
        ({"dtype": "float32"}, 4 * 8_029_995_008),
        ({"engine": "vllm", "vllm_options": {"quantization": "fp8"}}, 2 * 1_050_673_152 + 6_979_321_856),
        ({"engine": "vllm", "vllm_args": "-q fp8"}, 2 * 1_050_673_152 + 6_979_321_856),
        ({"engine": "vllm", "vllm_args": "--dtype=float"}, 4 * 8_029_995_008),
    ],
)
def test_weights_in_other_formats(others: dict[str, Any], size: float) -> None:
    assert need_of(check(worker(kv_memory_mib=20480, **others)))[0] == size


def test_auto_is_what_the_other_terms_leave() -> None:
    fit = check(worker(kv_memory_mib="auto"))
    assert fit.kv_mib == 56730  # 80 GB less 16.06, 2.45 and 2.00
    assert fit.fits
    assert 0 <= fit.left < MIB
    small = check(worker(Device("24 GB", 24e9), kv_memory_mib="auto"))
    assert small.refusals == (
        "kv_memory_mib: weights 16.1 GB + KV 3.5 GB + step 2.5 GB + reserve 2.0 GB = 24.0 GB leaves 3.5 GB of 24.0 GB"
        " for KV, and one full context of llama-3.1-8b takes 17.2 GB",
    )


@pytest.mark.parametrize(
    ("others", "token_bytes", "tokens"),
    [
        ({}, 131072, 131072),
        ({"block_tokens": 64}, 131072, 131072),
        ({"engine": "vllm", "vllm_options": {"max_model_len": 1000}}, 131072, 1024),
        ({"engine": "vllm", "vllm_options": {"kv_cache_dtype": "fp8"}}, 65536, 131072),
        ({"engine": "vllm", "vllm_args": "--max-model-len 1k --kv_cache_dtype fp8"}, 65536, 1024),
    ],
)
def test_a_full_context(others: dict[str, Any], token_bytes: int, tokens: int) -> None:
    config = WorkerConfig.parse({"model": "/m"} | others)
    assert full_context_bytes(LLAMA_8B, config) == token_bytes * tokens


@pytest.mark.parametrize(
    ("name", "params"),
    [
        ("llama-3.1-8b", 8.03),
        ("llama-3.1-70b", 70.55),
        ("llama-3.3-70b", 70.55),
        ("llama-3.1-405b", 405.85),
        ("qwen3-8b", 8.19),
        ("qwen3-14b", 14.77),
        ("qwen3-32b", 32.76),
        ("mistral-7b-v0.3", 7.25),
        ("mixtral-8x7b-v0.1", 46.70),
        ("gpt-oss-120b", 116.8),
        ("gemma-3-27b-it", 27.01),
        ("qwen3-next-80b-a3b-thinking", 79.6),
        ("qwen3.5-35b-a3b", 34.64),
        ("deepseek-v3", 671),
    ],
)
def test_known_shapes_have_as_many_parameters_as_their_models(name: str, params: float) -> None:
    assert set(NAMES) & {name, name.removesuffix("-it"), name.removesuffix("-thinking")}
    assert known_shape(name).params == pytest.approx(params * 1e9, rel=1e-3)


def test_names_of_repositories() -> None:
    assert replace(known_shape("meta-llama/Llama-3.1-8B-Instruct"), name="llama-3.1-8b") == LLAMA_8B
    narrow = known_shape("Meta-Llama-3.1-70B-Instruct-FP8")
    assert narrow.weight_bytes == pytest.approx(72.65e9, rel=1e-3)
    assert known_shape("llama-3.1-8b-mine") is None
    assert known_shape("llama-3.1-9b") is None


def test_windows_and_states_in_one_context() -> None:
    """Layers with a window keep it and two steps of 8192 tokens; recurrent ones two states, never in float8."""
    fit = check(worker(shape=known_shape("gpt-oss-120b"), engine="vllm", kv_memory_mib=5189))
    assert fit.fits
    config = fit.worker.config()
    assert full_context_bytes(fit.worker.shape, config, H100) == 18 * 2048 * (131072 + 128 + 2 * 8192)
    (refusal,) = check(worker(shape=known_shape("gpt-oss-120b"), engine="vllm", kv_memory_mib=5188)).refusals
    assert refusal.startswith("kv_memory_mib: 5188 is below 5189: vLLM needs room for one full context")
    others = {"engine": "vllm", "vllm_options": {"max_model_len": 32768, "kv_cache_dtype": "fp8"}}
    config = WorkerConfig.parse({"model": "/m"} | others)
    assert full_context_bytes(known_shape("qwen3-next-80b-a3b"), config, H100) == 12 * 1024 * 32768 + 2 * 39_518_208
    config = WorkerConfig.parse({"model": "/m"})  # the torch engine keeps whole contexts in all layers
    assert full_context_bytes(known_shape("gemma-3-27b"), config, H100) == 62 * 8192 * 131072


@pytest.mark.parametrize(
    ("name", "others", "said"),
    [
        ("deepseek-v3", {"engine": "torch"}, "engine: torch does not serve MLA, which deepseek-v3 has: set"),
        ("qwen3.5-35b-a3b", {"engine": "torch"}, "engine: torch does not serve recurrent layers, which"),
        (
            "qwen3.5-35b-a3b",
            {"engine": "vllm", "tensor_parallel": 2},
            "tensor_parallel: 1 is all that the vllm engine takes with recurrent states, as qwen3.5-35b-a3b has",
        ),
    ],
)
def test_memory_that_an_engine_does_not_keep(name: str, others: dict[str, Any], said: str) -> None:
    refusals = check(worker(shape=known_shape(name), kv_memory_mib=65536, **others)).refusals
    assert any(each.startswith(said) for each in refusals), refusals


# ------------------------------------------------------------------ refusals, and the nearest that fits

OLD_RDMA: dict[str, Any] = {"engine": "vllm", "strict_lanes": ["rdma"], "kv_memory_mib": 40960}
"""Settings of helm/examples/gpu-rdma.yaml before `tandem plan --values`."""


def test_70b_on_one_h100() -> None:
    old = PlannedWorker("decode", {"model": "/m"} | OLD_RDMA, H100, LLAMA_70B, 1)
    fit = check(old)
    assert fit.refusals == (
        "weights 141.1 GB + KV 42.9 GB + step 3.6 GB + reserve 2.0 GB = 189.6 GB, 109.6 GB more than the 80.0 GB"
        " of H100",
    )
    found = nearest(old)
    assert found.change.settings == {"tensor_parallel": 4}
    assert found.in_words() == (
        "tensor_parallel: 4, gpus: 4 (weights 35.3 GB + KV 10.7 GB + step 2.3 GB + reserve 2.0 GB = 50.3 GB of 80.0 GB)"
    )


@pytest.mark.parametrize(
    ("refused", "words"),
    [
        (worker(kv_memory_mib=70000), "kv_memory_mib: 56730"),
        (worker(shape=LLAMA_70B, kv_memory_mib=40960), "tensor_parallel: 4, gpus: 4"),
        (worker(shape=LLAMA_70B, kv_memory_mib=140000), "tensor_parallel: 4, gpus: 4"),
        (
            worker(Device("L4", 24e9), vllm_options={"max_model_len": 65536}, kv_memory_mib=8192),
            "tensor_parallel: 2, gpus: 2",
        ),
        (
            worker(shape=known_shape("llama-3.1-405b"), tensor_parallel=8, kv_memory_mib=65536),
            "tensor_parallel: 8, pipeline_parallel: 2, nodes: 2, gpus: 8",
        ),
        (worker(engine="torch", kv_memory_mib=20480), "engine: vllm"),
        (worker(engine="torch", kv_memory_mib=20480, kv_disk_dir="/d"), "engine: vllm"),
        (worker(engine="torch", shape=known_shape("qwen3-32b-fp8"), kv_memory_mib=20480), "engine: vllm"),
        (worker(gpus=4, kv_memory_mib=20480), "gpus: 1"),
        (worker(engine="vllm", kv_memory_mib=1024), "kv_memory_mib: 56730"),
        (worker(tensor_parallel=3, kv_memory_mib=20480), "tensor_parallel: 4, gpus: 4"),
        (worker(Device("limits", 40e9, False), gpus=0, kv_memory_mib=40000), "kv_memory_mib: 20562"),
        (worker(Device("limits", 30e9, False), gpus=0, kv_memory_mib=16384), "limits: 34Gi"),
        (worker(Device("limits", 4e9, False), gpus=0, kv_memory_mib=1024), "limits: 19Gi"),
    ],
)
def test_the_nearest_that_fits(refused: PlannedWorker, words: str) -> None:
    assert not check(refused).fits
    found = nearest(refused)
    assert found.in_words().partition(" (weights")[0] == words


@pytest.mark.parametrize(
    ("others", "said"),
    [
        ({"engine": "torch"}, "engine: torch computes on CPUs only, and its pod has gpus: set engine: vllm"),
        ({"tensor_parallel": 3}, "tensor_parallel: 3 does not divide the 8 KV heads and 32 heads of llama-3.1-8b"),
        ({"gpus": 1, "tensor_parallel": 2}, "gpus: 1 is not 2, the ranks of a pod: each has one GPU"),
        ({"weights": "int8"}, "weights: this setting is gone: leave it out, or set engine: vllm and vllm_args: "),
        ({"kv_memory_mb": 1}, "kv_memory_mb: unknown key"),
        ({"kv_memory_mib": 0}, "kv_memory_mib: Input should be greater than 0"),
        (
            {"engine": "vllm", "kv_memory_mib": 16383},
            "kv_memory_mib: 16383 is below 16384: vLLM needs room for one full context of llama-3.1-8b",
        ),
    ],
)
def test_settings_that_a_worker_would_refuse(others: dict[str, Any], said: str) -> None:
    (found,) = check(worker(**others)).refusals
    assert found.startswith(said)


def test_quantised_files_need_vllm() -> None:
    narrow, host = known_shape("qwen3-32b-fp8"), Device("limits", 80e9, False)
    on_cpu = worker(host, narrow, gpus=0, kv_memory_mib=20480)
    assert check(on_cpu).refusals == (
        "engine: torch does not serve models that are saved quantised, as qwen3-32b-fp8 is: set engine: vllm",
    )
    found = nearest(on_cpu)
    assert found.change.settings == {"engine": "vllm"}
    assert check(worker(shape=narrow, kv_memory_mib=20480)).fits


def test_a_cpu_worker_of_the_torch_engine() -> None:
    host = Device("limits", 64e9, False)
    assert check(worker(host, gpus=0, kv_memory_mib=1024)).fits
    (small,) = check(worker(host, gpus=0, kv_memory_mib=7, block_tokens=64)).refusals
    assert small == "kv_memory_mib: 7 is below 8, a KV block"
    (adapters,) = check(worker(host, gpus=0, kv_memory_mib=1024, adapters={"a": "/a"})).refusals
    assert adapters == "adapters: the torch engine serves no adapters: set engine: vllm"


def test_ranks_beyond_the_kv_heads_hold_copies() -> None:
    """DeepSeek-V3 has one latent vector for all heads; each of eight ranks holds all of it."""
    shape, common = known_shape("deepseek-v3"), {"model": "/m", "engine": "vllm"}
    one, eight = (WorkerConfig.parse(common | {"tensor_parallel": ranks}) for ranks in (1, 8))
    assert full_context_bytes(shape, eight) == 8 * full_context_bytes(shape, one)
    h200 = Device("H200", 141e9)
    assert check(worker(h200, shape, engine="vllm", tensor_parallel=8, vllm_options={"max_model_len": 65536})).fits
    llama = worker(engine="vllm", tensor_parallel=16, kv_memory_mib=65536)
    assert check(llama).fits
    (refusal,) = check(worker(engine="torch", tensor_parallel=16, kv_memory_mib=65536)).refusals[:1]
    assert refusal == "tensor_parallel: 16 needs engine: vllm, not torch"


@pytest.mark.parametrize(
    ("settings", "drafts"),
    [
        ({"vllm_options": {"speculative_config": {"method": "mtp", "num_speculative_tokens": 1}}}, True),
        ({"vllm_args": "--spec-method mtp --spec-tokens 1"}, True),
        ({"vllm_args": "-sc.method=mtp -sc.num_speculative_tokens=1"}, True),
        ({"vllm_args": """--speculative-config '{"method": "mtp"}'"""}, True),
        ({"vllm_args": "--spec-method ngram --spec-tokens 3"}, False),
        ({"vllm_args": "--speculative-config many"}, False),
        ({}, False),
    ],
)
def test_a_models_own_draft_layers_count_where_it_drafts_by_them(settings: dict[str, Any], drafts: bool) -> None:
    shape, common = known_shape("deepseek-v3"), {"model": "/m", "engine": "vllm"}
    assert (shape.draft_layers, shape.max_context_tokens) == (1, 163_840)
    more = full_context_bytes(shape, WorkerConfig.parse(common | settings))
    more -= full_context_bytes(shape, WorkerConfig.parse(common))
    assert more == (163_840 * 576 * 2 if drafts else 0)


def test_a_draft_model_of_vllm_is_named() -> None:
    for flags in ("--spec-method eagle3 --spec-model /eagle", "--spec-model /eagle"):
        fit = check(worker(engine="vllm", vllm_args=flags))
        assert fit.unknown == ("vllm_options.speculative_config: the draft model",)
    assert check(worker(engine="vllm", vllm_args="--spec-method ngram")).unknown == ()


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"vllm_options": {"quantization": "bitsandbytes"}}, "vllm_options.quantization"),
        ({"vllm_options": {"kv_cache_dtype": "nvfp4"}}, "vllm_options.kv_cache_dtype"),
        ({"vllm_options": {"max_model_len": "32k"}}, "vllm_options.max_model_len"),
        ({"vllm_args": "--max-model-len auto"}, "vllm_args --max-model-len"),
        ({"vllm_args": "-q bitsandbytes"}, "vllm_args --quantization"),
    ],
)
def test_sizes_that_are_not_known_are_not_guessed(options: dict[str, Any], field: str) -> None:
    with pytest.raises(Unchecked, match=field):
        check(worker(engine="vllm", **options))


def test_flags_of_vllm_that_are_settings_count_as_settings() -> None:
    """Also beside a change of these settings, and of `kv_memory_mib` that would be measured."""
    flagged = worker(engine="vllm", gpus=2, vllm_args="-tp 2 --kv-cache-memory-bytes 10G --max-model-len 8k")
    plain = worker(engine="vllm", gpus=2, tensor_parallel=2, kv_memory_mib=20480, vllm_options={"max_model_len": 8000})
    assert need_of(check(flagged.without_flags())) == need_of(check(plain))
    too_large = worker(engine="vllm", vllm_args="--kv-cache-memory-bytes 100G").without_flags()
    found = nearest(too_large)
    assert found.in_words().startswith("kv_memory_mib: ")
    unknown = worker(engine="vllm", vllm_args="--max-model-length 8").without_flags()
    assert check(unknown).refusals == (
        "vllm_args: --max-model-length: vLLM has no such flag; did you mean --max-model-len?",
    )


gpus = st.sampled_from([Device(gpu.name, gpu.memory_bytes) for gpu in GPUS.values()])
hosts = st.builds(lambda gib: Device("limits", float(gib << 30), False), st.integers(1, 400))
shapes = st.sampled_from([known_shape(name) for name in (*NAMES, "llama-3.1-70b-fp8", "qwen3-32b-fp8")])
torch_settings = st.fixed_dictionaries(
    {"engine": st.just("torch"), "kv_memory_mib": st.one_of(st.integers(1, 400_000), st.just("auto"))},
    optional={
        "kv_host_memory_mib": st.sampled_from([0, 65536]),
        "kv_disk_dir": st.just("/disk"),
        "dtype": st.sampled_from(["auto", "float32"]),
        "max_batch_tokens": st.sampled_from([128, 2048, 16384]),
    },
)
vllm_settings = st.fixed_dictionaries(
    {"engine": st.just("vllm"), "kv_memory_mib": st.one_of(st.integers(1, 400_000), st.just("auto"))},
    optional={
        "tensor_parallel": st.integers(1, 9),
        "kv_host_memory_mib": st.just(1),
        "vllm_options": st.fixed_dictionaries(
            {}, optional={"max_model_len": st.integers(1, 200_000), "quantization": st.just("fp8")}
        ),
    },
)


@settings(max_examples=150, deadline=None)
@given(st.one_of(gpus, hosts), shapes, st.one_of(torch_settings, vllm_settings), st.integers(1, 8))
def test_what_a_refusal_proposes_fits(device: Device, shape: ModelShape, chosen: dict[str, Any], count: int) -> None:
    given_worker = worker(device, shape, count if device.is_gpu else 0, **chosen)
    fit = check(given_worker)
    if fit.fits:
        assert fit.left >= 0
        return
    found = nearest(given_worker)
    if found is not None:
        changed = found.change.of(given_worker)
        assert check(changed).fits
        assert changed.gpus == (changed.settings.get("tensor_parallel", 1) if device.is_gpu else 0)
        told = Change(found.change.settings).in_words()
        assert yaml.safe_load("{" + told + "}") == found.change.settings, "it can be copied into a values file"


@settings(max_examples=60, deadline=None)
@given(gpus, st.floats(0.1, 40), st.integers(1, 400_000))
def test_a_change_is_found_where_there_is_one(device: Device, times: float, kv_mib: int) -> None:
    """By trying all GPUs and ranks, with as much KV as they leave; thirty times 405B is too much for any."""
    shape = known_shape("llama-3.1-405b")
    shape = replace(shape, params=round(shape.params * times))
    given_worker = worker(device, shape, kv_memory_mib=kv_mib)
    if check(given_worker).fits:
        return
    fp8 = {"vllm_args": "--quantization fp8"}
    any_fits = any(
        check(worker(larger, shape, tensor_parallel=ranks, kv_memory_mib="auto", **engine)).fits
        for larger in [device, *(Device(gpu.name, gpu.memory_bytes) for gpu in GPUS.values())]
        if larger.memory_bytes >= device.memory_bytes
        for ranks in range(1, 9)
        for engine in (dict[str, str](), fp8)
    )
    found = nearest(given_worker)
    assert (found is not None) >= any_fits
    assert found is None or times < 30


# ------------------------------------------------------------------ stages, nodes and groups

LLAMA_405B, DEEPSEEK_V3 = known_shape("llama-3.1-405b"), known_shape("deepseek-v3")
H200 = Device("H200", 141e9)


def test_a_stage_has_its_layers_and_one_end() -> None:
    """126 layers of 3.190 G parameters over 4 stages: 32 in the largest. Embeddings and output layer: 2.1 G each."""
    fit = check(
        worker(H200, LLAMA_405B, 8, engine="vllm", tensor_parallel=8, pipeline_parallel=4, nodes=4, kv_memory_mib=65536)
    )
    layers = (LLAMA_405B.params - LLAMA_405B.embedding_params) * 2 * 32 / 126
    assert need_of(fit)[0] == (layers + 128256 * 16384 * 2) / 8
    assert need_of(fit)[1] == 65536 * MIB / 32
    assert fit.fits


def test_a_worker_of_a_group_has_its_part_of_the_experts() -> None:
    one = check(worker(H200, DEEPSEEK_V3, 8, engine="vllm", **GROUP, kv_memory_mib=32768))
    experts = 58 * 256 * 3 * 7168 * 2048
    assert need_of(one)[0] == DEEPSEEK_V3.weight_bytes - experts * 15 / 16
    assert need_of(one)[1] == 32768 * MIB, "each has a KV pool of its own"
    assert one.fits
    mixtral = known_shape("mixtral-8x7b-v0.1")
    options = {"data_parallel": 2, "vllm_options": {"quantization": "fp8"}}
    narrow = check(worker(H100, mixtral, engine="vllm", kv_memory_mib=8192, **options))
    rest = mixtral.params - mixtral.embedding_params - mixtral.expert_params
    assert need_of(narrow)[0] == mixtral.embedding_params * 2 + rest + mixtral.expert_params / 2


GROUP = {"data_parallel": 16, "data_parallel_local": 8, "vllm_args": "--max-model-len 32768"}


def test_a_full_context_needs_room_in_the_largest_stage() -> None:
    """126 layers in 4 stages: pools as of 4 x 32 layers."""
    one, four = (
        full_context_bytes(
            LLAMA_405B, WorkerConfig.parse({"model": "/m", "engine": "vllm", "pipeline_parallel": stages})
        )
        for stages in (1, 4)
    )
    assert four == pytest.approx(one * 128 / 126)


@pytest.mark.parametrize(
    ("shape", "gpus", "others", "said"),
    [
        (LLAMA_405B, 8, {"tensor_parallel": 8, "pipeline_parallel": 2}, "gpus: 8 is not 16, the ranks of a pod"),
        (LLAMA_405B, 16, {"tensor_parallel": 8, "nodes": 2}, "gpus: 16 is not 4, the ranks of a pod"),
        (LLAMA_405B, 8, {"tensor_parallel": 8, "nodes": 3}, "nodes: 8 ranks (tensor_parallel 8"),
        (LLAMA_405B, 1, {"data_parallel": 2}, "data_parallel: llama-3.1-405b has no experts to share out"),
        (DEEPSEEK_V3, 1, {"data_parallel": 24}, "data_parallel: 24 does not divide the 256 experts"),
        (DEEPSEEK_V3, 3, {"data_parallel": 16, "data_parallel_local": 3}, "data_parallel_local: 3 does not divide"),
        (DEEPSEEK_V3, 64, {"pipeline_parallel": 64}, "pipeline_parallel: 64 is above the 61 layers"),
    ],
)
def test_ranks_that_cannot_be(shape: ModelShape, gpus: int, others: dict[str, Any], said: str) -> None:
    refusals = check(worker(H200, shape, gpus, engine="vllm", kv_memory_mib=65536, **others)).refusals
    assert any(refusal.startswith(said) for refusal in refusals), refusals


def test_a_model_beyond_a_host_is_told_to_take_stages_on_several() -> None:
    proposal = nearest(worker(H100, LLAMA_405B, 8, engine="vllm", tensor_parallel=8, kv_memory_mib=65536))
    assert {"tensor_parallel": 8, "pipeline_parallel": 2, "nodes": 2}.items() <= proposal.change.settings.items()
    assert proposal.fit.worker.gpus == 8
    assert proposal.fit.fits
