"""Quantisation settings of a model: format of weights and KV, and a merged adapter.

Needs no torch.
"""

from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Literal

from engine.errors import EngineStartError
from engine.kv.layout import KvDtype

Weights = Literal["auto", "int8", "int4"]

ON_GPUS = "on a GPU set engine: vllm and vllm_args: --quantization fp8"
"""Advice for quantised weights on a GPU, which the torch engine does not compute with."""
ONLY_ON_CPUS = f"is for CPUs only: {ON_GPUS}"
"""Reason, after the format, why the torch engine refuses `weights` on a GPU."""

ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors")
"""Files of a LoRA adapter as PEFT saves it."""
SCHEME = 1
"""Version of the quantisation scheme, raised when equal saved weights would give other numbers."""


@dataclass(frozen=True, slots=True)
class QuantizationConfig:
    """Quantisation of weights and KV, and an adapter.

    The default is the model as saved.
    """

    weights: Weights = "auto"
    """Format of linear layers; auto: as saved."""
    kv_dtype: KvDtype = "auto"
    """Format of KV, part of the KV layout and not of the weights."""
    lora: Path | None = None
    """Directory of an adapter that is merged into the weights first."""

    def fingerprint(self, saved: bytes) -> bytes:
        """Return the fingerprint of the computed weights from `saved`, that of the files.

        32 bytes.

        Equal to `saved` for weights as saved. Raises EngineStartError where the adapter cannot be read.
        """
        if self.weights == "auto" and self.lora is None:
            return saved
        digest = blake2b(f"{SCHEME},{self.weights},".encode() + saved, digest_size=32)
        for name in ADAPTER_FILES if self.lora is not None else ():
            digest.update(blake2b(self._read(name)).digest())
        return digest.digest()

    def _read(self, name: str) -> bytes:
        assert self.lora is not None
        try:
            return (self.lora / name).read_bytes()
        except OSError as error:
            raise EngineStartError("lora", f"{self.lora} is not a PEFT adapter: {error}") from error


AS_SAVED = QuantizationConfig()
