"""LoRA adapters that an engine serves unmerged, each as a model of its own."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

from engine.errors import EngineStartError
from engine.model.hub import ADAPTER_FILES
from kvcache.block_keys import ADAPTER_BYTES

FIELD = "adapters"


@dataclass(frozen=True, slots=True)
class Adapter:
    """One adapter as PEFT saves it."""

    name: str
    """Name of the model that clients ask for."""
    path: Path
    fingerprint: bytes
    """Digest of its files, ADAPTER_BYTES long; part of its block keys."""
    rank: int
    """Largest rank of its matrices."""


def read_adapters(paths: Mapping[str, Path]) -> list[Adapter]:
    """Read the adapters' configurations and fingerprints, in order of their names.

    Raises EngineStartError.
    """
    return [_read(name, paths[name]) for name in sorted(paths)]


def _read(name: str, path: Path) -> Adapter:
    if not name.strip():
        raise EngineStartError(FIELD, f"{path} has no name")
    digest = blake2b(digest_size=ADAPTER_BYTES)
    config, _ = ADAPTER_FILES
    try:
        settings = json.loads((path / config).read_bytes())
        for file in ADAPTER_FILES:
            content = (path / file).read_bytes()
            digest.update(len(content).to_bytes(8, "little") + content)
    except (OSError, ValueError) as error:
        raise EngineStartError(FIELD, f"{name}: {path} is not a PEFT adapter: {error}") from error
    ranks = settings.get("r"), *(settings.get("rank_pattern") or {}).values()
    if settings.get("peft_type") != "LORA" or not all(isinstance(rank, int) and rank > 0 for rank in ranks):
        raise EngineStartError(FIELD, f"{name}: {path / config} describes no LoRA adapter")
    return Adapter(name, path, digest.digest(), max(ranks))
