"""The Python client: typed, asynchronous, over gRPC.

async with Client("127.0.0.1:50051") as client:
    async for piece in client.generate(text="Once upon a time"):
        print(piece.text, end="")
"""

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from types import TracebackType
from typing import Self

import grpc

from cluster.errors import InvalidRequest, Unavailable, from_rpc_error
from cluster.rpc import channel
from protos import inference_pb2 as pb
from protos import inference_pb2_grpc as pb_grpc

Message = tuple[str, str]
"""(role, content) of a chat message."""


class Client:
    """One channel to one router. Every failure is a `cluster.errors.ServiceError`."""

    def __init__(self, address: str) -> None:
        self._channel = channel(address)
        self._stub = pb_grpc.InferenceStub(self._channel)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        await self._channel.close()

    async def generate(
        self,
        text: str | None = None,
        *,
        messages: Sequence[Message] = (),
        token_ids: Sequence[int] = (),
        sampling: pb.Sampling | None = None,
        model: str = "",
        timeout_s: float | None = None,
        request_id: str = "",
        cache_salt: str = "",
        priority: int = 0,
        tenant: str = "",
        max_ttft_ms: float | None = None,
    ) -> AsyncIterator[pb.GenerateResponse]:
        """Stream one completion; the last message has `finish`. Leaving the loop early cancels the request.

        With `sampling.n` above 1 each message is of the choice `index`, and each choice ends with a `finish`.

        Raises ServiceError: InvalidRequest names the field at fault; Unavailable may be retried, and Overloaded after
        its `retry_after_s` where it has one.
        """
        try:
            request = pb.GenerateRequest(
                model=model,
                text=text,
                messages=[pb.ChatMessage(role=role, content=content) for role, content in messages],
                token_ids=token_ids,
                sampling=sampling,
                request_id=request_id,
                cache_salt=cache_salt,
                priority=priority,
                tenant=tenant,
                max_ttft_ms=max_ttft_ms,
            )
        except ValueError as error:  # protobuf's own range checks: a negative token id, for one
            raise InvalidRequest("request", str(error)) from None
        call = self._stub.Generate(request, timeout=timeout_s)
        try:
            async for response in call:
                yield response
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from None
        finally:
            call.cancel()

    async def explain(
        self,
        text: str | None = None,
        *,
        token_ids: Sequence[int] = (),
        sampling: pb.Sampling | None = None,
        cache_salt: str = "",
        timeout_s: float = 30.0,
    ) -> pb.Explanation:
        """Where such a request would go now, and why; nothing is started. Raises ServiceError as `generate`."""
        request = pb.GenerateRequest(text=text, token_ids=token_ids, sampling=sampling, cache_salt=cache_salt)
        try:
            return await self._stub.Explain(request, timeout=timeout_s)
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from None

    async def wait_for_workers(self, num_prefill: int, num_decode: int, timeout_s: float) -> None:
        """Return once so many workers have joined the router. Raises Unavailable after `timeout_s`."""
        give_up_at = time.monotonic() + timeout_s
        while True:
            (model,) = await self.list_models()
            if model.prefill_workers >= num_prefill and model.decode_workers >= num_decode:
                return
            if time.monotonic() > give_up_at:
                there = f"{model.prefill_workers} prefill and {model.decode_workers} decode workers"
                raise Unavailable(f"only {there} joined within {timeout_s:g} s")
            await asyncio.sleep(0.02)

    async def list_models(self, timeout_s: float = 10.0) -> list[pb.Model]:
        """The models served now."""
        try:
            answer = await self._stub.ListModels(pb.ListModelsRequest(), timeout=timeout_s)
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from None
        return list(answer.models)
