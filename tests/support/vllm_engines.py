"""vLLM engines for tests, where `make vllm` has set up an environment for them."""

import contextlib
import mmap
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from cluster.roles import Role
from engine.messages.from_engine import Token
from kvtransfer.ranks import without_planes, without_stages
from support.processes import until
from support.real_engines import RealEngine
from support.torchvision_shim import ON_GPU
from tandem.storyteller import STORYTELLER

ROOT = Path(__file__).parent.parent.parent
PYTHON = ROOT / os.environ.get("TANDEM_VLLM_VENV", ".venv-vllm") / "bin" / "python"
# On a GPU Model Runner V2 needs no shim, and engines share the cores.
_SHIMS = ROOT / "tests" / "support" / "vllm_v2"
V2 = PYTHON if ON_GPU else _SHIMS / "python"
"""Interpreter with Model Runner V2 and asynchronous scheduling on the CPU, whose batches are launched as on a GPU."""
V1 = PYTHON if ON_GPU else _SHIMS / "python_v1"
"""Interpreter with Model Runner V1, in which the CPU has what data-parallel ranks need."""
BLOCK = 32
need_vllm = pytest.mark.skipif(not PYTHON.exists(), reason="no .venv-vllm: `make vllm` sets it up")
OPTIONS = {"enforce_eager": True, "max_model_len": 1024, "max_num_seqs": 16}


def vllm_engine(name: str, role: Role = "decode", model: Path = STORYTELLER, **settings: Any) -> RealEngine:
    """An engine that is not started yet; float32, so that tokens can be compared.

    With `vllm_python` V2 it runs Model Runner V2, asynchronously unless vllm_options say otherwise.
    """
    options = OPTIONS | settings.pop("vllm_options", {})
    if ON_GPU:
        settings["cores"] = ()
    common = {
        "engine": "vllm",
        "vllm_python": PYTHON,
        "block_tokens": BLOCK,
        "kv_memory_mib": 64,
        "dtype": "float32",
        "max_prefill_tokens": 64,
        "vllm_options": options,
    }
    return RealEngine(name, model, role, **(common | settings))


def ids(tokens: Sequence[Token]) -> list[int]:
    return [token.token_id for token in tokens]


def flip_a_byte(engine: RealEngine, block: int, rank: int | None = None) -> None:
    """Change one byte of a block of an engine whose KV memory is a file; of the second plane, if there is one.

    `rank` has the part to be changed, of an engine whose ranks are processes of their own.
    """
    ranks = engine.rank_pids() if rank is not None else [engine.pid]
    pid = ranks[rank or 0]
    found: list[Path] = []
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # a connection that was closed meanwhile
            if "memfd:tandem-kv" in os.readlink(entry):
                found.append(entry)
    assert len({entry.stat().st_ino for entry in found}) == 1
    descriptor = found[0]
    ready = engine.ready
    shares, of_stages = without_stages(ready.endpoint)
    planes, num_blocks, _ = without_planes(of_stages)
    span = ready.block_bytes // planes // (len(ranks) // len(shares))
    offset = (num_blocks if planes > len(shares) else 0) * span + block * span + 77
    with descriptor.open("r+b") as file, mmap.mmap(file.fileno(), 0) as memory:
        memory[offset] ^= 0x40


async def stored(folder: Path, num_blocks: int) -> None:
    """Wait until the store has so many whole blocks."""

    def num_stored() -> int:
        return len(list(folder.glob("*/*/[0-9a-f]*")))

    await until(lambda: num_stored() >= num_blocks, "its blocks are in the store")
