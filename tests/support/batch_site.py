"""A cluster with files and batches, its router's deaths, and what comes out of its batches."""

import asyncio
import json
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import openai
from openai.types import Batch

from cluster.process.tree import children
from support.openai_http import http_cluster
from tandem.local.local_cluster import LocalCluster, RoleProcess, start_role

ENDED = ("failed", "completed", "expired", "cancelled")
COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"
TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"


def with_chats(model: Path) -> Path:
    """Give a sim model's tokenizer a chat template."""
    file = model / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"chat_template": TEMPLATE}))
    return model


def batch_cluster(model: Path, folder: Path, router: dict[str, Any] | None = None, **worker: Any) -> LocalCluster:
    settings = {"batches_folder": folder} | (router or {})
    return http_cluster(model, 1, settings, **({"engine": "sim"} | worker))


def completion(custom_id: str, **body: Any) -> dict[str, Any]:
    asked = {"model": "simulated", "prompt": f"word{len(custom_id)} of {custom_id}", "max_tokens": 4, "temperature": 0}
    return {"custom_id": custom_id, "method": "POST", "url": COMPLETIONS, "body": asked | body}


def chat(custom_id: str, **body: Any) -> dict[str, Any]:
    asked = {"model": "simulated", "messages": [{"role": "user", "content": f"say {custom_id}"}], "max_tokens": 4}
    return {"custom_id": custom_id, "method": "POST", "url": CHATS, "body": asked | {"temperature": 0} | body}


def jsonl(lines: Sequence[Any]) -> bytes:
    return "".join(f"{json.dumps(line)}\n" for line in lines).encode()


def client_of(address: str, key: str = "none", **options: Any) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"http://{address}/v1", api_key=key, **({"max_retries": 0} | options))


async def begin(
    client: openai.AsyncOpenAI, lines: Sequence[Any] | bytes, endpoint: str = COMPLETIONS, **options: Any
) -> Batch:
    content = lines if isinstance(lines, bytes) else jsonl(lines)
    file = await client.files.create(file=("input.jsonl", content), purpose="batch")
    given: Any = {"completion_window": "24h"} | options
    return await client.batches.create(input_file_id=file.id, endpoint=endpoint, **given)  # type: ignore[arg-type]


async def ended(client: openai.AsyncOpenAI, batch_id: str, within_s: float = 60.0) -> Batch:
    """The batch at its end, polled."""
    async with asyncio.timeout(within_s):
        while True:
            batch = await client.batches.retrieve(batch_id)
            if batch.status in ENDED:
                return batch
            await asyncio.sleep(0.05)


async def content_of(client: openai.AsyncOpenAI, file_id: str | None) -> list[dict[str, Any]]:
    """The lines of an output file; of none, none."""
    if file_id is None:
        return []
    text = (await client.files.content(file_id)).text
    return [json.loads(line) for line in text.splitlines()]


async def kill_router(cluster: LocalCluster) -> None:
    process = cluster.router.process
    process.send_signal(signal.SIGKILL)
    await process.wait()


async def start_router_again(cluster: LocalCluster) -> RoleProcess:
    """Start the router on the ports that it had."""
    before = cluster.router
    ports = {"port": int(before.address.rsplit(":", 1)[1]), "http_port": int(before.http_address.rsplit(":", 1)[1])}
    if before.joined_at != before.address:
        ports["internal_port"] = int(before.joined_at.rsplit(":", 1)[1])
    config = cluster.topology.router.model_copy(update=ports | {"drain_s": 0.0})
    cluster.router = await start_role("router", "router", config)
    return cluster.router


def batches_pid(router: RoleProcess) -> int:
    """The router's process of files and batches."""
    (pid,) = [pid for pid in children(router.pid) if b"\0batches\0" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    return pid
