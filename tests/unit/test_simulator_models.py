"""What a model's config and a GPU's figures make of steps and memory."""

from dataclasses import replace

import pytest

from engine.backends.sim.settings import StepWork
from sizing.comparison.replay import Scenario, Setup, replay, spec_of
from sizing.gpus import GPUS, Roofline, gpu_named
from sizing.models.model_shape import DEFAULT_CONFIG, open_shape, shape_of
from workloads.request import BadSetup

LLAMA = open_shape(None)
SETUP = Setup(LLAMA, gpu_named("h100"), gpus=4)


def test_the_shape_of_a_dense_model() -> None:
    assert LLAMA.params == pytest.approx(8.03e9, rel=0.001)
    assert LLAMA.kv_bytes_per_token == 128 << 10
    assert LLAMA.weight_bytes_read(1) == LLAMA.weight_bytes


def test_the_shape_of_a_mixture_of_experts() -> None:
    mixtral = DEFAULT_CONFIG | {"num_local_experts": 8, "num_experts_per_tok": 2, "vocab_size": 32000}
    shape = shape_of("mixtral", mixtral)
    assert shape.params == pytest.approx(46.7e9, rel=0.01)
    assert shape.active_params == pytest.approx(12.6e9, rel=0.02)
    one, many = shape.weight_bytes_read(1), shape.weight_bytes_read(1000)
    assert one == pytest.approx(shape.weight_bytes - 0.75 * 2 * shape.expert_params)
    assert many == pytest.approx(shape.weight_bytes)


OPT_13B = {
    "model_type": "opt",
    "hidden_size": 5120,
    "ffn_dim": 20480,
    "num_hidden_layers": 40,
    "num_attention_heads": 40,
    "vocab_size": 50272,
    "torch_dtype": "float16",
}
GPT2 = {"model_type": "gpt2", "n_embd": 768, "n_layer": 12, "n_head": 12, "n_inner": None, "vocab_size": 50257}


@pytest.mark.parametrize(
    ("config", "params"),
    [
        (OPT_13B, 12.84e9),
        (GPT2, 123.5e6),
        (OPT_13B | {"tie_word_embeddings": False}, 13.10e9),
        (DEFAULT_CONFIG | {"model_type": "gemma2"}, 7.50e9),
        (DEFAULT_CONFIG | {"model_type": "falcon", "multi_query": True, "num_key_value_heads": None}, 5.39e9),
    ],
)
def test_parameters_of_other_families(config: dict[str, object], params: float) -> None:
    assert shape_of("x", config).params == pytest.approx(params, rel=0.005)


@pytest.mark.parametrize(
    ("quantised", "bits"),
    [
        ({"quant_method": "gptq", "bits": 4}, 4),
        ({"quant_method": "awq", "w_bit": 4}, 4),
        ({"quant_method": "bitsandbytes", "load_in_8bit": True}, 8),
        ({"load_in_4bit": True}, 4),
        ({"quant_method": "fp8"}, 8),
        ({"quant_method": "compressed-tensors", "config_groups": {"group_0": {"weights": {"num_bits": 8}}}}, 8),
    ],
)
def test_quantised_layers_have_fewer_bytes_and_embeddings_do_not(quantised: dict[str, object], bits: int) -> None:
    shape = shape_of("x", DEFAULT_CONFIG | {"quantization_config": quantised})
    rest = 2 * 128256 * 4096
    assert shape.weight_bytes == (shape.params - rest) * bits // 8 + rest * 2
    assert shape.weight_bytes_read(1) == shape.weight_bytes
    assert shape.kv_bytes_per_token == LLAMA.kv_bytes_per_token


def test_eight_bit_weights_have_the_same_kv_in_memory_and_on_links() -> None:
    setup = replace(SETUP, model=shape_of("x", DEFAULT_CONFIG | {"torch_dtype": "float8_e4m3fn"}))
    assert setup.model.weight_bytes == LLAMA.weight_bytes // 2
    layout = spec_of(setup, "decode", apart=True).layout
    assert layout.block_bytes == setup.model.kv_bytes_per_token * setup.block_tokens


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"kv_lora_rank": 512}, "kv_lora_rank: latent attention"),
        ({"num_key_value_heads": 0}, "num_key_value_heads is 0"),
        ({"head_dim": 0}, "head_dim is 0"),
        ({"num_attention_heads": 8192}, "8192 attention heads are more than the hidden size, 4096"),
        ({"torch_dtype": 9 * "int3"}, "torch_dtype 'int3int3"),
        ({"quantization_config": {"quant_method": "hqq"}}, "unknown quant_method 'hqq'; known are gptq"),
        ({"hidden_size": None}, "has no hidden_size"),
        ({"num_hidden_layers": -1}, "num_hidden_layers is -1"),
        ({"vocab_size": "many"}, "vocab_size is 'many'"),
        ({"torch_dtype": "int3"}, "'int3'"),
        ({"num_experts": 4}, "4 experts"),
    ],
)
def test_a_config_that_says_too_little(change: dict[str, object], said: str) -> None:
    with pytest.raises(BadSetup, match=said):
        shape_of("x", DEFAULT_CONFIG | change)


def test_rooflines_are_bound_by_what_binds_them() -> None:
    roofline = Roofline(LLAMA, gpu_named("H100"))
    decode = roofline.seconds_of(StepWork(streams=1, context_tokens=1)) - roofline.step_s
    assert decode == pytest.approx(LLAMA.weight_bytes / (3.35e12 * 0.75), rel=0.01)
    prompt = roofline.seconds_of(StepWork(8192, 0)) - roofline.step_s
    assert prompt == pytest.approx(2 * LLAMA.active_params * 8192 / (989e12 * 0.5))
    two = replace(roofline, tp=2)
    assert two.seconds_of(StepWork(8192, 0)) - two.step_s == pytest.approx(prompt / 1.8)
    assert two.num_blocks(64) > 2 * roofline.num_blocks(64)  # the weights are there once
    for gpu in GPUS.values():
        assert Roofline(LLAMA, gpu).num_blocks(64) > 0 or gpu.memory_bytes < 24e9


def test_a_model_that_does_not_fit() -> None:
    large = shape_of("large", DEFAULT_CONFIG | {"num_hidden_layers": 320})
    with pytest.raises(BadSetup, match="weights"):
        replay(replace(SETUP, model=large), Scenario("aggregated", 0, 4), [])
