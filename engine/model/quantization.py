"""What is made of a saved model when it is loaded, and in what its KV is kept. Needs no torch."""

from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Literal

from engine.errors import EngineStartError
from engine.kv.layout import KvDtype

Weights = Literal["auto", "int8", "int4", "fp8"]

ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors")
"""Of a LoRA adapter, as PEFT saves it."""
SCHEME = 1
"""Changes when the same saved weights would become other numbers."""


@dataclass(frozen=True, slots=True)
class QuantizationConfig:
    """The default is the model as it was saved."""

    weights: Weights = "auto"
    """Of linear layers; auto: as saved."""
    kv_dtype: KvDtype = "auto"
    """A matter of the KV layout, not of weights."""
    lora: Path | None = None
    """Directory of an adapter that is merged into the weights first."""

    def fingerprint(self, saved: bytes) -> bytes:
        """Of the weights that are computed with; `saved` is that of the files. 32 bytes, `saved` itself where nothing
        is made of them. Raises EngineStartError where the adapter cannot be read."""
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
            raise EngineStartError("lora", f"{self.lora} is no adapter of PEFT: {error}") from error


AS_SAVED = QuantizationConfig()
