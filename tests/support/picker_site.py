"""An endpoint picker behind its gRPC port, over a fleet whose servers have joined; and gateways that call it."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

import grpc
from envoy.service.ext_proc.v3 import external_processor_pb2 as pb

from cluster.metrics import new_registry
from cluster.network.rpc import channel
from cluster.process.drain import Drain
from kvcache.block_keys import BlockKey
from protos import membership_pb2
from router.admission.arrivals import Arrivals
from router.admission.limits.tenant_limits import TenantLimits
from router.config import RouterConfig
from router.frontend.envoy.service import NAME
from router.frontend.envoy.start import open_picker
from router.models.model_files import read_models
from router.models.model_runtime import ModelRuntime
from router.observability.decision_log import DecisionLog
from router.observability.metrics import RouterMetrics
from router.observability.samples import Samples
from router.observability.tracing import Tracing
from router.placement.fleet.worker_records import WorkerRecord
from router.request_path.accounting import Accounting
from router.request_path.observation import Observer
from router.runtime import serve_models
from router.security.api_keys import ApiKeys
from router.stock.link import StockLink
from router.stock.server_api import ServerAccess, ServerApi
from router.usage.ledger import MemoryLedger
from support.gateway import Gateway
from support.served_models import hello_of


class PickerSite:
    """One model's servers, and the picker's address."""

    def __init__(self, model: ModelRuntime, drain: Drain, address: str, access: ServerAccess) -> None:
        self.model = model
        self.drain = drain
        self.address = address
        self._access = access
        self.left: list[tuple[str, Sequence[BlockKey]]] = []
        """Servers, and the prompts' blocks that the router assumes there."""

    def join(self, name: str, decodes: bool = True, num_blocks: int = 1000, **load: Any) -> WorkerRecord:
        """Let a server join that is called `name`, a host and port."""
        role = membership_pb2.ROLE_DECODE if decodes else membership_pb2.ROLE_PREFILL
        url = f"http://{name}"
        values: dict[str, Any] = {"role": role, "address": url, "loan_address": url, "num_blocks": num_blocks}
        worker = self.model.fleet.joined(hello_of(self.model, name, loan_version=1, lends=True, **values))
        api = ServerApi(url, self._access)
        link = StockLink(api, name, "m", {}, None, 16, False, lambda keys: self.left.append((name, keys)))
        self.model.links.add(worker, link)
        self.model.fleet.cache_changed(worker, membership_pb2.CacheEvents(snapshot=True))
        report = {"available_blocks": num_blocks, "num_blocks": num_blocks} | load
        self.model.fleet.reported(worker, membership_pb2.LoadReport(**report))
        self.model.on_worker_report()
        return worker

    @property
    def num_running(self) -> int:
        return self.model.dispatcher.admission.num_running

    @property
    def num_counted(self) -> int:
        """Requests that the servers' records count, however they went."""
        links = [self.model.links.to(worker) for worker in self.model.fleet.workers]
        return sum(link.num_running for link in links if isinstance(link, StockLink))

    @contextlib.asynccontextmanager
    async def call(self) -> AsyncIterator[Any]:
        """Open a call, as a gateway for one exchange."""
        async with channel(self.address) as to_picker:
            call: Any = to_picker.stream_stream(
                f"/{NAME}/Process",
                request_serializer=pb.ProcessingRequest.SerializeToString,
                response_deserializer=pb.ProcessingResponse.FromString,
            )()
            try:
                yield call
            finally:
                call.cancel()

    async def ask(self, gateway: Gateway) -> Gateway:
        """Have the request of an exchange answered, and then its response."""
        async with self.call() as call:
            await drive(call, gateway)
            await drive(call, gateway, responds=True)
            await call.done_writing()
        return gateway


async def drive(call: Any, gateway: Gateway, responds: bool = False, limit: Callable[[], bool] = lambda: False) -> None:
    """Send what the gateway may send, and apply the answers, until one direction is done, or the limit."""
    direction = gateway.response if responds else gateway.request
    while gateway.immediate is None and not direction.done and not limit():
        while (message := gateway.next(direction)) is not None:
            await call.write(message)
        if direction.done:
            return
        answer = await call.read()
        assert answer is not grpc.aio.EOF, await call.details()
        gateway.take(answer)


@contextlib.asynccontextmanager
async def picker_site(folder: Path, **settings: Any) -> AsyncIterator[PickerSite]:
    config = RouterConfig.parse({"models": [{"path": folder, "name": "m"}], "learn_rates": False} | settings)
    limits, drain = TenantLimits(config), Drain()
    models = serve_models(config, read_models(config), limits, b"incarnation")
    metrics = RouterMetrics(new_registry())
    accounting = Accounting(MemoryLedger(config.usage_days), metrics)
    observer = Observer(config, models, metrics, Samples(config), Tracing(config), DecisionLog(config), accounting)
    keys = ApiKeys(config.api_keys, config.api_keys_file)
    access = ServerAccess(None, {})  # type: ignore[arg-type] # nothing calls the servers
    async with contextlib.AsyncExitStack() as parts:
        for each in models:
            parts.push_async_callback(each.close)
        arrivals = Arrivals(config, limits)
        opened = await open_picker(config, 0, None, models, limits, arrivals, observer, keys, drain, parts)
        (model,) = models
        await opened.server.mark_serving(lambda: bool(model.decode_workers()))
        yield PickerSite(model, drain, opened.address, access)
        await asyncio.sleep(0)


def body_of(**fields: Any) -> bytes:
    return json.dumps({"model": "m", **fields}).encode()
