"""Gateways that call an endpoint picker behind its gRPC port."""

import contextlib
import json
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
from envoy.service.ext_proc.v3 import external_processor_pb2 as pb

from bench.router.picker_site import PickerSite
from cluster.network.rpc import channel
from router.frontend.envoy.service import NAME
from router.stock.link import StockLink
from support.gateway import Gateway


def num_counted(site: PickerSite) -> int:
    """Requests that the servers' records count, however they went."""
    links = [site.model.links.to(worker) for worker in site.model.fleet.workers]
    return sum(link.num_running for link in links if isinstance(link, StockLink))


@contextlib.asynccontextmanager
async def calling(address: str) -> AsyncIterator[Any]:
    """Open a call, as a gateway for one exchange."""
    async with channel(address) as to_picker:
        call: Any = to_picker.stream_stream(
            f"/{NAME}/Process",
            request_serializer=pb.ProcessingRequest.SerializeToString,
            response_deserializer=pb.ProcessingResponse.FromString,
        )()
        try:
            yield call
        finally:
            call.cancel()


async def ask(address: str, gateway: Gateway) -> Gateway:
    """Have the request of an exchange answered, and then its response."""
    async with calling(address) as call:
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


def body_of(**fields: Any) -> bytes:
    return json.dumps({"model": "m", **fields}).encode()
