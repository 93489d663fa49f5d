"""Models of known shapes with random weights, made on the spot.

No benchmark depends on their output. `python -m bench.models NAME FOLDER DTYPE` makes one of `LLAMAS`.
"""

import json
import shutil
import sys
from pathlib import Path
from typing import Any

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

SMALL_LLAMA = {
    "vocab_size": 4096,
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": True,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
"""A shape of 26 million parameters, whose prompts of 1,024 tokens take a fifth of a second on one core."""

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

LLAMA_1B = LLAMA_8B | {
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "head_dim": 64,
    "tie_word_embeddings": True,
}

LLAMA_170M = LLAMA_8B | {
    "vocab_size": 32_000,
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 12,
    "num_attention_heads": 16,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": True,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
"""A shape of 174 million parameters, whose steps take tens of milliseconds on one core."""

LLAMAS = {"small": SMALL_LLAMA, "170m": LLAMA_170M, "1b": LLAMA_1B, "8b": LLAMA_8B}


def qwen2_half_b(path: Path, num_layers: int | None = None, dtype: str = "bfloat16") -> Path:
    """Make the shape of Qwen2 0.5 B once, with a tokenizer of one word per token.

    `num_layers` replaces the shape's 24.
    """
    if (path / "tokenizer.json").exists():
        return path
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    shutil.rmtree(path, ignore_errors=True)
    torch.manual_seed(0)
    with torch.device("cpu"):
        shape = QWEN2_HALF_B | ({} if num_layers is None else {"num_hidden_layers": num_layers})
        model = Qwen2ForCausalLM(Qwen2Config(**shape)).to(getattr(torch, dtype))
    model.save_pretrained(path)
    word_tokenizer(path, QWEN2_HALF_B["vocab_size"], "w151643")
    return path


def llama(path: Path, shape: dict[str, Any], dtype: str = "bfloat16", device: str = "cpu") -> Path:
    """Make a Llama of this shape once, on the device, with a tokenizer of one word per token."""
    if (path / "tokenizer.json").exists():
        return path
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig

    shutil.rmtree(path, ignore_errors=True)
    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(LlamaConfig(**shape), dtype=getattr(torch, dtype))
    model.save_pretrained(path)
    del model
    if device == "cuda":
        torch.cuda.empty_cache()
    word_tokenizer(path, shape["vocab_size"], "w1")
    return path


def cpu_dtype() -> str:
    """Return the precision in which this machine's CPU multiplies fast."""
    return "bfloat16" if "avx512_bf16" in Path("/proc/cpuinfo").read_text() else "float32"


def kv_bytes_per_token(shape: dict[str, Any]) -> int:
    """Return the bytes of one token's keys and values in bfloat16."""
    head_dim = shape.get("head_dim") or shape["hidden_size"] // shape["num_attention_heads"]
    return int(shape["num_hidden_layers"] * shape["num_key_value_heads"] * head_dim * 2 * 2)


def word_tokenizer(path: Path, vocab_size: int, eos_token: str) -> None:
    """Write a tokenizer of one word per token, without a decoder."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {f"w{number}": number for number in range(vocab_size)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    template = "{% for message in messages %}{{ message['content'] }} {% endfor %}"
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=eos_token, chat_template=template).save_pretrained(
        path
    )


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


def main() -> None:
    """Make the model that the command line names; in vLLM's environment, too."""
    import torch

    name, path, dtype = sys.argv[1:]
    llama(Path(path), LLAMAS[name], dtype, "cuda" if torch.cuda.is_available() else "cpu")


if __name__ == "__main__":
    main()
