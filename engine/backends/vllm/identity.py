"""Fingerprints of what decides the KV that vLLM computes, besides its layout."""

import json
from hashlib import blake2b
from pathlib import Path
from typing import Any

from engine.errors import EngineStartError, ModelRefused
from engine.model.model_dir import ModelDir


def kv_weights(files: bytes, vllm_config: Any) -> bytes:
    """Return the fingerprint of the weights and settings that decide the KV of tokens, 32 bytes.

    `files` is the fingerprint of the model's files. Raises EngineStartError for a draft model that cannot be read.
    """
    weights = files + digest_of(vllm_config.model_config)
    drafts = vllm_config.speculative_config
    if drafts is not None and drafts.uses_draft_kv_cache():
        weights += drafts.method.encode() + draft_weights(vllm_config) + digest_of(drafts.draft_model_config)
    return blake2b(weights, digest_size=32).digest()


def draft_weights(vllm_config: Any) -> bytes:
    """Return the fingerprint of the weights of a draft model; empty where the drafts need none of their own.

    Raises EngineStartError.
    """
    draft = vllm_config.speculative_config.draft_model_config
    if draft is None or draft.model == vllm_config.model_config.model:
        return b""
    try:
        return ModelDir.open(Path(draft.model)).weights_fingerprint()
    except ModelRefused as error:
        raise EngineStartError("vllm_options", f"speculative_config: model: {error}") from None


def digest_of(model_config: Any) -> bytes:
    """Return a digest of what decides the KV of given weights: the configuration after overrides, and quantisation."""
    facts = model_config.hf_config.to_dict() | {"quantization": model_config.quantization}
    for of_the_host in ("_name_or_path", "transformers_version"):
        facts.pop(of_the_host, None)
    return blake2b(json.dumps(facts, sort_keys=True, default=str).encode(), digest_size=32).digest()


def num_kv_heads(model_config: Any) -> int:
    """Return the number of KV heads of a model; 1 for MLA, whose latent vectors are of no head."""
    return 1 if model_config.use_mla else int(model_config.get_total_num_kv_heads())
