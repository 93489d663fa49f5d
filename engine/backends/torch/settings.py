"""Settings of the torch engine."""

from typing import Literal

from pydantic import Field, field_validator

from engine.kv.layout import KvDtype
from engine.model.hub import ModelPath
from engine.model.quantization import ON_GPUS, QuantizationConfig, Weights
from engine.settings import CommonSettings
from engine.speculation.speculator import MAX_GUESSES


class TorchSettings(CommonSettings):
    """Part of a worker's settings that only the torch engine reads."""

    weights: Weights = "auto"
    """Format of linear layers, the output layer included. auto: as saved, also if saved quantised by GPTQ, AWQ or in
    float8. int8 (CPUs): quantised at load, half the memory and nearly half the time of a decode step. int4 (CPUs):
    less of both, but prompts take a quarter more time than as saved, and some quality is lost. On a GPU the torch
    engine refuses quantised weights, also those of a model saved quantised: set `engine: vllm`, with `vllm_args:
    --quantization fp8` for a model that is not. Only workers with equal weights exchange KV."""
    lora: ModelPath | None = None
    """Directory or repository of a LoRA adapter as PEFT saves it (adapter_config.json, adapter_model.safetensors),
    merged into the weights at load, before quantisation. Routers do not see it: all workers of a model need the same
    adapter; a model with another adapter is a directory of its own."""
    kv_dtype: KvDtype = "auto"
    """Format of stored, lent and moved KV. auto: as computed. int8 (any device), fp8 (GPUs): each vector quantised with
    its own scale, so nearly twice as many blocks fit into `kv_memory_mib`. Only workers with equal settings exchange
    KV."""
    backend: Literal["auto", "native", "flashinfer", "triton", "sdpa"] = "auto"
    """Kernels of the torch engine. native: compiled once for this machine's CPU. flashinfer: NVIDIA GPUs. triton: GPUs,
    also with quantised KV. sdpa: torch's own on any device, several times slower. auto: native where a C++ compiler
    is found; on a GPU flashinfer, or triton where KV is quantised or flashinfer is missing; sdpa with a warning
    where these do not know the dtype."""
    speculation: str | None = None
    """Source of draft tokens of a decode worker. ngram: the tokens that followed earlier occurrences of the last
    tokens, in prompt or output. off: none. A directory or repository: a draft model, smaller and of the same
    vocabulary, whose KV comes on top of `kv_memory_mib`. The output does not depend on it, and drafts that do not pay
    are not made. Default: ngram. A prefill worker that becomes a decode worker uses ngram instead of a draft model. The
    sim engine has none."""
    speculation_tokens: int = Field(default=MAX_GUESSES, ge=1, le=32)
    """Largest number of draft tokens for one sequence in one step."""

    @field_validator("weights", mode="before")
    @classmethod
    def _fp8_is_no_value(cls, value: object) -> object:
        """Refuse `fp8`, a value of earlier versions, with what to set instead."""
        if value == "fp8":
            raise ValueError(f"fp8 is not a value any more: {ON_GPUS}")
        return value

    @field_validator("speculation", mode="before")
    @classmethod
    def _off_is_a_word(cls, value: object) -> object:
        """Accept `off`, which YAML reads as false."""
        return "off" if value is False else value

    def quantization(self) -> QuantizationConfig:
        return QuantizationConfig(weights=self.weights, kv_dtype=self.kv_dtype, lora=self.lora)
