"""An endpoint picker behind its gRPC port, over stock servers that have joined and are never called.

`python -m bench.router.picker_site WORDS` serves one with 64 servers and prints its address. It reads how many requests
were to warm it up, and prints how long the others waited from the end of their bodies to the answer.
"""

import asyncio
import contextlib
import json
import random
import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

import uvloop

from bench.router.decisions import quantiles_ms
from bench.router.picker_load import NUM_FAMILIES, body_of
from cluster.metrics import new_registry
from cluster.process.life import Drain
from cluster.process.memory import spare_the_started
from kvcache.block_keys import BlockKey
from protos import inference_pb2
from protos import membership_pb2 as pb
from router.admission.arrivals import Arrivals
from router.admission.dispatcher import Dispatcher
from router.admission.limits.tenant_limits import TenantLimits
from router.config import RouterConfig
from router.frontend.envoy.service import EndpointPickerService, open_picker
from router.models.config import Role, ServerEntry
from router.models.model_files import read_models
from router.models.model_runtime import ModelRuntime
from router.observability.metrics import RouterMetrics
from router.observability.record_file import RecordFile
from router.observability.tracing import Tracing
from router.placement.fleet.worker_records import WorkerRecord
from router.request_path.observation import Accounting, Observer
from router.runtime import SWITCH_S, serve_models
from router.security.api_keys import ApiKeys
from router.stock.facts import ServerAccess, ServerApi, ServerFacts
from router.stock.link import StockLink
from router.stock.member import hello_of
from router.stock.sources.servers import Server
from router.usage import USAGE_DAYS, MemoryLedger
from tandem.storyteller import STORYTELLER

NUM_SERVERS, NUM_BLOCKS, BLOCK_TOKENS = 64, 8192, 16
HOLDERS = 4
"""Servers that hold the prompts of a family."""
EMPTY = pb.CacheEvents(snapshot=True)


def facts_of(model: str, num_blocks: int = NUM_BLOCKS) -> ServerFacts:
    """Return what a vLLM server with TandemConnector tells of itself."""
    able = {"takes_token_ids": True, "returns_token_ids": True, "lends": True, "generates_tokens": False}
    return ServerFacts(model, model, (), 0, "0.32.0", BLOCK_TOKENS, num_blocks, **able)


class PickerSite:
    """One model's servers, and the picker's address."""

    def __init__(self, model: ModelRuntime, drain: Drain, address: str) -> None:
        self.model = model
        self.drain = drain
        self.address = address
        self.sent: list[tuple[str, Sequence[BlockKey]]] = []
        """Servers, and the blocks of the prompts that were sent there."""

    def join(self, name: str, role: Role = "both", num_blocks: int = NUM_BLOCKS, **load: Any) -> WorkerRecord:
        """Let a server with TandemConnector join at `name`, its host and port."""
        facts = facts_of(self.model.name, num_blocks)
        server = Server(f"http://{name}", ServerEntry(url=f"http://{name}"), role)
        worker = self.model.fleet.joined(hello_of(facts, server, self.model, name))
        api = ServerApi(server.url, ServerAccess(None, {}))  # type: ignore[arg-type] # it is never called
        link = StockLink(api, name, facts, {}, None, BLOCK_TOKENS, False, self._sent(name), lambda keys: None)
        self.model.links.add(worker, link)
        self.model.fleet.cache_changed(worker, EMPTY)
        report = {"available_blocks": num_blocks, "num_blocks": num_blocks} | load
        self.model.fleet.reported(worker, pb.LoadReport(**report))
        self.model.on_worker_report()
        return worker

    def _sent(self, name: str) -> Callable[[Sequence[BlockKey]], object]:
        return lambda keys: self.sent.append((name, keys))


@contextlib.asynccontextmanager
async def picker_site(folder: Path, **settings: Any) -> AsyncIterator[PickerSite]:
    """Serve a picker for the model in a folder; no server has joined."""
    config = RouterConfig.parse({"models": [{"path": folder, "name": "m"}]} | settings)
    limits, drain = TenantLimits(config), Drain()
    models = serve_models(config, read_models(config), limits, b"incarnation")
    metrics = RouterMetrics(new_registry())
    accounting = Accounting(MemoryLedger(USAGE_DAYS), metrics)
    observer = Observer(models, metrics, RecordFile(config), Tracing(config), accounting)
    keys = ApiKeys(config.api_keys_file)
    (model,) = models
    async with contextlib.AsyncExitStack() as parts:
        parts.push_async_callback(model.close)
        arrivals = Arrivals(config, limits)
        opened = await open_picker(config, 0, None, models, limits, arrivals, observer, keys, drain, parts)
        await opened.server.mark_serving(lambda: bool(model.decode_workers()))
        yield PickerSite(model, drain, opened.address)


class _Timed:
    """Context of a call that notes when the request's end came and when the first answer after it goes out."""

    def __init__(self, context: Any) -> None:
        self._context = context
        self._ended_at = 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)

    async def read(self) -> Any:
        message = await self._context.read()
        if message and message.request_body.end_of_stream:
            self._ended_at = time.perf_counter()
        return message

    async def write(self, message: Any) -> None:
        if self._ended_at:
            TAKEN.append(time.perf_counter() - self._ended_at)
            self._ended_at = 0.0
        await self._context.write(message)


TAKEN: list[float] = []
DECIDED: list[float] = []
"""Seconds of queue and placement, a part of `TAKEN`."""


class TimedService(EndpointPickerService):
    """The service, with times from a body's end to its answer."""

    async def Process(self, messages: Any, context: Any) -> None:  # noqa: N802 # the protocol's name
        await super().Process(messages, _Timed(context))


async def main() -> None:
    seeds = random.Random(1)
    sys.setswitchinterval(SWITCH_S)
    async with picker_site(STORYTELLER) as site:
        names = [f"10.0.0.{number}:8000" for number in range(NUM_SERVERS)]
        workers = [site.join(name, running=seeds.randrange(8)) for name in names]
        for family in range(NUM_FAMILIES):
            await _cache(site, seeds.sample(workers, HOLDERS), body_of(int(sys.argv[1]), family, 0))
        _time_decisions(site.model.dispatcher)
        spare_the_started()
        print(site.address, flush=True)
        skipped = await asyncio.get_running_loop().run_in_executor(None, sys.stdin.readline)
        parts = {"answer": TAKEN, "decision": DECIDED}
        print(json.dumps({name: quantiles_ms(values[int(skipped) :]) for name, values in parts.items()}), flush=True)


def _time_decisions(dispatcher: Dispatcher) -> None:
    place = dispatcher.place

    async def timed(*arguments: Any) -> Any:
        began_at = time.perf_counter()
        placed = await place(*arguments)
        DECIDED.append(time.perf_counter() - began_at)
        return placed

    dispatcher.place = timed  # type: ignore[method-assign]


async def _cache(site: PickerSite, workers: Sequence[WorkerRecord], body: bytes) -> None:
    """Have some servers hold the prompt of a body."""
    model = site.model.shown()
    request = inference_pb2.GenerateRequest()
    for message in json.loads(body)["messages"]:
        request.messages.add(**message)
    prompt = await model.encoder.encode(request)
    sampling = inference_pb2.Sampling(max_tokens=1, n=1)
    _, keys = model.needs(prompt, sampling, "", [prompt], to_score=False)
    for worker in workers:
        event = pb.CacheEvent(stored=b"".join(keys))
        sequence = worker.next_cache_sequence or 0
        assert site.model.fleet.cache_changed(worker, pb.CacheEvents(sequence=sequence, events=[event]))


if __name__ == "__main__":
    import router.frontend.envoy.service as start

    start.EndpointPickerService = TimedService  # type: ignore[misc] # as open_picker finds it
    uvloop.run(main())
