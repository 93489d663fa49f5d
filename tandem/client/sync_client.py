"""The client for programs without asyncio: the same calls, blocking.

with SyncClient("127.0.0.1:50051") as client:
    for piece in client.generate(text="Once upon a time"):
        print(piece.text, end="")
"""

import asyncio
import contextlib
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Generator, Iterator, Sequence
from typing import Any, Self, TypeVar, Unpack

from cluster.network.tls import ClientIdentity
from protos import inference_pb2 as pb
from tandem.client.call_span import Metadata
from tandem.client.client import Client
from tandem.client.options import EmbedOptions, GenerateOptions, TokenizeOptions, WarmOptions

Reply = TypeVar("Reply")
Item = TypeVar("Item")


class SyncClient:
    """Blocking `tandem.client.Client` on a thread of its own; may be used from several threads.

    Arguments and errors are those of the asynchronous methods.
    """

    def __init__(self, *addresses: str, api_key: str = "", tls: ClientIdentity | None = None) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="tandem-client", daemon=True)
        self._thread.start()
        try:
            self._client = self._wait(_made(lambda: Client(*addresses, api_key=api_key, tls=tls)))
        except BaseException:
            self._end()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._wait(self._client.close())
        self._end()

    def generate(self, text: str | None = None, **options: Unpack[GenerateOptions]) -> Generator[pb.GenerateResponse]:
        """Stream a completion, as Client.generate.

        Closing or collecting the generator cancels the request.
        """
        return self._each(self._client.generate(text, **options))

    @contextlib.contextmanager
    def stream(
        self, text: str | None = None, **options: Unpack[GenerateOptions]
    ) -> Iterator[Generator[pb.GenerateResponse]]:
        """Yield the pieces of `generate`; the request is over when the block is left."""
        with contextlib.closing(self.generate(text, **options)) as pieces:
            yield pieces

    def generate_batch(
        self,
        requests: Sequence[pb.GenerateRequest],
        max_concurrent: int = 0,
        timeout_s: float | None = None,
        metadata: Metadata = (),
    ) -> Generator[pb.BatchResult]:
        """Yield results of a batch, as Client.generate_batch."""
        return self._each(self._client.generate_batch(requests, max_concurrent, timeout_s, metadata))

    def embed(self, inputs: Sequence[str | Sequence[int]], **options: Unpack[EmbedOptions]) -> list[list[float]]:
        return self._wait(self._client.embed(inputs, **options))

    def explain(self, text: str | None = None, **options: Unpack[GenerateOptions]) -> pb.Explanation:
        return self._wait(self._client.explain(text, **options))

    def decisions(self, request_id: str, timeout_s: float = 30.0, metadata: Metadata = ()) -> pb.DecisionsResponse:
        return self._wait(self._client.decisions(request_id, timeout_s, metadata))

    def warm(self, text: str | None = None, **options: Unpack[WarmOptions]) -> pb.WarmResponse:
        return self._wait(self._client.warm(text, **options))

    def tokenize(self, text: str | None = None, **options: Unpack[TokenizeOptions]) -> list[int]:
        return self._wait(self._client.tokenize(text, **options))

    def list_models(self, timeout_s: float = 10.0, metadata: Metadata = ()) -> list[pb.Model]:
        return self._wait(self._client.list_models(timeout_s, metadata))

    def cluster_status(self, timeout_s: float = 10.0, metadata: Metadata = ()) -> pb.ClusterStatusResponse:
        return self._wait(self._client.cluster_status(timeout_s, metadata))

    def feedback(
        self,
        request_id: str,
        rating: float | None = None,
        corrected_text: str = "",
        comment: str = "",
        timeout_s: float = 10.0,
        metadata: Metadata = (),
    ) -> None:
        self._wait(self._client.feedback(request_id, rating, corrected_text, comment, timeout_s, metadata))

    def usage(
        self, days: int = 1, tenant: str = "", timeout_s: float = 10.0, metadata: Metadata = ()
    ) -> list[pb.UsageTotal]:
        return self._wait(self._client.usage(days, tenant, timeout_s, metadata))

    def _wait(self, work: Coroutine[Any, Any, Reply]) -> Reply:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def _each(self, items: AsyncGenerator[Item]) -> Generator[Item]:
        try:
            while True:
                try:
                    yield self._wait(_next(items))
                except StopAsyncIteration:
                    return
        finally:
            if self._loop.is_running():
                self._wait(items.aclose())

    def _end(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


async def _made(make: Callable[[], Reply]) -> Reply:
    """Create an object on the loop; channels belong to the loop on which they are created."""
    return make()


async def _next(items: AsyncIterator[Item]) -> Item:
    return await anext(items)
