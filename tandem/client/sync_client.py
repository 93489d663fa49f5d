"""The client for programs without asyncio: the same calls, blocking.

with SyncClient("127.0.0.1:50051") as client:
    for piece in client.generate(text="Once upon a time"):
        print(piece.text, end="")
"""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from types import TracebackType
from typing import Any, Self, TypeVar

from cluster.tls import ClientIdentity
from protos import inference_pb2 as pb
from tandem.client.client import Client

Answer = TypeVar("Answer")
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

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        self._wait(self._client.close())
        self._end()

    def generate(self, text: str | None = None, **options: Any) -> Iterator[pb.GenerateResponse]:
        """Stream a completion, as Client.generate.

        Closing or collecting the iterator cancels the request.
        """
        return self._each(self._client.generate(text, **options))

    def generate_batch(self, requests: list[pb.GenerateRequest], **options: Any) -> Iterator[pb.BatchResult]:
        """Yield results of a batch, as Client.generate_batch."""
        return self._each(self._client.generate_batch(requests, **options))

    def embed(self, inputs: Sequence[str | Sequence[int]], **options: Any) -> list[list[float]]:
        return self._wait(self._client.embed(inputs, **options))

    def explain(self, text: str | None = None, **options: Any) -> pb.Explanation:
        return self._wait(self._client.explain(text, **options))

    def warm(self, text: str | None = None, **options: Any) -> pb.WarmResponse:
        return self._wait(self._client.warm(text, **options))

    def tokenize(self, text: str | None = None, **options: Any) -> list[int]:
        return self._wait(self._client.tokenize(text, **options))

    def list_models(self, **options: Any) -> list[pb.Model]:
        return self._wait(self._client.list_models(**options))

    def cluster_status(self, **options: Any) -> pb.ClusterStatusResponse:
        return self._wait(self._client.cluster_status(**options))

    def feedback(self, request_id: str, **options: Any) -> None:
        self._wait(self._client.feedback(request_id, **options))

    def usage(self, **options: Any) -> list[pb.UsageTotal]:
        return self._wait(self._client.usage(**options))

    def _wait(self, work: Coroutine[Any, Any, Answer]) -> Answer:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def _each(self, items: AsyncIterator[Item]) -> Iterator[Item]:
        try:
            while True:
                try:
                    yield self._wait(_next(items))
                except StopAsyncIteration:
                    return
        finally:
            if self._loop.is_running():
                self._wait(items.aclose())  # type: ignore[attr-defined]  # they are generators

    def _end(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


async def _made(make: Callable[[], Answer]) -> Answer:
    """Create an object on the loop; channels belong to the loop on which they are created."""
    return make()


async def _next(items: AsyncIterator[Item]) -> Item:
    return await anext(items)
