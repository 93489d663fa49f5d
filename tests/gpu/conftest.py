"""Models whose heads are large enough for GPU kernels. Everything here is skipped where torch sees no GPU."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

VOCAB = 1000


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        if os.environ["TRITON_INTERPRET"] != "0":
            raise pytest.UsageError("kernels would be interpreted: run `make gpu`, or with TRITON_INTERPRET=0")
        return
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.skip(reason="torch sees no CUDA device here"))


def _configs() -> dict[str, Callable[[], Any]]:
    import transformers as tf

    common: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": 512,
        "intermediate_size": 1024,
        "num_hidden_layers": 3,
        "num_attention_heads": 8,
        "max_position_embeddings": 2048,
        "eos_token_id": None,
        "bos_token_id": None,
        "pad_token_id": 0,
    }
    return {
        "llama": lambda: tf.LlamaConfig(**common, num_key_value_heads=2),  # groups of 4: tensor cores decode
        "qwen2": lambda: tf.Qwen2Config(**common, num_key_value_heads=8),  # no groups: they do not
        "qwen3": lambda: tf.Qwen3Config(**common, num_key_value_heads=4, head_dim=128),
        "mistral": lambda: tf.MistralConfig(**common, num_key_value_heads=2, sliding_window=40),
        "gemma2": lambda: tf.Gemma2Config(**common, num_key_value_heads=4, head_dim=64, sliding_window=40),
        "mixtral": lambda: tf.MixtralConfig(**common, num_key_value_heads=2, num_local_experts=4),
    }


@pytest.fixture(scope="session")
def wide_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """wide_model(family, dtype="float32") -> its directory, made once a session."""
    made: dict[tuple[str, str], Path] = {}

    def make(family: str, dtype: str = "float32") -> Path:
        if (family, dtype) not in made:
            from transformers import AutoModelForCausalLM

            torch.manual_seed(0)
            model = AutoModelForCausalLM.from_config(_configs()[family]()).to(getattr(torch, dtype))
            with torch.no_grad():
                for parameter in model.parameters():
                    if parameter.dim() > 1:
                        parameter.normal_(0, 0.05)
            path = tmp_path_factory.mktemp("models") / f"wide-{family}-{dtype}"
            model.save_pretrained(path)
            made[(family, dtype)] = path
        return made[(family, dtype)]

    return make
