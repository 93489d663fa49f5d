"""Streams of a router that was told to stop: each client is told how its own ended, wherever it was just then."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from cluster.drain import Drain
from protos import inference_pb2 as pb
from router.admission.arrivals import Arrivals
from router.admission.config import AdmissionConfig
from router.admission.tenant_limits import TenantLimits
from router.frontend.grpc_service import InferenceService
from router.security.api_keys import ANYBODY


class Aborted(Exception):
    """What gRPC tells the client."""


class Context:
    """Of a call whose client is there."""

    async def abort_with_status(self, status: Any) -> None:
        raise Aborted(status.details)

    def cancelled(self) -> bool:
        return False

    def time_remaining(self) -> float:
        return 60.0

    def invocation_metadata(self) -> tuple[()]:
        return ()


class Serving:
    """Two messages, and then nothing for good."""

    async def generate(self, *_: Any, **__: Any) -> AsyncIterator[bytes]:
        yield b"first"
        yield b"second"
        await asyncio.Event().wait()


class Keys:
    def principal(self, _: Any) -> Any:
        return ANYBODY


@pytest.mark.parametrize("while_sending", [True, False])
async def test_a_client_is_told_that_the_router_stops(while_sending: bool) -> None:
    drain, config = Drain(), AdmissionConfig()
    arrivals = Arrivals(config, TenantLimits(config))
    service = InferenceService(Serving(), [], Keys(), "r", drain, None, arrivals)  # type: ignore[arg-type]
    told: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    sends = asyncio.Event()

    async def answer() -> None:
        """As gRPC does, on one task: asks for a message, sends it, asks for the next."""
        try:
            async for message in service.Generate(pb.GenerateRequest().SerializeToString(), Context()):
                if message == b"second" and while_sending:
                    sends.set()
                    await asyncio.sleep(0)
                    await asyncio.sleep(0)
                elif message == b"second":
                    asyncio.get_running_loop().call_soon(sends.set)
        except Aborted as error:
            told.set_result(str(error))

    task = asyncio.ensure_future(answer())
    await sends.wait()
    drain.end_all()
    await asyncio.wait([task])
    assert not task.cancelled()
    assert told.result() == "router r was told to stop"
    assert await drain.idle(0)
