"""Tiny models that read pictures or sounds: configs, processors, word tokenizers, chat templates, and random weights.

`python -m support.tiny_media_models KIND FOLDER [--weights]` writes one; weights need the environment with vLLM.
"""

import json
import sys
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

WORDS = 400
"""Size of each vocabulary: special tokens, then the words w20, w21, ..."""
CONTEXT = 2048
TEXT: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": WORDS,
    "max_position_embeddings": CONTEXT,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
}
MEL_BINS = 32
NORMAL = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
QWEN_TOKENS = (
    *("<|im_start|>", "<|im_end|>", "<unk>", "<|endoftext|>"),
    *("<|vision_start|>", "<|vision_end|>", "<|vision_pad|>", "<|image_pad|>", "<|video_pad|>"),
)
QWEN_TEMPLATE = """{% for message in messages %}<|im_start|> {{ message.role }} \
{% if message.content is string %}{{ message.content }} {% else %}{% for part in message.content %}\
{% if part.type == 'image' or 'image' in part or 'image_url' in part %}<|vision_start|><|image_pad|><|vision_end|> \
{% elif part.type == 'video' or 'video' in part %}<|vision_start|><|video_pad|><|vision_end|> \
{% elif 'text' in part %}{{ part.text }} {% endif %}{% endfor %}{% endif %}<|im_end|> {% endfor %}\
{% if add_generation_prompt %}<|im_start|> assistant {% endif %}"""
AUDIO_TOKENS = (
    *("<|im_start|>", "<|im_end|>", "<unk>", "<|endoftext|>"),
    *("<|AUDIO|>", "<|audio_bos|>", "<|audio_eos|>"),
)
AUDIO_TEMPLATE = """{% for message in messages %}<|im_start|> {{ message.role }} \
{% if message.content is string %}{{ message.content }} {% else %}{% for part in message.content %}\
{% if part.type == 'audio' %}<|audio_bos|><|AUDIO|><|audio_eos|> {% elif 'text' in part %}{{ part.text }} {% endif %}\
{% endfor %}{% endif %}<|im_end|> {% endfor %}{% if add_generation_prompt %}<|im_start|> assistant {% endif %}"""
LLAVA_TEMPLATE = """{% for message in messages %}{{ message.role }} : {{ message.content + ' ' }}{% endfor %}\
{% if add_generation_prompt %}assistant : {% endif %}"""
"""Template that reads strings only, so that a picture is its placeholder text."""
GEMMA_TEMPLATE = """{{ bos_token }} {% for message in messages %}<start_of_turn> {{ message.role }} \
{% if message.content is string %}{{ message.content }} {% else %}{% for part in message.content %}\
{% if part.type == 'image' %}<start_of_image> {% elif part.type == 'text' %}{{ part.text }} {% endif %}\
{% endfor %}{% endif %}<end_of_turn> {% endfor %}{% if add_generation_prompt %}<start_of_turn> model {% endif %}"""


def _llava() -> dict[str, Any]:
    text = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "head_dim": 32, "dtype": "float32", **TEXT}
    vision = {
        "model_type": "clip_vision_model",
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "image_size": 56,
        "patch_size": 14,
        "projection_dim": 64,
        "hidden_act": "quick_gelu",
        "layer_norm_eps": 1e-5,
        "num_channels": 3,
    }
    return {
        "config.json": {
            "architectures": ["LlavaForConditionalGeneration"],
            "model_type": "llava",
            "image_token_index": 4,
            "image_token_id": 4,
            "projector_hidden_act": "gelu",
            "vision_feature_layer": -2,
            "vision_feature_select_strategy": "default",
            "image_seq_length": 16,
            "multimodal_projector_bias": True,
            "dtype": "float32",
            "text_config": text,
            "vision_config": vision,
        },
        "preprocessor_config.json": {
            "image_processor_type": "CLIPImageProcessor",
            "processor_class": "LlavaProcessor",
            "crop_size": {"height": 56, "width": 56},
            "size": {"shortest_edge": 56},
            **dict.fromkeys(("do_center_crop", "do_normalize", "do_resize", "do_rescale", "do_convert_rgb"), True),
            "resample": 3,
            "rescale_factor": 1 / 255,
            **NORMAL,
        },
        "processor_config.json": {
            "processor_class": "LlavaProcessor",
            "image_token": "<image>",
            "patch_size": 14,
            "vision_feature_select_strategy": "default",
            "num_additional_image_tokens": 1,
        },
    }


def _qwen25_vl() -> dict[str, Any]:
    vision = {
        "model_type": "qwen2_5_vl",
        "depth": 2,
        "hidden_act": "silu",
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_heads": 2,
        "in_channels": 3,
        "in_chans": 3,
        "out_hidden_size": 128,
        "patch_size": 14,
        "spatial_merge_size": 2,
        "spatial_patch_size": 14,
        "window_size": 112,
        "fullatt_block_indexes": [1],
        "tokens_per_second": 2,
        "temporal_patch_size": 2,
    }
    return {
        "config.json": {
            "architectures": ["Qwen2_5_VLForConditionalGeneration"],
            "model_type": "qwen2_5_vl",
            "dtype": "float32",
            "tie_word_embeddings": False,
            "rope_theta": 10000.0,
            "rope_scaling": {"type": "mrope", "mrope_section": [4, 6, 6]},
            **_qwen_tokens(),
            **TEXT,
            "vision_config": vision,
        },
        "preprocessor_config.json": {
            "min_pixels": 3136,
            "max_pixels": 50176,
            "patch_size": 14,
            "temporal_patch_size": 2,
            "merge_size": 2,
            "image_processor_type": "Qwen2VLImageProcessor",
            "processor_class": "Qwen2_5_VLProcessor",
            **NORMAL,
        },
    }


def _qwen3_vl() -> dict[str, Any]:
    vision = {
        "model_type": "qwen3_vl",
        "depth": 3,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_heads": 2,
        "in_channels": 3,
        "out_hidden_size": 128,
        "patch_size": 16,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "num_position_embeddings": 64,
        "deepstack_visual_indexes": [1],
        "hidden_act": "gelu_pytorch_tanh",
        "initializer_range": 0.02,
    }
    rope = {"rope_type": "default", "mrope_section": [4, 6, 6], "mrope_interleaved": True, "rope_theta": 10000.0}
    text = {
        "model_type": "qwen3_vl_text",
        "head_dim": 32,
        "rope_theta": 10000.0,
        "rope_scaling": rope,
        "dtype": "float32",
        "attention_bias": False,
        "tie_word_embeddings": False,
        **TEXT,
    }
    return {
        "config.json": {
            "architectures": ["Qwen3VLForConditionalGeneration"],
            "model_type": "qwen3_vl",
            "dtype": "float32",
            "tie_word_embeddings": False,
            **_qwen_tokens(),
            "text_config": text,
            "vision_config": vision,
        },
        "preprocessor_config.json": {
            "size": {"shortest_edge": 4096, "longest_edge": 65536},
            "patch_size": 16,
            "temporal_patch_size": 2,
            "merge_size": 2,
            "image_processor_type": "Qwen2VLImageProcessorFast",
            "processor_class": "Qwen3VLProcessor",
            **NORMAL,
        },
        "video_preprocessor_config.json": {
            "size": {"shortest_edge": 4096, "longest_edge": 262144},
            "patch_size": 16,
            "temporal_patch_size": 2,
            "merge_size": 2,
            "video_processor_type": "Qwen3VLVideoProcessor",
            "processor_class": "Qwen3VLProcessor",
            **NORMAL,
        },
    }


def _gemma3() -> dict[str, Any]:
    text = {
        "model_type": "gemma3_text",
        "head_dim": 32,
        "query_pre_attn_scalar": 32,
        "sliding_window": 64,
        "layer_types": ["sliding_attention", "full_attention"],
        "dtype": "float32",
        **TEXT,
        "hidden_activation": "gelu_pytorch_tanh",
    }
    vision = {
        "model_type": "siglip_vision_model",
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "image_size": 56,
        "patch_size": 14,
        "vision_use_head": False,
    }
    return {
        "config.json": {
            "architectures": ["Gemma3ForConditionalGeneration"],
            "model_type": "gemma3",
            "dtype": "float32",
            "boi_token_index": 6,
            "eoi_token_index": 7,
            "image_token_index": 8,
            "image_token_id": 8,
            "mm_tokens_per_image": 4,
            "text_config": text,
            "vision_config": vision,
        },
        "preprocessor_config.json": {
            "image_processor_type": "Gemma3ImageProcessor",
            "processor_class": "Gemma3Processor",
            "image_seq_length": 4,
            "size": {"height": 56, "width": 56},
            "resample": 2,
            "rescale_factor": 1 / 255,
            **dict.fromkeys(("do_normalize", "do_resize", "do_rescale"), True),
            "do_pan_and_scan": False,
            **NORMAL,
        },
        "processor_config.json": {"processor_class": "Gemma3Processor", "image_seq_length": 4},
    }


def _qwen2_audio() -> dict[str, Any]:
    sound = {
        "model_type": "qwen2_audio_encoder",
        "num_mel_bins": MEL_BINS,
        "d_model": 64,
        "encoder_layers": 2,
        "encoder_attention_heads": 2,
        "encoder_ffn_dim": 128,
        "max_source_positions": 1500,
    }
    text = {"model_type": "qwen2", "dtype": "float32", "rope_theta": 10000.0, "tie_word_embeddings": False, **TEXT}
    return {
        "config.json": {
            "architectures": ["Qwen2AudioForConditionalGeneration"],
            "model_type": "qwen2_audio",
            "dtype": "float32",
            "audio_token_index": 4,
            "text_config": text,
            "audio_config": sound,
        },
        "preprocessor_config.json": {
            "feature_extractor_type": "WhisperFeatureExtractor",
            "processor_class": "Qwen2AudioProcessor",
            "feature_size": MEL_BINS,
            "sampling_rate": 16_000,
            "chunk_length": 30,
            "hop_length": 160,
            "n_fft": 400,
            "return_attention_mask": True,
        },
    }


def _qwen_tokens() -> dict[str, int]:
    names = ("bos_token_id", "eos_token_id", "", "", "vision_start_token_id", "vision_end_token_id")
    ids = {name: number for number, name in enumerate(names) if name}
    return ids | {"vision_token_id": 6, "image_token_id": 7, "video_token_id": 8}


GEMMA_TOKENS = (
    *("<bos>", "<eos>", "<unk>", "<pad>", "<start_of_turn>", "<end_of_turn>"),
    *("<start_of_image>", "<end_of_image>", "<image_soft_token>", "\n", "\n\n", "\n\n\n", "\n\n\n\n"),
)
KINDS: dict[str, tuple[Any, tuple[str, ...], str]] = {
    "llava": (_llava, ("<s>", "</s>", "<unk>", "<pad>", "<image>"), LLAVA_TEMPLATE),
    "qwen25vl": (_qwen25_vl, QWEN_TOKENS, QWEN_TEMPLATE),
    "qwen3vl": (_qwen3_vl, QWEN_TOKENS, QWEN_TEMPLATE),
    "gemma3": (_gemma3, GEMMA_TOKENS, GEMMA_TEMPLATE),
}
"""Files of each model that reads pictures, its special tokens in the order of their ids, and its chat template."""
HEARING: dict[str, tuple[Any, tuple[str, ...], str]] = {"qwen2audio": (_qwen2_audio, AUDIO_TOKENS, AUDIO_TEMPLATE)}
"""The same of each model that reads sounds."""
PLACEHOLDERS = {
    "llava": "<image>",
    "qwen25vl": "<|vision_start|><|image_pad|><|vision_end|>",
    "qwen3vl": "<|vision_start|><|image_pad|><|vision_end|>",
    "gemma3": "<start_of_image>",
    "qwen2audio": "<|audio_bos|><|AUDIO|><|audio_eos|>",
}
VIDEO_PLACEHOLDER = "<|vision_start|><|video_pad|><|vision_end|>"
"""Placeholder of a video, of the Qwen models."""


def write_media_model(kind: str, folder: Path) -> Path:
    """Write a model without weights; returns its directory."""
    files, specials, template = (KINDS | HEARING)[kind]
    path = folder / kind
    path.mkdir(parents=True)
    for name, content in files().items():
        (path / name).write_text(json.dumps(content))
    (path / "chat_template.jinja").write_text(template)
    _write_tokenizer(path, specials, kind)
    return path


def _write_tokenizer(path: Path, specials: tuple[str, ...], kind: str) -> None:
    words = {token: number for number, token in enumerate(specials)}
    words |= {f"w{number}": number for number in range(len(specials), WORDS)}
    named = [("user", 300), ("assistant", 301), ("system", 302), (":", 303), ("model", 304)]
    named += [("\n" * count, 304 + count) for count in range(1, 5)]  # Gemma's processor looks for them
    for name, number in named:
        del words[f"w{number}"]
        words[name] = number
    tokenizer = Tokenizer(models.WordLevel(words, unk_token=specials[2]))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.decoder = decoders.WordPiece(prefix="##", cleanup=False)
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in specials])
    tokenizer.save(str(path / "tokenizer.json"))
    bos, eos, unk, pad, *others = specials
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": bos,
        "eos_token": eos,
        "unk_token": unk,
        "pad_token": pad,
        "additional_special_tokens": others,
    }
    if kind == "gemma3":
        config |= {"boi_token": others[2], "eoi_token": others[3], "image_token": others[4]}
        config |= {"boi_token_id": 6, "eoi_token_id": 7, "image_token_id": 8}
    (path / "tokenizer_config.json").write_text(json.dumps(config))


def write_weights(path: Path, seed: int = 3) -> None:
    """Write random weights into a model's directory; with transformers and torch."""
    import torch
    import transformers
    from safetensors.torch import load_file, save_file

    torch.manual_seed(seed)
    config = transformers.AutoConfig.from_pretrained(path)
    model = transformers.AutoModelForMultimodalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():  # the usual initialisation is so small that logits hardly differ
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                # Gemma multiplies embeddings and gives them to the output: larger ones would repeat the last token
                is_large = "embed_tokens" in name and config.model_type == "gemma3"
                parameter.normal_(0.0, 0.01 if is_large else 0.1)
    kept = (path / "config.json").read_text()
    model.save_pretrained(path)
    (path / "config.json").write_text(kept)
    (file,) = path.glob("*.safetensors")
    save_file({_published_name(name): tensor for name, tensor in load_file(file).items()}, file, {"format": "pt"})


def _published_name(name: str) -> str:
    """Return a weight's name as published models have it, which vLLM reads."""
    name = name.replace("language_model.model.model.", "language_model.model.")  # Qwen2-Audio's
    prefix = "vision_tower."
    return f"{prefix}vision_model.{name.removeprefix(prefix)}" if name.startswith(prefix) else name


if __name__ == "__main__":
    written = Path(sys.argv[2], sys.argv[1])
    if not written.exists():
        write_media_model(sys.argv[1], Path(sys.argv[2]))
    if "--weights" in sys.argv:
        write_weights(written)
    print(written)
