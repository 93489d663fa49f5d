"""Small random models whose head sizes vLLM's CPU attention takes, one of each kind of KV cache."""

from pathlib import Path
from typing import Any

import torch
import transformers

VOCAB = 512
COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 1024,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "initializer_range": 0.1,
}
SLIDING = {"sliding_window": 64, "layer_types": ["sliding_attention", "full_attention"] * 2}
LINEAR = {
    "layer_types": ["linear_attention"] * 3 + ["full_attention"],
    "head_dim": 64,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "linear_conv_kernel_dim": 4,
}
"""Three layers with recurrent states for one of full attention; vLLM computes these in bfloat16 only."""
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {}),
    "qwen3": ("Qwen3Config", {}),
    "gemma3": ("Gemma3TextConfig", SLIDING | {"query_pre_attn_scalar": 32}),
    "mixtral": ("MixtralConfig", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "gpt_oss": ("GptOssConfig", SLIDING | {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen3_moe": ("Qwen3MoeConfig", {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}),
    "glm4_moe": (
        "Glm4MoeConfig",
        {
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 64,
            "n_group": 1,
            "topk_group": 1,
            "first_k_dense_replace": 1,
        },
    ),
    "qwen3_next": (
        "Qwen3NextConfig",
        LINEAR | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "decoder_sparse_step": 1},
    ),
    "qwen3_5": ("Qwen3_5TextConfig", LINEAR),
    "deepseek": (
        "DeepseekV3Config",
        {
            "num_key_value_heads": 4,
            "head_dim": 64,
            "q_lora_rank": 64,
            "kv_lora_rank": 512,
            "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64,
            "v_head_dim": 128,
            "moe_intermediate_size": 64,
            "n_routed_experts": 8,
            "n_group": 2,
            "topk_group": 1,
            "num_experts_per_tok": 2,
            "first_k_dense_replace": 1,
            "topk_method": "noaux_tc",
            "scoring_func": "sigmoid",
        },
    ),
}


def write_model(kind: str, folder: Path, **options: Any) -> Path:
    """Write a random model in float32; returns its directory. `options` go into its configuration."""
    path = folder / kind
    name, changes = KINDS[kind]
    torch.manual_seed(11)
    config = getattr(transformers, name)(**(COMMON | changes | options))
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():  # so that attention reaches far, and the likeliest token is clear
        for parameter_name, parameter in model.named_parameters():
            if "sinks" in parameter_name or parameter_name.endswith("bias"):
                parameter.normal_(0.0, 0.5)
    model.save_pretrained(path)
    return path
