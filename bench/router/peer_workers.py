"""Simulated OpenAI-compatible workers, for routers that speak HTTP.

`python -m bench.router.peer_workers COUNT` prints their ports. Each has one FIFO prefill server and an LRU prefix cache
of blocks, as Tandem's sim workers have.
"""

import asyncio
import json
import sys
from collections import OrderedDict

from aiohttp import web

from bench.router.trace import CHARS_PER_TOKEN

BLOCK_TOKENS = 64
NUM_BLOCKS = 9984
PREFILL_TOKENS_PER_S = 32000.0
MODEL = "sim"


class PrefixCache:
    """Prefix cache of texts, in blocks; a block's key is the hash of all text up to its end."""

    def __init__(self) -> None:
        self._blocks: OrderedDict[int, None] = OrderedDict()

    def match(self, keys: list[int]) -> int:
        """Return the number of leading blocks in the cache and mark them as used."""
        held = 0
        for key in keys:
            if key not in self._blocks:
                break
            self._blocks.move_to_end(key)
            held += 1
        return held

    def add(self, keys: list[int]) -> None:
        for key in keys:
            self._blocks[key] = None
            self._blocks.move_to_end(key)
        while len(self._blocks) > NUM_BLOCKS:
            self._blocks.popitem(last=False)


class PeerWorker:
    def __init__(self) -> None:
        self._cache = PrefixCache()
        self._lock = asyncio.Lock()  # FIFO

    def application(self) -> web.Application:
        application = web.Application(client_max_size=64 << 20)
        application.router.add_post("/v1/completions", self.complete)
        for path in (
            "/health",
            "/health_generate",
            "/v1/models",
            "/get_server_info",
            "/server_info",
            "/get_model_info",
        ):
            application.router.add_get(path, self.info)
        return application

    async def info(self, request: web.Request) -> web.Response:
        data = [{"id": MODEL, "object": "model", "owned_by": "bench"}]
        return web.json_response({"object": "list", "data": data, "model_path": MODEL, "served_model_name": MODEL})

    async def complete(self, request: web.Request) -> web.StreamResponse:
        prompt = (await request.json())["prompt"]
        num_tokens, width = len(prompt) // CHARS_PER_TOKEN, BLOCK_TOKENS * CHARS_PER_TOKEN
        keys, so_far = [], 0
        for start in range(0, len(prompt) - width + 1, width):
            so_far = hash((so_far, prompt[start : start + width]))
            keys.append(so_far)
        usable = keys[: (num_tokens - 1) // BLOCK_TOKENS]  # at least the last token is computed
        async with self._lock:
            held = self._cache.match(usable)
            await asyncio.sleep((num_tokens - held * BLOCK_TOKENS) / PREFILL_TOKENS_PER_S)
            self._cache.add(keys)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        usage = {"prompt_tokens": num_tokens, "cached_tokens": held * BLOCK_TOKENS, "completion_tokens": 1}
        chunk = {"id": "c", "object": "text_completion", "model": MODEL, "usage": usage}
        chunk["choices"] = [{"index": 0, "text": "t", "finish_reason": "length"}]
        await response.write(f"data: {json.dumps(chunk)}\n\ndata: [DONE]\n\n".encode())
        return response


async def main(count: int) -> None:
    ports = []
    for _ in range(count):
        runner = web.AppRunner(PeerWorker().application())
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        ports.append(runner.addresses[0][1])
    print(*ports, flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)  # until the benchmark closes it


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1])))
