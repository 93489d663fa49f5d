"""`python -m bench.router.cost_site [WORKERS [SERVERS]]`: a router of the tree on PYTHONPATH, over mocks.

Prints one line of JSON with the router's addresses and process id, and serves until its input ends.
"""

import asyncio
import json
import sys
import tempfile
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

from bench.compare.http_wire import MODEL_NAME
from bench.compare.routers import ENGINES
from bench.models import SIM_VOCAB, sim_model, word_tokenizer
from bench.router.site import first_line, process
from router.config import RouterConfig
from tandem.local.local_cluster import start_role, stop_process

STEP_MS = "20"


async def main(num_workers: int, num_servers: int = 0) -> None:
    with tempfile.TemporaryDirectory() as folder:
        model = sim_model(Path(folder) / "m", context=4096)
        word_tokenizer(model, SIM_VOCAB, "w1")
        async with AsyncExitStack() as stack:
            config: dict[str, Any] = {"model": model}
            if num_servers:
                servers = [sys.executable, "-m", "bench.compare.http_wire", str(num_servers), STEP_MS]
                ports = (await first_line(await stack.enter_async_context(process(*servers)))).split()
                urls = [{"url": f"http://127.0.0.1:{port}", "kv_events_port": None} for port in ports]
                config = {"fleet": {"servers": urls, "model": model, "name": MODEL_NAME}}
            router = await start_role("router", "router", RouterConfig.parse({"port": 0, "http_port": 0} | config))
            stack.push_async_callback(stop_process, router.process)
            if not num_servers:
                workers = [sys.executable, "-m", "bench.compare.mock_workers", str(model), router.address]
                await first_line(await stack.enter_async_context(process(*workers, str(num_workers), STEP_MS)))
            print(json.dumps({"grpc": router.address, "http": router.http_address, "pid": router.pid}), flush=True)
            await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)


if __name__ == "__main__":
    asyncio.run(main(*map(int, sys.argv[1:])) if sys.argv[1:] else main(ENGINES))
