"""Models of known shapes with random weights, made on the spot.

No benchmark depends on their output.
"""

import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from engine.backends.torch.runner import BuiltModel

SIM_VOCAB = 1000
QWEN2_HALF_B = {
    "vocab_size": 151_936,
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32_768,
    "tie_word_embeddings": True,
    "eos_token_id": 151_643,
    "bos_token_id": 151_643,
}

LLAMA_8B = {
    "vocab_size": 128_256,
    "hidden_size": 4096,
    "intermediate_size": 14_336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 16_384,
    "tie_word_embeddings": False,
    "eos_token_id": 128_001,
    "bos_token_id": 128_000,
}


def llama_8b(device: str) -> "BuiltModel":
    """Make the shape of Llama 3 8 B in bfloat16 on the device: 16 GB, and no file."""
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig

    from engine.backends.torch.runner import BuiltModel
    from engine.model_runner import ModelInfo

    with torch.device(device):
        model = AutoModelForCausalLM.from_config(LlamaConfig(**LLAMA_8B), dtype=torch.bfloat16).eval()
    info = ModelInfo(
        weights_fingerprint=bytes(32),
        vocab_size=LLAMA_8B["vocab_size"],
        max_context_tokens=LLAMA_8B["max_position_embeddings"],
        eos_token_ids=frozenset(),
    )
    return BuiltModel(model, info)


def qwen2_half_b(path: Path, num_layers: int | None = None, dtype: str = "bfloat16") -> Path:
    """Make the shape of Qwen2 0.5 B once, with a tokenizer of one word per token.

    `num_layers` replaces the shape's 24.
    """
    if (path / "tokenizer.json").exists():
        return path
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

    shutil.rmtree(path, ignore_errors=True)
    torch.manual_seed(0)
    with torch.device("cpu"):
        shape = QWEN2_HALF_B | ({} if num_layers is None else {"num_hidden_layers": num_layers})
        model = Qwen2ForCausalLM(Qwen2Config(**shape)).to(getattr(torch, dtype))
    model.save_pretrained(path)
    vocabulary = {f"w{number}": number for number in range(QWEN2_HALF_B["vocab_size"])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="w151643").save_pretrained(path)
    return path


def sim_model(path: Path, context: int = 1 << 20) -> Path:
    """Make a directory with the files that sim workers and a router read of a model; no weights, no tokenizer."""
    path.mkdir(parents=True, exist_ok=True)
    config = {"model_type": "llama", "vocab_size": SIM_VOCAB, "max_position_embeddings": context}
    (path / "config.json").write_text(json.dumps(config))
    return path


def weight_bytes(path: Path) -> int:
    """Return the size of the weights as saved."""
    return sum(file.stat().st_size for file in path.glob("*.safetensors"))


def linear_shapes(path: Path) -> list[tuple[int, int, int]]:
    """Return (outputs, inputs, count) of every kind of linear layer, the output layer included."""
    config = json.loads((path / "config.json").read_text())
    hidden, inner, layers = config["hidden_size"], config["intermediate_size"], config["num_hidden_layers"]
    kv = hidden // config["num_attention_heads"] * config["num_key_value_heads"]
    return [
        (hidden, hidden, 2 * layers),
        (kv, hidden, 2 * layers),
        (inner, hidden, 2 * layers),
        (hidden, inner, layers),
        (config["vocab_size"], hidden, 1),
    ]
