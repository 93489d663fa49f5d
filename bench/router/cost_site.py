"""`python -m bench.router.cost_site`: a router over mock workers, of the tree on PYTHONPATH.

Prints one line of JSON with the router's addresses and process id, and serves until its input ends.
"""

import asyncio
import json
import sys
import tempfile
from pathlib import Path

from bench.compare.routers import ENGINES
from bench.models import SIM_VOCAB, sim_model, word_tokenizer
from bench.router.site import first_line, process
from router.config import RouterConfig
from tandem.local.local_cluster import start_role, stop_process


async def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        model = sim_model(Path(folder) / "m", context=4096)
        word_tokenizer(model, SIM_VOCAB, "w1")
        config = RouterConfig.parse({"model": model, "port": 0, "http_port": 0})
        router = await start_role("router", "router", config)
        try:
            workers = [sys.executable, "-m", "bench.compare.mock_workers", str(model), router.address]
            async with process(*workers, str(ENGINES), "20") as started:
                await first_line(started)
                print(json.dumps({"grpc": router.address, "http": router.http_address, "pid": router.pid}), flush=True)
                await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
        finally:
            await stop_process(router.process)


if __name__ == "__main__":
    asyncio.run(main())
