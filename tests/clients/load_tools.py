"""Load tools of others against a cluster: each API that a tool speaks is a cell, as those of `features.py`.

A cell works where the tool ends well and counts every request as answered.
"""

import asyncio
import json
import os
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tandem.storyteller import STORYTELLER

ROOT = Path(__file__).parents[2]
LOAD_BIN, VLLM = ROOT / ".venv-load" / "bin", ROOT / ".venv-vllm" / "bin" / "vllm"
NUM_REQUESTS, NUM_STREAMS, INPUT, OUTPUT = 20, 4, 64, 16
TIMEOUT_S = 300.0
MODEL, EMBEDDER = "model", "embedder"
AIPERF = {"chat": MODEL, "completions": MODEL, "responses": MODEL, "messages": MODEL, "embeddings": EMBEDDER}
GUIDELLM = {"chat/completions": MODEL, "completions": MODEL, "responses": MODEL, "embeddings": EMBEDDER}
VLLM_BENCH = {"openai-chat": "chat/completions", "openai": "completions", "openai-embeddings": "embeddings"}


@dataclass(frozen=True, slots=True)
class Run:
    """One run of a tool: its cell, its command, and its count of answered requests in the file it wrote."""

    tool: str
    api: str
    command: Sequence[str]
    results: Path
    answered: Callable[[Any], int]


def runs(base: str, folder: Path) -> list[Run]:
    """Return the runs of all tools; vLLM's where it is installed."""
    tokenizer = str(STORYTELLER)
    found: list[Run] = []
    for api, model in AIPERF.items():
        out = folder / f"aiperf-{api}"
        command = [str(LOAD_BIN / "aiperf"), "profile", "-m", model, "--url", base, "--endpoint-type", api]
        command += ["--streaming", "--tokenizer", tokenizer, "--request-count", str(NUM_REQUESTS)]
        command += ["--concurrency", str(NUM_STREAMS)]
        command += ["--isl", str(INPUT), "--osl", str(OUTPUT), "--ui", "none", "--output-artifact-dir", str(out)]
        found.append(Run("aiperf", api, command, out / "profile_export_aiperf.json", _answered_aiperf))
    for api, model in GUIDELLM.items():
        results = folder / f"guidellm-{api.replace('/', '-')}.json"
        command = [str(LOAD_BIN / "guidellm"), "run", "--disable-console"]
        command += ["--backend", f"kind=openai_http,target={base},model={model},request_format=/v1/{api}"]
        command += ["--profile", f"kind=concurrent,streams={NUM_STREAMS}"]
        command += ["--constraint", f"kind=max_requests,count={NUM_REQUESTS}"]
        command += ["--data", f"kind=synthetic_text,prompt_tokens={INPUT},output_tokens={OUTPUT}"]
        command += ["--tokenizer", f"kind=huggingface_auto,model={tokenizer}"]
        command += ["--output", f"kind=json,path={results}"]
        found.append(Run("guidellm", api, command, results, _answered_guidellm))
    for backend, api in VLLM_BENCH.items() if VLLM.exists() else ():
        results = folder / f"vllm-{backend}.json"
        model = EMBEDDER if backend == "openai-embeddings" else MODEL
        command = [str(VLLM), "bench", "serve", "--backend", backend, "--endpoint", f"/v1/{api}", "--base-url", base]
        command += ["--model", model, "--tokenizer", tokenizer, "--dataset-name", "random"]
        command += ["--random-input-len", str(INPUT), "--random-output-len", str(OUTPUT)]
        command += ["--num-prompts", str(NUM_REQUESTS), "--save-result", "--result-filename", str(results)]
        found.append(Run("vllm bench serve", api, command, results, lambda said: int(said["completed"])))
    return found


async def load_cells(base: str, folder: Path) -> list[dict[str, Any]]:
    """Run the tools one after the other; return their cells."""
    return [await _cell(run, folder) for run in runs(base, folder)]


async def run_tool(command: Sequence[str], folder: Path) -> tuple[int, str]:
    """Run a tool in a folder, which is its home too; return its exit code and what it printed."""
    process = await asyncio.create_subprocess_exec(
        *command,
        cwd=folder,
        env=os.environ | {"HOME": str(folder)},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        async with asyncio.timeout(TIMEOUT_S):
            output = (await process.communicate())[0].decode(errors="replace")
    except TimeoutError:
        os.killpg(process.pid, signal.SIGKILL)  # tools start processes of their own
        output = f"took longer than {TIMEOUT_S:g} s"
    return await process.wait(), output


async def _cell(run: Run, folder: Path) -> dict[str, Any]:
    code, output = await run_tool(run.command, folder)
    failure = output[-500:]
    if code == 0 and run.results.exists():
        answered = run.answered(json.loads(run.results.read_text()))
        failure = "" if answered == NUM_REQUESTS else f"{answered} of {NUM_REQUESTS} requests answered"
    return {"client": run.tool, "feature": run.api, "expected": "", "failure": failure}


def _answered_aiperf(said: Any) -> int:
    return int(said["request_count"]["avg"]) - sum(each["count"] for each in said["error_summary"])


def _answered_guidellm(said: Any) -> int:
    return int(said["benchmarks"][0]["metrics"]["request_totals"]["successful"])
