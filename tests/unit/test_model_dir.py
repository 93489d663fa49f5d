"""What is read of a model directory without loading the model."""

import json
from pathlib import Path
from typing import Any

import pytest

from engine.model.model_dir import ModelDir

CONFIG = {"vocab_size": 100, "max_position_embeddings": 32}


def written(path: Path, **files: Any) -> ModelDir:
    """Of JSON files by their names without the ending."""
    for name, values in ({"config": CONFIG} | files).items():
        (path / f"{name}.json").write_text(json.dumps(values))
    return ModelDir.open(path)


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, set()),
        ({"config": CONFIG | {"eos_token_id": 3}}, {3}),
        ({"config": CONFIG | {"eos_token_id": 3}, "generation_config": {"eos_token_id": [4, 5]}}, {4, 5}),
        ({"config": CONFIG | {"text_config": CONFIG | {"eos_token_id": 6}}}, {6}),
        ({"generation_config": {"eos_token_id": [4, 100, -1]}}, {4}),
        ({"config": CONFIG | {"eos_token_id": -1}}, set()),
    ],
)
def test_what_ends_a_text(tmp_path: Path, files: dict[str, Any], expected: set[int]) -> None:
    assert written(tmp_path, **files).eos_token_ids == expected


@pytest.mark.parametrize("eos", ["<|im_end|>", {"content": "<|im_end|>"}])
@pytest.mark.parametrize("place", ["tokenizer", "tokenizer_config"])
def test_the_tokenizers_end_is_one_too(tmp_path: Path, eos: Any, place: str) -> None:
    """Of a fine-tune that left generation_config.json as it was."""
    tokens = [{"id": 7, "content": "<|im_end|>"}, {"id": 8, "content": "<|im_start|>"}]
    decoder = {str(token["id"]): token for token in tokens}
    files: dict[str, Any] = {"tokenizer_config": {"eos_token": eos}}
    if place == "tokenizer":
        files["tokenizer"] = {"added_tokens": tokens}
    else:
        files["tokenizer_config"]["added_tokens_decoder"] = decoder
    assert written(tmp_path, generation_config={"eos_token_id": 2}, **files).eos_token_ids == {2, 7}


@pytest.mark.parametrize("kind", ["rope_type", "type"])
def test_the_context_is_what_yarn_stretches_it_to(tmp_path: Path, kind: str) -> None:
    rope = {kind: "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
    assert written(tmp_path, config=CONFIG | {"rope_scaling": rope}).max_context_tokens == 128
    already = CONFIG | {"rope_scaling": rope, "max_position_embeddings": 200}
    assert written(tmp_path, config=already).max_context_tokens == 200
    other = CONFIG | {"rope_scaling": rope | {kind: "llama3"}}
    assert written(tmp_path, config=other).max_context_tokens == 32
