"""Models of a router in one process, with tokenizers of a byte and of a word a token, and workers that have joined."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit

from protos import membership_pb2
from router.admission.arrivals import Arrival, Arrivals
from router.admission.limits.tenant_limits import TenantLimits
from router.config import RouterConfig
from router.models.model_files import read_models
from router.models.model_runtime import ModelRuntime
from router.models.model_runtimes import ModelRuntimes
from router.runtime import serve_models

WORDS = [f"word{number}" for number in range(300)]
TEXT = " ".join(WORDS[:40])


def write_word_tokenizer(path: Path) -> None:
    """A token a word, where that of the support package has one a byte."""
    tokenizer = Tokenizer(WordLevel({word: number for number, word in enumerate([*WORDS, "?"])}, unk_token="?"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    tokenizer.save(str(path / "tokenizer.json"))


def served(entries: Sequence[dict[str, Any]], **config: Any) -> tuple[RouterConfig, ModelRuntimes]:
    parsed = RouterConfig.parse({"models": entries, **config})
    return parsed, serve_models(parsed, read_models(parsed), TenantLimits(parsed), b"incarnation")


def hello_of(served_model: ModelRuntime, worker_id: str = "d0", **fields: Any) -> membership_pb2.Hello:
    values: dict[str, Any] = {
        "worker_id": worker_id,
        "role": membership_pb2.ROLE_DECODE,
        "model": served_model.model_dir.name,
        "model_fingerprint": b"weights",
        "config_fingerprint": served_model.config_fingerprint,
        "block_tokens": 16,
        "block_bytes": 1000,
        "num_blocks": 100,
    }
    return membership_pb2.Hello(**(values | fields))


def join(model: ModelRuntime, num_blocks: int = 100, queued_tokens: int = 0) -> None:
    worker = model.fleet.joined(hello_of(model, f"{model.name}-d", num_blocks=num_blocks))
    load = membership_pb2.LoadReport(
        available_blocks=num_blocks, num_blocks=num_blocks, queued_prefill_tokens=queued_tokens
    )
    model.fleet.reported(worker, load)


def staffed(
    entries: Sequence[dict[str, Any]], num_blocks: int = 100, **config: Any
) -> tuple[RouterConfig, ModelRuntimes]:
    """As `served`; a decode worker of so many blocks has joined each model."""
    parsed, models = served(entries, **config)
    for model in models:
        join(model, num_blocks)
    return parsed, models


def arrival_of(config: RouterConfig, tenant: str = "") -> Arrival:
    """Return a request that is being read, of a router of its own."""
    return Arrivals(config, TenantLimits(config)).arriving(tenant).__enter__()
