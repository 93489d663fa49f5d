"""What is made of a saved model when it is loaded, and in what its KV is kept. Needs no torch."""

from dataclasses import dataclass
from hashlib import blake2b
from typing import Literal

Weights = Literal["auto", "int8"]
KvDtype = Literal["auto", "int8"]

SCHEME = 1
"""Changes when the same saved weights would become other numbers."""


@dataclass(frozen=True, slots=True)
class Variant:
    """The default is the model as it was saved."""

    weights: Weights = "auto"
    """Of linear layers; auto: as saved."""
    kv_dtype: KvDtype = "auto"
    """What keys and values are kept in; auto: what they are computed in. A matter of the KV layout, not of weights."""

    def fingerprint(self, saved: bytes) -> bytes:
        """Of the weights that are computed with; `saved` is that of the files. 32 bytes, `saved` itself where nothing
        is made of them."""
        if self.weights == "auto":
            return saved
        return blake2b(f"{SCHEME},{self.weights}".encode() + saved, digest_size=32).digest()


AS_SAVED = Variant()
