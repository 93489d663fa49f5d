"""`make gpu`: the first minutes on a GPU, one stage after the other, each with its own verdict.

A stage that fails does not stop the later ones. docs/first-gpu.md says what each failure means. `--device cpu` runs the
stages that need no GPU, to try the program itself.
"""

import argparse
import asyncio
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from bench.support.report import OUT
from bench.vllm.sides import Setting, plain
from bench.vllm.streams import StreamLoad
from engine.backends.vllm.arguments import vllm_python
from engine.config import WorkerConfig
from engine.errors import EngineStartError
from protos import inference_pb2 as pb
from tandem.client import Client
from tandem.local.local_cluster import LocalCluster
from tandem.storyteller import STORYTELLER
from tandem.topology import plan_topology

MODEL = STORYTELLER
PROMPT_TOKENS = 320
MAX_TOKENS = 32
PYTEST = (sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider")
STAGE_TIMEOUT_S = 1800.0
"""Longest duration of a stage: vLLM compiles for minutes at its first start."""
GPU_BYTES_MIB = 1024
"""KV pool of each worker, in MiB, since two share the GPU."""


class Skipped(Exception):
    """A stage that cannot run here, with the reason."""


@dataclass(frozen=True, slots=True)
class Verdict:
    stage: str
    verdict: str
    """ok, FAILED or skipped."""
    said: str
    seconds: float


def run(*command: str, **environment: str) -> str:
    """Run a program; return its last line. Raises RuntimeError with its last lines when it fails."""
    told = subprocess.run(
        command, capture_output=True, text=True, timeout=STAGE_TIMEOUT_S, env=os.environ | environment, check=False
    )
    lines = (told.stdout + told.stderr).strip().splitlines() or [""]
    if told.returncode:
        raise RuntimeError("\n".join(lines[-15:]))
    return lines[-1]


@dataclass(frozen=True, slots=True)
class TimedReply:
    token_ids: list[int]
    receipt: pb.Receipt


class Stages:
    """The stages, in order."""

    def __init__(self, device: str) -> None:
        self._device = device

    def all(self) -> list[tuple[str, Callable[[], str]]]:
        return [
            ("machine", self.machine),
            ("KV between GPU memories", self.transport),
            ("1 prefill + 1 decode", self.vllm),
            ("kinds of models", self.vllm_models),
            ("bench-gpu", self.bench),
        ]

    def machine(self) -> str:
        """Check that the doctor finds nothing broken."""
        command = [sys.executable, "-m", "tandem.cli", "doctor", "--json", "--set", "engine=vllm"]
        told = subprocess.run(command, capture_output=True, text=True, timeout=STAGE_TIMEOUT_S, check=False)
        findings = json.loads(told.stdout)["findings"]
        broken = [f"{each['check']}: {each['found']}" for each in findings if each["level"] == "broken"]
        if broken:
            raise RuntimeError("; ".join(broken))
        return "; ".join(each["found"] for each in findings if each["check"] in ("gpus", "vllm"))

    def transport(self) -> str:
        self._need_gpu()
        return run(*PYTEST, "tests/gpu/test_vram_transport.py")

    async def serve_vllm(self, python: Path) -> str:
        """Serve a prompt by vLLM engines, and check that its tokens are plain vLLM's when it has the prompt cached.

        In bfloat16 vLLM's own tokens of a cached and of an uncached prompt differ.
        """
        cores = sorted(os.sched_getaffinity(0)) if self._device == "cpu" else []
        vocabulary = json.loads((MODEL / "config.json").read_text())["vocab_size"]
        options = {"max_model_len": 1024, "enforce_eager": True}
        setting = Setting(MODEL, vocabulary, "bfloat16", GPU_BYTES_MIB, 2048, options, python, cores, other_cores=cores)
        load = StreamLoad(1, PROMPT_TOKENS, MAX_TOKENS, vocabulary)
        with tempfile.TemporaryDirectory() as scratch:
            async with plain(setting, Path(scratch)) as vllm:
                await vllm.offer(load)
                expected = await vllm.offer(replace(load, keeps_tokens=True))
        found = await answer(load.prompt(0), setting.worker())
        return self._checked(found, expected.token_ids[0])

    def _checked(self, found: TimedReply, expected: list[int]) -> str:
        """Return what is right about an answer. Raises RuntimeError for other tokens, and for KV that moved wrongly."""
        whose = "plain vLLM's with its prompt cached"
        if found.token_ids != expected:
            pairs = enumerate(zip(found.token_ids, expected, strict=True))
            equal = next(number for number, (one, other) in pairs if one != other)
            raise RuntimeError(f"the tokens differ from {whose} after {equal} of {MAX_TOKENS}")
        kv = found.receipt.kv
        if kv.mismatched_blocks or kv.loan_failure or not kv.verified_blocks:
            raise RuntimeError(
                f"{kv.verified_blocks} blocks were verified, {kv.mismatched_blocks} differed; {kv.loan_failure}"
            )
        lanes = ", ".join(kv.ucx_transports)
        if self._device != "cpu" and "cuda_ipc" not in lanes:
            raise RuntimeError(f"KV moved over {lanes}, not over CUDA IPC")
        return f"{MAX_TOKENS} tokens equal {whose}; {kv.verified_blocks} blocks verified, over {lanes}"

    def _vllm_python(self) -> Path:
        """Return vLLM's interpreter, whose torch sees the GPU. Raises Skipped."""
        try:
            python = vllm_python(WorkerConfig(model=MODEL, engine="vllm"))
        except EngineStartError as error:
            raise Skipped(str(error)) from None
        if self._device != "cpu":
            sees = "import torch; print(torch.cuda.is_available())"
            if run(str(python), "-c", sees) != "True":
                raise Skipped(f"the torch of {python} sees no GPU: install vLLM's CUDA build there")
        return python

    def vllm(self) -> str:
        return asyncio.run(self.serve_vllm(self._vllm_python()))

    def vllm_models(self) -> str:
        self._need_gpu()
        self._vllm_python()
        return run(*PYTEST, "-n", "4", "tests/gpu/test_vllm.py", TANDEM_VLLM_ON_GPU="1")

    def bench(self) -> str:
        self._need_gpu()
        return run(sys.executable, "-m", "bench.gpu_vllm")

    def _need_gpu(self) -> None:
        if self._device == "cpu":
            raise Skipped("this stage needs a GPU")


async def answer(prompt: list[int], settings: dict[str, Any]) -> TimedReply:
    """Serve a prompt greedily on a cluster of one prefill and one decode worker."""
    token_ids: list[int] = []
    router = {"model": MODEL, "port": 0}
    async with (
        LocalCluster(plan_topology(1, 1, router, settings, sorted(os.sched_getaffinity(0)))) as cluster,
        Client(cluster.address) as client,
    ):
        sampling = pb.Sampling(max_tokens=MAX_TOKENS, temperature=0, ignore_eos=True)
        async for message in client.generate(token_ids=prompt, sampling=sampling, timeout_s=120):
            token_ids += message.token_ids
    return TimedReply(token_ids, message.finish.receipt)


def judged(stage: str, check: Callable[[], str]) -> Verdict:
    """Run a stage, whatever comes of it."""
    began_at = time.monotonic()
    try:
        verdict, said = "ok", check()
    except Skipped as reason:
        verdict, said = "skipped", str(reason)
    except Exception as error:  # every failure is a verdict, and the next stage runs
        verdict, said = "FAILED", f"{type(error).__name__}: {error}"
    return Verdict(stage, verdict, said, time.monotonic() - began_at)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.first_gpu", description=__doc__)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    device = parser.parse_args().device
    console = Console()
    if importlib.util.find_spec("torch") is None:
        sys.exit("error: torch is not installed: pip install -e '.[worker,dev]'")
    verdicts: list[Verdict] = []
    for stage, check in Stages(device).all():
        console.print(f"[bold]{stage}[/] ...")
        verdicts.append(judged(stage, check))
        console.print(f"  {verdicts[-1].verdict} after {verdicts[-1].seconds:.0f} s: {verdicts[-1].said}", markup=False)
    table = Table(title="first minutes on a GPU; docs/first-gpu.md says what a failure means", title_justify="left")
    for heading in ("stage", "verdict", "seconds"):
        table.add_column(heading)
    for each in verdicts:
        table.add_row(each.stage, each.verdict, f"{each.seconds:.0f}")
    console.print(table)
    OUT.mkdir(exist_ok=True)
    (OUT / "first_gpu.json").write_text(json.dumps([asdict(each) for each in verdicts], indent=1))
    ran, failed = [v for v in verdicts if v.verdict != "skipped"], [v for v in verdicts if v.verdict == "FAILED"]
    console.print(f"bars: {len(ran) - len(failed)} of {len(ran)} met")
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
