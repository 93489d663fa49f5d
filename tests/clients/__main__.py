"""Features of public clients, load tools of others, and a fuzzer over /openapi.json: `make test-clients`.

A cell that must work and does not, or that must be refused and is not, is short of its bar.
"""

import asyncio
import json
import re
import shutil
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from tokenizers import Tokenizer

from bench.router.site import free_port
from bench.support.report import Bar, conclude
from clients.browser import browser_cells
from clients.load_tools import load_cells
from preprocessor.config import PreprocessorConfig
from tandem.local.local_cluster import LocalCluster, RoleProcess, start_role, stop_process
from tandem.storyteller import STORYTELLER
from tandem.topology import ClusterModel, plan_models

HERE = Path(__file__).parent
BIN = HERE.parents[1] / ".venv-clients" / "bin"
PACKAGES = HERE.parents[1] / ".agents"
NUM_CASES = 2000
CASES_PER_OPERATION = 260


SIM = {"engine": "sim", "dtype": "auto"}


@asynccontextmanager
async def stopping(role: RoleProcess) -> AsyncIterator[None]:
    """Stop a process after a block."""
    try:
        yield
    finally:
        await stop_process(role.process)


async def features(*command: str) -> list[dict[str, Any]]:
    """Run a program of features; return its cells."""
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE, limit=1 << 20)
    assert process.stdout is not None
    cells = [json.loads(line) async for line in process.stdout if line.startswith(b"{")]  # libraries print, too
    await process.wait()
    return cells


async def fuzz(base: str) -> list[Bar]:
    """Run schemathesis; return its bars."""
    options = ["--phases", "fuzzing", "--workers", "4", "--max-examples", str(CASES_PER_OPERATION)]
    options += ["--checks", "not_a_server_error", "--request-timeout", "60"]
    process = await asyncio.create_subprocess_exec(
        str(BIN / "schemathesis"),
        *("run", f"{base}/openapi.json", *options),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    output = (await process.communicate())[0].decode()
    if process.returncode:
        print(output[-5000:], file=sys.stderr)
    found = re.search(r"(\d+) generated", output)
    return [
        Bar("schemathesis: cases", float(found[1]) if found else 0.0, NUM_CASES, at_least=True),
        Bar("schemathesis: answers of status 500, and hangs", float(bool(process.returncode)), 0),
    ]


def make_embedder(path: Path) -> Path:
    """Make an embedding model of the demo model: its files, and those that say how its hidden states are pooled."""
    shutil.copytree(STORYTELLER, path)
    (path / "1_Pooling").mkdir()
    (path / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode": "mean"}))
    kinds = {"Transformer": "", "Pooling": "1_Pooling", "Normalize": "2_Normalize"}
    modules = [{"path": folder, "type": f"sentence_transformers.models.{kind}"} for kind, folder in kinds.items()]
    (path / "modules.json").write_text(json.dumps(modules))
    return path


def make_seeing(path: Path) -> Path:
    """Make a model for the sim engine that reads pictures: the demo model's files, with a placeholder for them."""
    shutil.copytree(STORYTELLER, path, ignore=shutil.ignore_patterns("*.safetensors"))
    tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
    tokenizer.add_special_tokens(["<image>"])
    tokenizer.save(str(path / "tokenizer.json"))
    config = json.loads((path / "config.json").read_text())
    config["vocab_size"] = max(config["vocab_size"], max(tokenizer.get_vocab().values()) + 1)
    (path / "config.json").write_text(json.dumps(config))
    return path


def bar_of(cell: dict[str, Any]) -> Bar:
    """Return the bar of a cell: 0 where it is as it must be."""
    what = f"{cell['client']}: {cell['feature']}" + (" (refused)" if cell["expected"] else "")
    is_wrong = bool(cell["failure"]) != bool(cell["expected"])
    if is_wrong:
        print(f"{what}: {cell['failure'] or 'is not refused'}", file=sys.stderr)
    return Bar(what, float(is_wrong), 0)


async def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        page_port = free_port()
        router = {"port": 0, "http_port": 0, "batches_folder": Path(folder) / "batches", "default_model": "model"}
        router |= {"cors_origins": (f"http://127.0.0.1:{page_port}",)}
        settings = {"kv_memory_mib": 64, "dtype": "float32"}
        embedder = make_embedder(Path(folder) / "embedder")
        seeing = make_seeing(Path(folder) / "seeing")
        config = PreprocessorConfig.parse({"model": seeing, "engine": "sim", "port": 0, "processes": 1})
        preprocessor = await start_role("preprocessor", "preprocessor", config)
        models = [
            ClusterModel(path=STORYTELLER),
            ClusterModel(path=embedder, prefill=1, decode=0),
            ClusterModel(path=seeing, prefill=0, worker=SIM, preprocessor=preprocessor.address),
        ]
        topology = plan_models(models, router, settings, [0, 1])
        async with stopping(preprocessor), LocalCluster(topology) as cluster:
            base = f"http://{cluster.router.http_address}"
            cells = await features(str(BIN / "python"), str(HERE / "features.py"), base)
            if node := shutil.which("node"):
                origin = f"http://127.0.0.1:{page_port}"
                cells += await features(node, str(HERE / "features.mjs"), base, str(PACKAGES), origin)
            else:
                print("node is not installed: its clients are left out", file=sys.stderr)
            pages = await browser_cells(base, page_port, Path(folder))
            if not pages:
                print("Chromium is not installed: its pages are left out, and Node's fetch is not", file=sys.stderr)
            cells += pages + await load_cells(base, Path(folder))
            bars = [*map(bar_of, cells), *await fuzz(base)]
    conclude("clients", bars, {"cells": cells}, Console())


if __name__ == "__main__":
    asyncio.run(main())
