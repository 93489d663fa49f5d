"""The child process with the encoder, as the service sees it. One that ends is started again."""

import asyncio
import logging

from cluster.errors import InvalidRequest, StartError, Unavailable
from cluster.process.tasks import Tasks
from engine.config import WorkerConfig
from engine.media import Embeddings
from kvcache.items import Item
from preprocessor.children import GONE, RESTART_S, Child
from preprocessor.frames import Frame

log = logging.getLogger(__name__)

MAX_BYTES = 1 << 30
"""Most bytes of an item's embeddings."""
ITEM_S = 30.0
"""Seconds after which an item that the encoder does not end costs its process."""


class ChildEncoder:
    """Encoder in a child process, which computes one item after the other."""

    def __init__(self, config: WorkerConfig) -> None:
        self._config = config
        self._turn = asyncio.Lock()
        self._child: Child | None = None
        self._tasks = Tasks("the encoder is started no more")
        self.fingerprint = b""

    @property
    def is_there(self) -> bool:
        return self._child is not None

    async def start(self) -> None:
        """Start the process and wait until its model is loaded.

        Raises StartError.
        """
        await self._start()
        self._tasks.spawn(self._keep_alive())

    async def encode(self, item: Item, blob: bytes) -> Embeddings:
        """Return an item's embeddings.

        Raises Unavailable where the process ends meanwhile, InvalidRequest for an item that cannot be read.
        """
        async with self._turn:
            if (child := self._child) is None:
                raise Unavailable("the process with the encoder is being started again")
            frame = Frame({"length": item.length}, [item.identifier, item.details, blob])
            answered = False
            try:
                async with asyncio.timeout(ITEM_S):
                    answer = await child.ask(frame, MAX_BYTES)
                answered = True
            except TimeoutError:
                raise Unavailable(f"the encoder did not end an item within {ITEM_S:g} s") from None
            except GONE as error:
                raise Unavailable(f"the process with the encoder ended: {error}") from None
            finally:
                if not answered:  # also a caller that left: the answer would be taken for the next one's
                    self._child = None
                    child.process.kill()
        if "refused" in answer.values:
            raise InvalidRequest("items", str(answer.values["refused"]))
        return Embeddings(str(answer.values["dtype"]), tuple(answer.values["shape"]), answer.parts[0])

    async def close(self) -> None:
        await self._tasks.close()
        if (child := self._child) is not None:
            await child.end()

    async def _start(self) -> Child:
        child = await Child.start(self._config, 0, "encode_worker.child")
        self._child, self.fingerprint = child, bytes.fromhex(child.ready["fingerprint"])
        self._started = child
        return child

    async def _keep_alive(self) -> None:
        """Start another process whenever one has ended."""
        while True:
            child = self._started
            await child.ended
            self._child = None
            log.warning("the process with the encoder ended with code %d", await child.end())
            while self._child is None:
                try:
                    await self._start()
                except StartError as error:
                    log.error("the process with the encoder did not start: %s", error)
                    await asyncio.sleep(RESTART_S)
