"""Streams of a router that was told to stop: each client is told how its own ended, wherever it was just then."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from cluster.process.life import Drain
from protos import inference_pb2 as pb
from router.admission.arrivals import Arrivals
from router.admission.config import AdmissionConfig
from router.admission.limits.tenant_limits import TenantLimits
from router.frontend.grpc_service import InferenceService
from router.security.api_keys import ANYBODY


class Context:
    """Of a call whose client is there."""

    code: Any = None
    details = ""

    def set_code(self, code: Any) -> None:
        self.code = code

    def set_details(self, details: str) -> None:
        self.details = details

    def set_trailing_metadata(self, metadata: Any) -> None:
        assert metadata

    def cancelled(self) -> bool:
        return False

    def time_remaining(self) -> float:
        return 60.0

    def invocation_metadata(self) -> tuple[()]:
        return ()


class Serving:
    """Two messages, and then nothing for good."""

    async def generate(self, *_: Any, **__: Any) -> AsyncIterator[list[bytes]]:
        yield [b"first"]
        yield [b"second"]
        await asyncio.Event().wait()


class Keys:
    required = False

    def principal(self, _: Any) -> Any:
        return ANYBODY


@pytest.mark.parametrize("while_sending", [True, False])
async def test_a_client_is_told_that_the_router_stops(while_sending: bool) -> None:
    drain, config = Drain(), AdmissionConfig()
    arrivals = Arrivals(config, TenantLimits(config))
    service = InferenceService(Serving(), None, [], Keys(), "r", drain, None, arrivals, None)  # type: ignore[arg-type]
    told: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    sends = asyncio.Event()

    context = Context()

    async def answer() -> None:
        """As gRPC does, on one task: asks for a message, sends it, asks for the next."""
        async for message in service.Generate(pb.GenerateRequest().SerializeToString(), context):
            if message == b"second" and while_sending:
                sends.set()
                await asyncio.sleep(0)
                await asyncio.sleep(0)
            elif message == b"second":
                asyncio.get_running_loop().call_soon(sends.set)
        told.set_result(context.details)

    task = asyncio.ensure_future(answer())
    await sends.wait()
    drain.end_all()
    await asyncio.wait([task])
    assert not task.cancelled()
    assert told.result() == "router r was told to stop"
    assert await drain.idle(0)
