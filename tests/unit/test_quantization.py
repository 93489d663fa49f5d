"""Quantised weights have fingerprints of their own."""

from pathlib import Path
from typing import Any, get_args

import pytest

from engine.config import WorkerConfig
from engine.errors import EngineStartError
from engine.model.quantization import AS_SAVED, QuantizationConfig, Weights

SAVED, OTHER = bytes(32), bytes([1]) * 32


def test_weights_as_saved_keep_their_fingerprint() -> None:
    assert AS_SAVED.fingerprint(SAVED) == SAVED


def test_other_numbers_have_another() -> None:
    kinds: tuple[Weights, ...] = get_args(Weights)
    made = [QuantizationConfig(weights=kind).fingerprint(saved) for kind in kinds for saved in (SAVED, OTHER)]
    assert len(set(made)) == 2 * len(kinds)
    assert {len(each) for each in made} == {32}
    assert QuantizationConfig(weights="int8").fingerprint(SAVED) == QuantizationConfig(weights="int8").fingerprint(
        SAVED
    )


SETTINGS: list[dict[str, Any]] = [
    {"weights": "int8"},
    {"weights": "int4"},
    {"kv_dtype": "int8"},
    {"lora": Path("/adapter")},
]


@pytest.mark.parametrize("setting", SETTINGS)
def test_settings_say_it_and_the_sim_engine_has_none(setting: dict[str, Any]) -> None:
    assert WorkerConfig(model=Path("/model"), **setting).quantization() == QuantizationConfig(**setting)
    assert WorkerConfig(model=Path("/model")).quantization() == AS_SAVED
    sim = WorkerConfig(model=Path("/model"), engine="sim", **setting)
    with pytest.raises(EngineStartError, match=f"{next(iter(setting))}: "):
        sim.kind.check(sim, "decode")
