"""Memory of a sequence by what a model's layers keep: figures by hand, and where configs say it."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.backends.sim.settings import StepWork
from sizing.comparison.replay import Setup, spec_of
from sizing.gpus import GPUS, Roofline
from sizing.models.known_models import NAMES, known_shape, named_shape
from sizing.models.model_layers import kinds_of
from sizing.models.model_shape import DEFAULT_CONFIG, ModelShape, open_shape, shape_of
from sizing.plan.arithmetic import sections
from sizing.plan.layouts import DisaggregatedPlan
from sizing.plan.load import OfferedLoad
from sizing.plan.search import GOAL, check, plan
from sizing.plan.streams import Streams
from workloads.request import BadSetup
from workloads.results import Slo

# ------------------------------------------------------------------ figures by hand


def test_gpt_oss_120b() -> None:
    """18 layers keep all tokens, 18 the last 128; a token is 8 heads of 64 keys and 64 values of 2 bytes: 2,048."""
    shape = known_shape("openai/gpt-oss-120b")
    assert [(group.layers, group.window) for group in shape.groups] == [(18, None), (18, 128)]
    assert shape.kv_bytes_per_token == 36 * 2048
    assert shape.kv_bytes(100) == 100 * 36 * 2048
    assert shape.kv_bytes(32768) == 18 * 32768 * 2048 + 18 * 128 * 2048 == 1_212_678_144
    assert shape.loan_bytes(32768) == 1_212_678_144
    assert shape.kv_bytes(32768, in_flight=1000) == 1_212_678_144 + 18 * 1000 * 2048
    assert shape.params == pytest.approx(116.8e9, rel=1e-3)
    assert shape.weight_bytes == pytest.approx(65.1e9, rel=1e-2)  # 4.25 bits for experts, 16 for all others
    assert shape.active_params + shape.embedding_params / 2 == pytest.approx(5.1e9, rel=0.01)


def test_gemma_3_27b() -> None:
    """Every sixth of 62 layers keeps all tokens, so 10; 52 keep 1,024. A token is 16 heads of 128: 8,192 bytes."""
    shape = known_shape("google/gemma-3-27b-it")
    assert [(group.layers, group.window) for group in shape.groups] == [(10, None), (52, 1024)]
    assert shape.kv_bytes(32768) == 10 * 32768 * 8192 + 52 * 1024 * 8192 == 3_120_562_176
    assert shape.kv_bytes(1024) == 62 * 1024 * 8192


def test_qwen3_next() -> None:
    """12 layers of 2 heads of 256; 36 with a state: 3 inputs of 8,192 channels, and 32 matrices of 128 x 128."""
    shape = known_shape("Qwen/Qwen3-Next-80B-A3B-Instruct")
    assert [group.layers for group in shape.groups] == [12, 36]
    assert shape.kv_bytes_per_token == 12 * 2048
    state = 36 * (3 * 8192 + 32 * 128 * 128) * 2
    assert shape.state_bytes == state == 39_518_208
    assert shape.kv_bytes(32768) == 12 * 32768 * 2048 + 2 * state
    assert shape.loan_bytes(32768) == pytest.approx(12 * 32768 * 2048 + state)
    wide = known_shape("Qwen/Qwen3.5-35B-A3B")
    assert wide.state_bytes == 30 * (3 * 8192 * 2 + 32 * 128 * 128 * 4) == 64_389_120
    assert (wide.draft_layers, wide.draft_bytes_per_token) == (1, 2048)
    assert (shape.active_params / 1e9, wide.active_params / 1e9) == pytest.approx((3.2, 2.4), rel=0.01)


def test_deepseek_v3() -> None:
    """61 layers of 512 + 64 elements for all heads: 1,152 bytes each, as much on every rank."""
    shape = known_shape("deepseek-ai/DeepSeek-V3")
    assert shape.latent
    assert shape.is_uniform
    assert shape.kv_bytes_per_token == 61 * 576 * 2 == 70_272
    assert shape.kv_bytes(1000) == shape.loan_bytes(1000) == 70_272_000
    assert shape.draft_bytes_per_token == 1152
    assert shape.weight_bytes == pytest.approx(673e9, rel=1e-3)
    assert shape.active_params + shape.embedding_params == pytest.approx(37e9, rel=0.02)
    one, eight = Roofline(shape, replace(GPUS["H200"], memory_bytes=1e12)), Roofline(shape, GPUS["H200"], 8)
    assert one.num_blocks(64) == (0.9e12 - shape.weight_bytes) // (64 * 70_272)
    assert eight.num_blocks(64) == (8 * 141e9 * 0.9 - shape.weight_bytes) // (64 * 70_272 * 8)


# ------------------------------------------------------------------ other configs

NEMOTRON_H = DEFAULT_CONFIG | {
    "model_type": "nemotron_h",
    "num_hidden_layers": 9,
    "hybrid_override_pattern": "M-M*-MEM*",
    "mamba_num_heads": 128,
    "mamba_head_dim": 64,
    "n_groups": 8,
    "ssm_state_size": 128,
    "conv_kernel": 4,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
}
GRANITE = DEFAULT_CONFIG | {
    "model_type": "granitemoehybrid",
    "num_hidden_layers": 4,
    "layer_types": ["mamba", "mamba", "mamba", "attention"],
    "mamba_n_heads": 128,
    "mamba_d_head": "auto",
    "mamba_n_groups": 1,
    "mamba_d_state": 128,
    "mamba_expand": 2,
    "mamba_d_conv": 4,
    "num_local_experts": 0,
    "shared_intermediate_size": 8192,
}
MAMBA_2 = {
    "model_type": "mamba2",
    "hidden_size": 4096,
    "num_hidden_layers": 64,
    "num_heads": 128,
    "head_dim": 64,
    "state_size": 128,
    "n_groups": 8,
    "expand": 2,
    "vocab_size": 32768,
}
MAMBA = {
    "model_type": "mamba",
    "hidden_size": 2560,
    "num_hidden_layers": 64,
    "state_size": 16,
    "vocab_size": 50280,
    "tie_word_embeddings": True,
}
KIMI = DEFAULT_CONFIG | {
    "model_type": "kimi_linear",
    "num_hidden_layers": 4,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "linear_attn_config": {
        "full_attn_layers": [4],
        "kda_layers": [1, 2, 3],
        "num_heads": 32,
        "head_dim": 128,
        "short_conv_kernel_size": 4,
    },
}


@pytest.mark.parametrize(
    ("config", "token_bytes", "state_bytes"),
    [
        (NEMOTRON_H, 2 * 4096, 4 * (3 * (8192 + 2 * 8 * 128) * 2 + 8192 * 128 * 4)),
        (GRANITE, 4096, 3 * (3 * (8192 + 2 * 128) + 8192 * 128) * 2),
        (MAMBA_2, 0, 64 * (3 * (8192 + 2 * 8 * 128) + 8192 * 128) * 2),
        (MAMBA, 0, 64 * (3 * 5120 + 5120 * 16) * 2),
        (KIMI, 1152, 3 * (3 * 3 * 4096 * 2 + 32 * 128 * 128 * 4)),
    ],
)
def test_recurrent_layers(config: dict[str, Any], token_bytes: int, state_bytes: int) -> None:
    shape = shape_of("x", config)
    assert (shape.kv_bytes_per_token, shape.state_bytes) == (token_bytes, state_bytes)
    assert shape.kv_bytes(1000) == 1000 * token_bytes + 2 * state_bytes


def test_parameters_of_mamba() -> None:
    """Mamba 2.8B, and Codestral Mamba of 7.3 B, whose layers are those of Mamba 2."""
    assert shape_of("x", MAMBA).params == pytest.approx(2.77e9, rel=0.01)
    assert shape_of("x", MAMBA_2).params == pytest.approx(7.28e9, rel=0.01)


WINDOWED = DEFAULT_CONFIG | {"num_hidden_layers": 6, "sliding_window": 4096}


@pytest.mark.parametrize(
    ("change", "full"),
    [
        ({}, []),
        ({"sliding_window": None}, range(6)),
        ({"sliding_window": 262144, "max_position_embeddings": 131072}, range(6)),
        ({"use_sliding_window": False}, range(6)),
        ({"model_type": "qwen3"}, range(6)),
        ({"model_type": "qwen2", "use_sliding_window": True, "max_window_layers": 4}, range(4)),
        ({"model_type": "gemma2"}, [1, 3, 5]),
        ({"model_type": "gpt_oss", "sliding_window": None}, [1, 3, 5]),
        ({"model_type": "gemma3_text"}, [5]),
        ({"sliding_window_pattern": 3}, [2, 5]),
        ({"sliding_window_pattern": "LG"}, [1, 3, 5]),
        ({"layer_types": ["full_attention"] + 5 * ["sliding_attention"]}, [0]),
        ({"layer_types": 5 * ["chunked_attention"] + ["full_attention"], "attention_chunk_size": 8192}, [5]),
    ],
)
def test_layers_with_windows(change: dict[str, Any], full: list[int]) -> None:
    config = WINDOWED | change
    kinds = kinds_of(config, str(config.get("model_type", "")), 6)
    assert [layer for layer, kind in enumerate(kinds) if kind == "full"] == list(full)
    assert shape_of("x", config).kv_bytes(100) == 100 * 6 * 4096


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"layer_types": ["conv"] + 5 * ["full_attention"]}, "layer_types: unknown layer 'conv'; known are full_att"),
        ({"layer_types": ["full_attention"]}, "layer_types is .*, not the kinds of 6 layers"),
        ({"hybrid_override_pattern": "M*X-M*"}, "hybrid_override_pattern: unknown layer 'X'"),
        ({"layer_types": 6 * ["sliding_attention"], "sliding_window": None}, "and no sliding_window"),
        ({"model_type": "jamba", "mamba_d_state": 16}, "mamba_d_state: which layers of 'jamba' are recurrent"),
        ({"linear_attn_config": {}}, "linear_attn_config.kda_layers is None, not a list"),
        ({"layer_types": 6 * ["linear_attention"]}, "has no mamba_num_heads"),
        ({"kv_lora_rank": 512, "qk_rope_head_dim": 64}, "latent attention .* needs qk_nope_head_dim"),
    ],
)
def test_layers_that_are_not_known(change: dict[str, Any], said: str) -> None:
    with pytest.raises(BadSetup, match=said):
        shape_of("x", WINDOWED | change)


def test_names_stand_for_models_where_there_is_no_such_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert named_shape(Path("openai/gpt-oss-120b")).params == known_shape("gpt-oss-120b").params
    assert named_shape(None) == open_shape(None)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "gpt-oss-120b").mkdir()
    with pytest.raises(BadSetup, match=r"config\.json"):
        named_shape(Path("gpt-oss-120b"))


# ------------------------------------------------------------------ all shapes

shapes = st.sampled_from([*map(known_shape, NAMES), *(shape_of("x", each) for each in (NEMOTRON_H, GRANITE, KIMI))])


@given(shapes, st.integers(1, 200_000), st.integers(1, 200_000))
def test_bytes_grow_with_tokens_and_stay_below_full_attention(shape: ModelShape, tokens: int, more: int) -> None:
    held, later = shape.kv_bytes(tokens), shape.kv_bytes(tokens + more)
    assert held <= later <= held + more * shape.kv_bytes_per_token
    assert held - 2 * shape.state_bytes <= tokens * shape.kv_bytes_per_token
    assert shape.loan_bytes(tokens) == pytest.approx(held - shape.state_bytes)
    if shape.is_uniform:
        assert held == tokens * shape.kv_bytes_per_token == tokens * shape.mean_token_bytes(tokens)


# ------------------------------------------------------------------ steps, plans and replays


def test_a_step_reads_windows_and_states_and_no_more() -> None:
    """Memory binds on a GPU with much arithmetic: the difference of two contexts is the KV between them."""
    gpu = replace(GPUS["H100"], flops=1e20)
    for name, between in (("gpt-oss-120b", 18 * 2048), ("qwen3-next-80b-a3b", 12 * 2048), ("llama-3.1-8b", 32 * 4096)):
        roofline = Roofline(known_shape(name), gpu)
        seconds = [roofline.seconds_of(StepWork(streams=10, context_tokens=10 * each)) for each in (4096, 8192)]
        assert seconds[1] - seconds[0] == pytest.approx(10 * 4096 * between / (3.35e12 * 0.75))
        weights = roofline.model.weight_bytes_read(10) + 10 * roofline.model.kv_bytes(4096)
        assert seconds[0] - roofline.step_s == pytest.approx(weights / (3.35e12 * 0.75))


def test_a_prompts_attention_ends_at_the_window() -> None:
    shape = known_shape("gpt-oss-120b")
    tokens, pairs = 8192, 8192 * 8193 // 2
    per_pair = 4 * 64 * 64
    assert shape.attention_flops(tokens, pairs) == 18 * per_pair * (pairs + 128 * tokens)
    assert shape.attention_flops(100, 5050) == 36 * per_pair * 5050


def test_a_pool_holds_sequences_of_the_loads_length() -> None:
    load = OfferedLoad(5, 16000, 300)
    for name in ("gpt-oss-120b", "qwen3.5-35b-a3b", "gemma-3-27b"):
        shape = known_shape(name)
        setup = Setup(shape, GPUS["H200"], gpus=1, sequence_tokens=load.context)
        streams = Streams(Roofline(shape, GPUS["H200"]), load, setup.block_tokens)
        room = 141e9 * 0.9 - shape.weight_bytes
        assert streams.fit == pytest.approx(room / shape.kv_bytes(load.context), rel=0.01)
        spec = spec_of(setup, "decode", apart=True)
        blocks = -(-round(load.context) // setup.block_tokens)
        assert spec.num_blocks * spec.layout.block_bytes == pytest.approx(room, rel=0.001)
        assert blocks * spec.layout.block_bytes == pytest.approx(shape.kv_bytes(load.context), rel=0.01)


def test_a_plan_of_a_model_with_windows_shows_and_keeps_what_it_says() -> None:
    setup = Setup(known_shape("gpt-oss-120b"), GPUS["H100"], gpus=1, slo=Slo(2.0, 0.05))
    made = plan(setup, OfferedLoad(3, 8000, 100))
    figures = {figure.what: figure for figure in dict(sections(made))["model and load"]}
    assert figures["KV of a sequence"].how == "18 layers x 8,062 tokens x 2.0 kB + 18 layers x 128 tokens x 2.0 kB"
    assert "GPUs of a worker" not in figures
    assert isinstance(made.apart.model, DisaggregatedPlan)
    moved = 3 * (18 * 2048 * (8000 + 128)) / (made.apart.model.decode.workers * 50e9)
    assert made.apart.model.link_utilisation == pytest.approx(moved)
    assert made.apart.setup.tp == made.apart.setup.decode_tp == 1
    assert check(made.apart, 150).results.kept_share >= GOAL


def test_a_plan_of_a_model_with_states_shows_them() -> None:
    made = plan(
        Setup(known_shape("qwen3.5-35b-a3b"), GPUS["H200"], gpus=1, slo=Slo(2.0, 0.05)), OfferedLoad(3, 8000, 100)
    )
    figures = {figure.what: figure.how for figure in dict(sections(made))["model and load"]}
    assert figures["state"] == "30 layers x 2,146.3 kB"
    assert figures["GPUs of a worker"].startswith("all that the vllm engine takes with recurrent states")
    assert figures["KV of a sequence"] == "10 layers x 8,062 tokens x 2.0 kB + 2 states x 64.4 MB"
