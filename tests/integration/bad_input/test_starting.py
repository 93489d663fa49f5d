"""A process that cannot start says which setting is at fault."""

import asyncio
import sys
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from support.observed_cluster import CONTEXT, VOCAB, Site
from support.sim_directories import write_sim_model
from tandem.local.local_cluster import stop_process

pytestmark = pytest.mark.asyncio(loop_scope="module")


async def last_words(module: str, *settings: str) -> tuple[int | None, str]:
    """Exit code and last line on standard error of a process that must end by itself."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        module,
        *(argument for setting in settings for argument in ("--set", setting)),
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        _, stderr = await process.communicate()
    finally:
        await stop_process(process)
    return process.returncode, (stderr.decode().strip().splitlines() or [""])[-1]


async def test_a_process_that_cannot_start_says_which_setting_is_at_fault(site: Site, tmp_path: Path) -> None:
    model, taken = f"model={site.model}", site.router.address.rpartition(":")[2]
    other = write_sim_model(tmp_path / "other", VOCAB + 1, CONTEXT)
    (tmp_path / "no-json").mkdir()
    (tmp_path / "no-json" / "config.json").write_text("{")
    write_sim_model(tmp_path / "no-vocabulary", None, CONTEXT)
    cases: dict[tuple[str, ...], str] = {
        ("router", model, "nonsense=1"): "nonsense",
        ("router",): "model",
        ("router", model, f"port={taken}"): "port",
        ("router", model, "port=70000"): "port",
        ("router", f"model={tmp_path}/absent"): "model",
        ("router", f"model={tmp_path}/no-json"): "model",
        ("router", f"model={tmp_path}/no-vocabulary", "port=0"): "model",
        ("prefill_worker", model, "engine=sim", "nonsense=1"): "nonsense",
        ("prefill_worker", model, "engine=sim", f"port={taken}"): "port",
        ("prefill_worker", model, "engine=simm"): "engine",
        ("prefill_worker", model, "engine=sim", "kv_memory_mib=0"): "kv_memory_mib",
        ("prefill_worker", model, "engine=sim", "kv_memory_mib=1000000000"): "kv_memory_mib",
        ("decode_worker", model, "engine=sim", "kv_memory_mib=1000000000000000"): "kv_memory_mib",
        ("decode_worker", "engine=sim", f"model={tmp_path}/absent"): "model",
        ("decode_worker", "engine=sim", f"model={tmp_path}"): "model",
        ("decode_worker", "engine=sim", f"model={tmp_path}/no-vocabulary"): "model",
        ("decode_worker", model, "engine=sim", "cores=[4096]"): "cores",
        ("decode_worker", f"model={other}", "engine=sim", f"routers=[{site.router.address}]"): "model",
    }
    endings = await gather_few([lambda case=case: last_words(*case) for case in cases])
    for (case, name), (code, line) in zip(cases.items(), endings, strict=True):
        assert code == 2, (case, code, line)
        assert line.startswith(f"error: {name}: "), (case, line)


async def gather_few(calls: Sequence[Callable[[], Awaitable[Any]]], at_once: int = 3) -> list[Any]:
    """All of them, few at a time: each is a process with imports of its own."""
    room = asyncio.Semaphore(at_once)

    async def run(call: Callable[[], Awaitable[Any]]) -> Any:
        async with room:
            return await call()

    return await asyncio.gather(*(run(call) for call in calls))
