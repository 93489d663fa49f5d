"""The Python client: typed, asynchronous, over gRPC, to one router or to any of several.

async with Client("127.0.0.1:50051") as client, client.stream(text="Once upon a time") as pieces:
    async for piece in pieces:
        print(piece.text, end="")
"""

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self, TypeVar, Unpack

import grpc
from google.rpc import status_pb2

from cluster.errors import InvalidRequest, ServiceError, Unavailable, UnknownRequest
from cluster.network.error_status import from_proto, from_rpc_error
from cluster.network.rpc import media_channel
from cluster.network.tls import ClientIdentity
from cluster.process.tasks import each_of
from protos import inference_pb2 as pb
from protos import inference_pb2_grpc as pb_grpc
from tandem.client.call_span import CallSpan, Metadata
from tandem.client.options import (
    EmbedOptions,
    GenerateOptions,
    Json,
    TokenizeOptions,
    WarmOptions,
    chat_message,
    medium,
)
from tandem.client.resuming import StreamProgress, Tries, may_have_others

Reply = TypeVar("Reply")
Request = TypeVar("Request")


class Client:
    """Client of one or several equal routers.

    Every failure is a `tandem.errors.ServiceError`.

    A call goes to the router that served the last one. If that cannot be reached, or answers Unavailable before
    anything else, the others are tried, for 3 s. A stream whose router dies goes on at another one where the client has
    several addresses, or a host name; its tokens are those of a stream that nothing disturbed. Where OpenTelemetry is
    installed, each `generate` and `generate_batch` is a span, and routers' traces continue it.
    """

    def __init__(self, *addresses: str, api_key: str = "", tls: ClientIdentity | None = None) -> None:
        """Create a client of routers at host:port; one string may hold several, separated by commas.

        `tls`: use TLS. Raises StartError for a certificate file that cannot be read.
        """
        self._addresses = [part.strip() for address in addresses for part in address.split(",")]
        if not all(self._addresses) or not self._addresses:
            raise InvalidRequest("address", "host:port of a router is missing")
        for name, value in (("address", "".join(self._addresses)), ("api_key", api_key)):
            if not (value.isascii() and value.isprintable()):
                raise InvalidRequest(name, "must be printable ASCII")
        self._channels = [media_channel(address, tls) for address in self._addresses]
        self._stubs = [pb_grpc.InferenceStub(link) for link in self._channels]
        self._metadata = (("authorization", f"Bearer {api_key}"),) if api_key else ()
        self._current = 0

    @property
    def address(self) -> str:
        """Address of the router that served the last call."""
        return self._addresses[self._current]

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        await each_of(link.close() for link in self._channels)

    async def generate(
        self, text: str | None = None, **options: Unpack[GenerateOptions]
    ) -> AsyncGenerator[pb.GenerateResponse]:
        """Stream one completion; the last piece has `finish`.

        With `sampling.n` above 1 each piece belongs to the choice `index`, and each choice ends with a `finish`.

        A generator that is closed cancels the request. A loop that is left early does not close it at once: use
        `stream` where a loop may be left.

        Raises ServiceError. InvalidRequest names the field at fault. Unavailable may be retried, and names the router
        when its stream had started and no other router could continue it. Overloaded may be retried after its
        `retry_after_s`, where it has one.
        """
        fields, timeout_s, metadata = _parted("generate", GenerateOptions, options)
        request = _request(text=text, **fields)
        async with contextlib.aclosing(self.send(request, timeout_s, metadata)) as responses:
            async for response in responses:
                yield response

    @contextlib.asynccontextmanager
    async def stream(
        self, text: str | None = None, **options: Unpack[GenerateOptions]
    ) -> AsyncIterator[AsyncGenerator[pb.GenerateResponse]]:
        """Yield the pieces of `generate`; the request is over when the block is left, however it is left.

        async with client.stream(text="Once upon a time") as pieces:
            async for piece in pieces:
                print(piece.text, end="")
        """
        async with contextlib.aclosing(self.generate(text, **options)) as pieces:
            yield pieces

    async def send(
        self, request: pb.GenerateRequest, timeout_s: float | None, metadata: Metadata = ()
    ) -> AsyncGenerator[pb.GenerateResponse]:
        """Stream the completion of a complete request, as `generate` does."""
        span = CallSpan([request], self._addresses, metadata)
        give_up_at = None if timeout_s is None else time.monotonic() + timeout_s
        progress = StreamProgress(request, may_have_others(self._addresses))
        order, tries = self._order(), Tries(len(self._stubs))
        try:
            while True:
                number = order[tries.number % len(order)]
                call = self._stubs[number].Generate(
                    progress.next_request(),
                    timeout=_remaining_s(give_up_at),
                    metadata=(*self._metadata, *span.metadata),
                )
                try:
                    async for response in call:
                        self._current = number
                        progress.add(response)
                        tries.succeeded()
                        span.record(response)
                        yield response
                    break
                except (grpc.aio.AioRpcError, Unavailable) as error:
                    failure = from_rpc_error(error) if isinstance(error, grpc.aio.AioRpcError) else error
                    if not isinstance(failure, Unavailable):
                        raise failure from None
                    if progress.is_complete:
                        break
                    can_go_on = not progress.has_begun or progress.can_continue
                    if not can_go_on or (wait_s := tries.failed(progress.has_begun)) is None:
                        if not progress.has_begun:
                            raise failure from None
                        message = f"router {self._addresses[number]} ended the stream: {failure.message}"
                        raise type(failure)(message, failure.field) from None
                finally:
                    call.cancel()
                await asyncio.sleep(wait_s)
        except BaseException as error:
            span.end(error)
            raise
        span.end()

    async def explain(self, text: str | None = None, **options: Unpack[GenerateOptions]) -> pb.Explanation:
        """Return where a request would go now, and why; nothing is started.

        Without `timeout_s` the deadline is 30 s. Raises ServiceError as `generate`.
        """
        fields, timeout_s, metadata = _parted("explain", GenerateOptions, {"timeout_s": 30.0} | options)
        request = _request(text=text, **fields)
        return await self._ask(lambda stub, how: stub.Explain(request, **how), timeout_s, metadata)

    async def warm(self, text: str | None = None, **options: Unpack[WarmOptions]) -> pb.WarmResponse:
        """Place a prompt's blocks on several decode workers, without output.

        Without `timeout_s` the deadline is 300 s. Raises ServiceError as `generate`.
        """
        fields, timeout_s, metadata = _parted("warm", WarmOptions, {"timeout_s": 300.0, "workers": 1} | options)
        request = _made(pb.WarmRequest, text=text, **fields)
        return await self._ask(lambda stub, how: stub.Warm(request, **how), timeout_s, metadata)

    async def decisions(
        self, request_id: str, timeout_s: float = 30.0, metadata: Metadata = ()
    ) -> pb.DecisionsResponse:
        """Return how a request was placed: the candidates of each placement, and the outcome.

        Asks all routers. Raises ServiceError; UnknownRequest where none remembers the request.
        """
        request = pb.DecisionsRequest(request_id=request_id)
        give_up_at = time.monotonic() + timeout_s
        failures: list[ServiceError] = []
        for number in self._order():
            how: dict[str, Any] = {"timeout": _remaining_s(give_up_at), "metadata": (*self._metadata, *metadata)}
            try:
                reply: pb.DecisionsResponse = await self._stubs[number].Decisions(request, **how)
            except grpc.aio.AioRpcError as error:
                failures.append(from_rpc_error(error))
                if not isinstance(failures[-1], Unavailable | UnknownRequest):
                    break
            else:
                return reply
        # A router that is away may be the one that served it.
        raise next((failure for failure in failures if not isinstance(failure, UnknownRequest)), failures[-1])

    async def generate_batch(
        self,
        requests: Sequence[pb.GenerateRequest],
        max_concurrent: int = 0,
        timeout_s: float | None = None,
        metadata: Metadata = (),
    ) -> AsyncGenerator[pb.BatchResult]:
        """Yield results as requests finish; `error_of` returns the error of a failed one.

        All go to one router. `max_concurrent` 0: the router's default. Raises ServiceError for the whole batch.
        """
        request = pb.GenerateBatchRequest(requests=requests, max_concurrent=max_concurrent)
        span = CallSpan(requests, self._addresses, metadata)
        call = self._stubs[self._current].GenerateBatch(
            request, timeout=timeout_s, metadata=(*self._metadata, *span.metadata)
        )  # another router would repeat results
        failure: BaseException | None = None
        try:
            async for result in call:
                yield result
        except grpc.aio.AioRpcError as error:
            failure = from_rpc_error(error)
            raise failure from None
        except BaseException as error:
            failure = error
            raise
        finally:
            call.cancel()
            span.end(failure)

    async def embed(self, inputs: Sequence[str | Sequence[int]], **options: Unpack[EmbedOptions]) -> list[list[float]]:
        """Return the embedding of each text or list of token ids, in order.

        Raises ServiceError when any input fails.
        """
        fields, timeout_s, metadata = _parted("embed", EmbedOptions, options)
        embedding = pb.EmbeddingOptions(dimensions=fields.pop("dimensions", None))
        requests = [
            _request(
                embedding=embedding, **({"text": each} if isinstance(each, str) else {"token_ids": each}), **fields
            )
            for each in inputs
        ]
        vectors: dict[int, list[float]] = {}
        batch = self.generate_batch(requests, timeout_s=timeout_s, metadata=metadata)
        async with contextlib.aclosing(batch) as results:
            async for result in results:
                if (error := error_of(result)) is not None:
                    raise error
                vectors[result.index] = list(result.embedding)
        return [vectors[index] for index in range(len(requests))]

    async def tokenize(self, text: str | None = None, **options: Unpack[TokenizeOptions]) -> list[int]:
        """Return the token ids of a prompt as the model reads it.

        Without `timeout_s` the deadline is 30 s. Raises ServiceError.
        """
        fields, timeout_s, metadata = _parted("tokenize", TokenizeOptions, {"timeout_s": 30.0} | options)
        request = _made(pb.TokenizeRequest, text=text, **fields)
        answer = await self._ask(lambda stub, how: stub.Tokenize(request, **how), timeout_s, metadata)
        return list(answer.token_ids)

    async def cluster_status(self, timeout_s: float = 10.0, metadata: Metadata = ()) -> pb.ClusterStatusResponse:
        """Return the cluster's status as one router sees it.

        Raises ServiceError.
        """
        request = pb.ClusterStatusRequest()
        return await self._ask(lambda stub, how: stub.ClusterStatus(request, **how), timeout_s, metadata)

    async def feedback(
        self,
        request_id: str,
        rating: float | None = None,
        corrected_text: str = "",
        comment: str = "",
        timeout_s: float = 10.0,
        metadata: Metadata = (),
    ) -> None:
        """Send feedback on an answer: `rating` in [-1, 1].

        Raises ServiceError, NotConfigured where no samples are kept.
        """
        request = pb.FeedbackRequest(
            request_id=request_id, rating=rating, corrected_text=corrected_text, comment=comment
        )
        await self._ask(lambda stub, how: stub.Feedback(request, **how), timeout_s, metadata)

    async def usage(
        self, days: int = 1, tenant: str = "", timeout_s: float = 10.0, metadata: Metadata = ()
    ) -> list[pb.UsageTotal]:
        """Return tokens of the last `days` days by day, tenant and model; of one `tenant` if named.

        Raises ServiceError.
        """
        request = pb.UsageRequest(days=days, tenant=tenant)
        return list((await self._ask(lambda stub, how: stub.Usage(request, **how), timeout_s, metadata)).totals)

    async def wait_for_workers(self, num_prefill: int, num_decode: int, timeout_s: float) -> None:
        """Wait until this many workers have joined the router, of all models together; also for the router itself.

        Raises Unavailable after `timeout_s`.
        """
        give_up_at = time.monotonic() + timeout_s
        while True:
            try:
                models = await self.list_models()
            except Unavailable:
                if time.monotonic() > give_up_at:
                    raise
                await asyncio.sleep(0.1)
                continue
            prefill, decode = (sum(getattr(m, f"{role}_workers") for m in models) for role in ("prefill", "decode"))
            if prefill >= num_prefill and decode >= num_decode:
                return
            if time.monotonic() > give_up_at:
                joined = f"{prefill} prefill and {decode} decode workers"
                raise Unavailable(f"only {joined} joined within {timeout_s:g} s")
            await asyncio.sleep(0.02)

    async def list_models(self, timeout_s: float = 10.0, metadata: Metadata = ()) -> list[pb.Model]:
        """Return the served models."""
        request = pb.ListModelsRequest()
        answer = await self._ask(lambda stub, how: stub.ListModels(request, **how), timeout_s, metadata)
        return list(answer.models)

    def _order(self) -> list[int]:
        """Return the indices of the routers, the last used first."""
        return [(self._current + step) % len(self._stubs) for step in range(len(self._stubs))]

    async def _ask(
        self,
        call: "Callable[[pb_grpc.InferenceStub, dict[str, Any]], Awaitable[Reply]]",
        timeout_s: float | None,
        metadata: Metadata = (),
    ) -> Reply:
        give_up_at = None if timeout_s is None else time.monotonic() + timeout_s
        *others, last = self._order()
        for number in (*others, last):
            try:
                how = {"timeout": _remaining_s(give_up_at), "metadata": (*self._metadata, *metadata)}
                answer = await call(self._stubs[number], how)
            except grpc.aio.AioRpcError as error:
                failure = from_rpc_error(error)
                if not isinstance(failure, Unavailable) or number == last:
                    raise failure from None
            else:
                self._current = number
                return answer
        raise AssertionError("the last router either answers or fails")


@dataclass(frozen=True, slots=True)
class Target:
    """Address and credentials of routers, from a command's options."""

    address: str
    """Addresses host:port, separated by commas."""
    api_key: str = field(default="", repr=False)
    tls: ClientIdentity | None = None

    def client(self) -> Client:
        return Client(self.address, api_key=self.api_key, tls=self.tls)


def _parted(call: str, known: type[Any], options: Mapping[str, Any]) -> tuple[dict[str, Any], float | None, Metadata]:
    """Return a call's options as (fields of its message, timeout_s, metadata).

    Raises TypeError for an option that `known`, a TypedDict, does not have.
    """
    if unknown := options.keys() - known.__annotations__.keys():
        raise TypeError(f"{call}() got an unexpected keyword argument {min(unknown)!r}")
    fields = dict(options)
    timeout_s, metadata = fields.pop("timeout_s", None), fields.pop("metadata", ())
    if "messages" in fields:
        numbered = enumerate(fields["messages"])
        fields["messages"] = [chat_message(message, f"messages[{number}]") for number, message in numbered]
    if "media" in fields:
        fields["media"] = [medium(each, f"media[{number}]") for number, each in enumerate(fields["media"])]
    if "tools" in fields:
        fields["tools"] = [_json(tool) for tool in fields["tools"]]
    if "chat_template_kwargs" in fields:
        fields["chat_template_kwargs"] = _json(fields["chat_template_kwargs"])
    return fields, timeout_s, metadata


def _request(**fields: Any) -> pb.GenerateRequest:
    return _made(pb.GenerateRequest, **fields)


def _made(kind: "Callable[..., Request]", **fields: Any) -> "Request":
    """Build a message.

    Raises InvalidRequest.
    """
    try:
        return kind(**fields)
    except ValueError as error:  # protobuf's range checks, for example a negative token id
        raise InvalidRequest("request", str(error)) from None


def _json(value: Json) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def error_of(result: pb.BatchResult) -> ServiceError | None:
    """Return the error of a failed result, or None."""
    return from_proto(status_pb2.Status.FromString(result.status)) if result.status else None


def _remaining_s(give_up_at: float | None) -> float | None:
    return None if give_up_at is None else max(0.0, give_up_at - time.monotonic())
