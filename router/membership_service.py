"""The Membership service: feeds the fleet from the workers' streams."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

from cluster.errors import AlreadyThere, Incompatible, InvalidRequest, ServiceError, to_status
from engine.model_dir import ModelDir
from protos import membership_pb2 as pb
from protos import membership_pb2_grpc as pb_grpc
from router.fleet import Fleet, Worker

log = logging.getLogger(__name__)

ALIVE_S = 1.0
"""A worker speaks four times as often at least."""


class MembershipService(pb_grpc.MembershipServicer):
    """One stream is one membership. `on_change` is called after everything that may let a request start, and
    `on_departure` with the address of a worker that left."""

    def __init__(
        self,
        fleet: Fleet,
        model_dir: ModelDir,
        silence_s: float,
        on_change: Callable[[], None],
        incarnation: bytes,
        on_departure: Callable[[str], None],
    ) -> None:
        self._fleet = fleet
        self._model = model_dir.name
        self._config_fingerprint = model_dir.config_fingerprint()
        self._silence_s = silence_s
        self._on_change = on_change
        self._incarnation = incarnation
        self._on_departure = on_departure
        self._heard_at: dict[Worker, float] = {}
        """Seconds of the monotonic clock, by those that are joined."""

    async def Join(
        self, request_iterator: AsyncIterator[pb.WorkerMessage], context: Any
    ) -> AsyncIterator[pb.RouterMessage]:
        worker: Worker | None = None
        try:
            first = await anext(request_iterator, None)
            worker = self._admit(first)
            yield pb.RouterMessage(welcome=pb.Welcome(router_id=self._fleet.router_id, incarnation=self._incarnation))
            while (message := await self._next(worker, request_iterator)) is not None:
                if not self._absorb(worker, message):
                    yield pb.RouterMessage(resync=pb.Resync())
        except ServiceError as error:
            await context.abort_with_status(to_status(error))
        finally:
            if worker is not None:
                self._left(worker)

    def _left(self, worker: Worker) -> None:
        log.info("%s left", worker.worker_id)
        self._heard_at.pop(worker, None)
        self._fleet.left(worker)
        if worker.hello.address not in [other.hello.address for other in self._fleet.workers]:
            self._on_departure(worker.hello.address)
        self._on_change()

    def _admit(self, first: pb.WorkerMessage | None) -> Worker:
        if first is None or not first.HasField("hello"):
            raise InvalidRequest("hello", "must be the first message")
        hello = first.hello
        _check(hello)
        if hello.config_fingerprint != self._config_fingerprint:
            raise Incompatible(
                f"worker {hello.worker_id} serves {hello.model!r}, whose config or tokenizer differs from this "
                f"router's {self._model!r}",
                "model",
            )
        if (old := self._fleet.worker(hello.worker_id)) is not None:
            self._replace(old, hello)
        log.info("%s joined from %s", hello.worker_id, hello.address)
        worker = self._fleet.joined(hello)
        self._heard_at[worker] = time.monotonic()
        return worker

    def _replace(self, old: Worker, hello: pb.Hello) -> None:
        """A worker's stream may break unnoticed, and its successor come before that is seen; but one that speaks is
        there. Raises AlreadyThere."""
        if old.hello.incarnation == hello.incarnation:
            return
        silent_s = time.monotonic() - self._heard_at[old]
        if silent_s < ALIVE_S:
            raise AlreadyThere(
                f"a worker {hello.worker_id!r} at {old.hello.address} is there, and not the one at {hello.address} "
                "that would join by that name",
                "worker_id",
            )
        log.warning("%s has been silent for %.1f s and is replaced by another process", old.worker_id, silent_s)
        _lose(old)

    async def _next(self, worker: Worker, messages: AsyncIterator[pb.WorkerMessage]) -> pb.WorkerMessage | None:
        """None when the stream ended, or when the engine behind it fell silent."""
        try:
            async with asyncio.timeout(self._silence_s):
                return await anext(messages, None)
        except TimeoutError:
            log.warning("%s was silent for %g s: lost", worker.worker_id, self._silence_s)
            _lose(worker)
            return None

    def _absorb(self, worker: Worker, message: pb.WorkerMessage) -> bool:
        if self._fleet.worker(worker.worker_id) is not worker:
            raise AlreadyThere(f"another stream of {worker.worker_id!r} has taken the place of this one", "worker_id")
        self._heard_at[worker] = time.monotonic()
        in_step = True
        match message.WhichOneof("message"):
            case "load":
                self._fleet.reported(worker, message.load)
            case "cache":
                in_step = self._fleet.cache_changed(worker, message.cache)
            case _:
                raise InvalidRequest("hello", "came twice")
        self._on_change()
        return in_step


def _lose(worker: Worker) -> None:
    """Its calls are placed anew."""
    worker.lost = True
    for cancel in tuple(worker.on_lost):
        cancel()


def _check(hello: pb.Hello) -> None:
    """Raises InvalidRequest for what placement could not work with: it would fail every client's request."""
    for field in ("worker_id", "address", "incarnation", "model_fingerprint"):
        if not getattr(hello, field):
            raise InvalidRequest(field, "is empty")
    for field in ("block_tokens", "num_blocks", "block_bytes"):
        if getattr(hello, field) < 1:
            raise InvalidRequest(field, "must be at least 1")
    if hello.role not in (pb.ROLE_PREFILL, pb.ROLE_DECODE):
        raise InvalidRequest("role", f"{hello.role} is none of this router's")
