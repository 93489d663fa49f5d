"""Stock vLLM engines with TandemConnector: every kind of model borrows, and answers as the lender from its cache."""

import json
import os
import random
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from support.adapters import LLAMA, adapter_weights, write_adapter
from support.draft_models import write_eagle
from support.long_runs import mostly_long
from support.vllm_engines import PYTHON, ROOT, V2, need_vllm
from support.vllm_models import VOCAB, write_model

pytestmark = need_vllm
LENGTHS = (33, 97, 300, 777, 1500)
SHORT = 3
"""Of these, on V2: Triton's interpreter takes minutes for the rest."""
KINDS: dict[str, tuple[str, Path, dict[str, Any]]] = {
    "llama, V1": ("llama", PYTHON, {}),
    "llama, V2": ("llama", V2, {}),
    "qwen3_moe, V1": ("qwen3_moe", PYTHON, {}),
    "mixtral, V2": ("mixtral", V2, {}),
    "gemma3, V1": ("gemma3", PYTHON, {}),
    "gemma3, V2": ("gemma3", V2, {}),
    "gpt_oss, V1": ("gpt_oss", PYTHON, {}),
    "gpt_oss, V2": ("gpt_oss", V2, {}),
    "qwen3_next, V1": ("qwen3_next", PYTHON, {"dtype": "bfloat16"}),
    "qwen3_next, V2": ("qwen3_next", V2, {"dtype": "bfloat16"}),
}


def prompts_of(lengths: Sequence[int], salt: str = "", adapter: str = "") -> list[Any]:
    rng = random.Random(7)
    return [[[rng.randrange(5, VOCAB) for _ in range(length)], "", [], salt, adapter] for length in lengths]


def run_pair(
    folder: Path, python: Path, prompts: list[Any], lender: dict[str, Any], borrower: dict[str, Any] | None = None
) -> list[tuple[list[int], list[int], dict[str, Any]]]:
    """Return, for each prompt, the borrower's answer, the lender's from its cache, and the receipt."""
    cases, found = folder / "cases.json", folder / "results.json"
    cases.write_text(json.dumps({"lender": lender, "borrower": borrower or lender, "prompts": prompts}))
    done = subprocess.run(
        [str(python), "-m", "support.connector_pair", str(cases), str(found)],
        env=os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    results: list[tuple[list[int], list[int], dict[str, Any]]] = json.loads(found.read_text())
    return results


def check_borrowed(results: list[tuple[list[int], list[int], dict[str, Any]]]) -> None:
    for borrowed, cached, receipt in results:
        assert borrowed == cached
        assert receipt["failure"] == ""
        assert receipt["mismatched"] == receipt["computed"] == 0
        assert receipt["borrowed"] == receipt["blocks"] > 0


@pytest.mark.parametrize("kind", mostly_long(KINDS, "llama, V1", "gpt_oss, V2", "qwen3_next, V1"))
def test_a_kind_of_model(kind: str, tmp_path: Path) -> None:
    name, python, options = KINDS[kind]
    lengths = LENGTHS[:SHORT] if python == V2 else LENGTHS
    if name == "qwen3_next":  # blocks of models with states have 160 tokens
        lengths = tuple(length for length in lengths if length > 160)
    model = str(write_model(name, tmp_path, max_position_embeddings=2048))
    check_borrowed(run_pair(tmp_path, python, prompts_of(lengths), {"model": model, **options}))


@pytest.mark.parametrize(("of_lender", "of_borrower"), mostly_long([(2, 1), (1, 2), (2, 2)], (2, 1)))
def test_ranks_of_unlike_numbers(of_lender: int, of_borrower: int, tmp_path: Path) -> None:
    model = str(write_model("llama", tmp_path, max_position_embeddings=2048))
    lender, borrower = ({"model": model, "tensor_parallel_size": number} for number in (of_lender, of_borrower))
    check_borrowed(run_pair(tmp_path, PYTHON, prompts_of((300, 777)), lender, borrower))


def test_adapters_and_salts(tmp_path: Path) -> None:
    """An adapter's blocks, and those of a salt, are borrowed under names of their own."""
    model = str(write_model("llama", tmp_path, max_position_embeddings=2048))
    adapter = str(write_adapter(tmp_path / "adapter", adapter_weights(LLAMA)))
    options = {"model": model, "enable_lora": True, "max_lora_rank": 8}
    check_borrowed(
        run_pair(tmp_path, PYTHON, prompts_of((300,), adapter=adapter) + prompts_of((300,), "salt"), options)
    )


@pytest.mark.long
def test_drafts(tmp_path: Path) -> None:
    """The KV of draft layers is lent with that of the model's; vLLM computes the last block of a hit again."""
    model = write_model("llama", tmp_path, max_position_embeddings=2048)
    eagle = write_eagle(model, tmp_path)
    drafting = {"method": "eagle", "model": str(eagle), "num_speculative_tokens": 2}
    options = {"model": str(model), "speculative_config": drafting}
    for borrowed, cached, receipt in run_pair(tmp_path, V2, prompts_of((300, 777)), options):
        assert borrowed == cached
        assert receipt["borrowed"] > 0
        assert receipt["failure"] == ""
