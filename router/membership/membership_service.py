"""The Membership service: feeds the fleets of the models from the workers' streams."""

import asyncio
import logging
import secrets
import time
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import suppress
from typing import Any

import grpc

from cluster.errors import AlreadyExists, Incompatible, InvalidRequest, ServiceError
from cluster.network.error_status import to_status
from cluster.network.rpc import PROTOCOL
from kvcache.block_keys import ADAPTER_BYTES
from protos import membership_pb2 as pb
from protos import membership_pb2_grpc as pb_grpc
from router.decode_client.inbox import Inbox
from router.membership.status import load_status
from router.models.config import AUTO
from router.models.model_runtime import ModelRuntime
from router.models.model_runtimes import ModelRuntimes
from router.placement.fleet.introductions import peers_of
from router.placement.fleet.worker_records import WorkerRecord

log = logging.getLogger(__name__)

ALIVE_S = 1.0
"""Seconds since its last message for which a worker counts as alive; workers send four times as often."""


class MembershipService(pb_grpc.MembershipServicer):
    """gRPC service; one stream is one membership in the model whose config and tokenizer the worker has."""

    def __init__(
        self,
        models: ModelRuntimes,
        router_id: str,
        incarnation: bytes,
        silence_s: float,
        on_lost: Callable[[str], object] = lambda model: None,
    ) -> None:
        """Create the service; `on_lost` is called with a worker's model when the worker fell silent."""
        self._on_lost = on_lost
        self._models = models
        self._router_id = router_id
        self._incarnation = incarnation
        self._silence_s = silence_s
        self._last_report_at: dict[WorkerRecord, float] = {}
        """Time of the last message in seconds of the monotonic clock, by joined worker."""

    async def Join(
        self, request_iterator: AsyncIterator[pb.WorkerMessage], context: Any
    ) -> AsyncIterator[pb.RouterMessage]:
        member: tuple[ModelRuntime, WorkerRecord] | None = None
        inbox: Inbox | None = None
        following: asyncio.Future[None] | None = None
        try:
            messages = aiter(request_iterator)
            hello = _hello_of(await anext(messages, None))
            model = self._models.of_worker(hello)
            if not model.knows(hello.config_fingerprint):
                async with model.receiving:
                    if not model.knows(hello.config_fingerprint):
                        yield pb.RouterMessage(files_wanted=pb.FilesWanted())
                        await model.receive(hello, messages)
            member = model, worker = self._admit(hello)
            inbox = Inbox(self._silence_s)
            peers = peers_of(worker.hello, model.fleet.workers)
            welcome = pb.Welcome(
                router_id=self._router_id, incarnation=self._incarnation, peers=peers, stream_key=worker.stream_key
            )
            yield pb.RouterMessage(welcome=welcome)
            following = asyncio.ensure_future(inbox.follow(messages))
            model.links.open(worker, inbox)
            while (message := await inbox.get()) is not None:
                if not await self._absorb(model, worker, message):
                    yield pb.RouterMessage(resync=pb.Resync())
            if inbox.is_silent:
                log.warning("%s was silent for %g s: lost", worker.worker_id, self._silence_s)
                self._on_lost(model.name)
                _lose(worker)
        except ServiceError as error:
            with suppress(grpc.aio.InternalError):  # a worker that leaves has cancelled the call, and reads no status
                await context.abort_with_status(to_status(error))
        finally:
            if following is not None:
                following.cancel()
            if inbox is not None:
                inbox.close()
            if member is not None:
                self._left(*member)

    async def Members(self, request: pb.MembersRequest, context: Any) -> pb.MembersReply:
        workers = [worker for model in self._models for worker in model.fleet.workers if worker.load is not None]
        num_decode = sum(worker.decodes for worker in workers)
        return pb.MembersReply(prefill_workers=len(workers) - num_decode, decode_workers=num_decode)

    async def Loads(self, request: pb.LoadsRequest, context: Any) -> pb.LoadsReply:
        models = [load_status(model.name, model.fleet, model.dispatcher.admission) for model in self._models]
        return pb.LoadsReply(router_id=self._router_id, incarnation=self._incarnation, models=models)

    def _left(self, model: ModelRuntime, worker: WorkerRecord) -> None:
        log.info("%s left", worker.worker_id)
        self._last_report_at.pop(worker, None)
        model.fleet.left(worker)
        model.links.let_go()
        model.dispatcher.kick()

    def _admit(self, hello: pb.Hello) -> tuple[ModelRuntime, WorkerRecord]:
        model = self._models.of_worker(hello)
        _check_adapters(hello, model, self._models)
        for other in self._models:  # an id means one worker, whatever it serves
            if (old := other.fleet.worker(hello.worker_id)) is not None:
                self._replace(old, hello)
                if other is not model:
                    other.fleet.left(old)
                    other.dispatcher.kick()
        revision = hello.revision.hex() or "unknown"
        log.info("%s joined from %s for %s, revision %s", hello.worker_id, hello.address, model.name, revision)
        if warning := _strangers(hello, model.fleet.workers):
            log.warning("%s", warning)
        worker = model.fleet.joined(hello)
        worker.stream_key = secrets.token_bytes(16)
        self._last_report_at[worker] = time.monotonic()
        return model, worker

    def _replace(self, old: WorkerRecord, hello: pb.Hello) -> None:
        """Replace a worker of the same id.

        Raises AlreadyExists when the old one is still sending.

        A worker's stream may break unnoticed, and its successor arrive before that is seen.
        """
        if old.hello.incarnation == hello.incarnation:
            return
        silent_s = time.monotonic() - self._last_report_at[old]
        if silent_s < ALIVE_S:
            raise AlreadyExists(
                f"{hello.worker_id!r} is in use by the worker at {old.hello.address}: "
                f"give the worker at {hello.address} another worker_id",
                "worker_id",
            )
        log.warning("%s has been silent for %.1f s and is replaced by another process", old.worker_id, silent_s)
        _lose(old)

    async def _absorb(self, model: ModelRuntime, worker: WorkerRecord, message: pb.WorkerMessage) -> bool:
        if model.fleet.worker(worker.worker_id) is not worker:
            raise AlreadyExists(f"another stream of {worker.worker_id!r} has replaced this one", "worker_id")
        self._last_report_at[worker] = time.monotonic()
        if message.HasField("hello"):
            raise InvalidRequest("hello", "was sent twice")
        if not (message.HasField("cache") or message.HasField("load")):
            raise InvalidRequest("load", "a worker's message needs cache or load, and has neither")
        in_step = True
        if message.HasField("cache"):
            for _ in model.fleet.change_cache(worker, message.cache):
                await asyncio.sleep(0)  # let streams run
            in_step = worker.next_cache_sequence is not None
        if message.HasField("load"):
            model.fleet.reported(worker, message.load)
            model.on_worker_report()
        model.dispatcher.kick()
        return in_step


def _lose(worker: WorkerRecord) -> None:
    """Mark a worker as lost; its requests are placed again."""
    worker.lost = True
    for cancel in tuple(worker.on_lost):
        cancel()


def _strangers(hello: pb.Hello, workers: Iterable[WorkerRecord]) -> str:
    """Return a warning about a worker that can exchange blocks with none of the others of its revision.

    Empty if it can, or is the only one.
    """
    others = [
        worker.hello
        for worker in workers
        if worker.worker_id != hello.worker_id and worker.hello.revision == hello.revision
    ]
    if not others or any(other.model_fingerprint == hello.model_fingerprint for other in others):
        return ""
    other = others[0]
    here, there = (f"{each.block_tokens} tokens in {each.block_bytes} bytes" for each in (hello, other))
    differs = f"its blocks are {here}, not {there}" if here != there else "its weights or dtypes differ"
    return f"{hello.worker_id} exchanges no KV with {other.worker_id}, nor with any other of {hello.model}: {differs}"


def _hello_of(first: pb.WorkerMessage | None) -> pb.Hello:
    """Return the checked Hello of a call's first message.

    Raises InvalidRequest or Incompatible.
    """
    if first is None or not first.HasField("hello"):
        raise InvalidRequest("hello", "must be the first message")
    _check(first.hello)
    return first.hello


def _check_adapters(hello: pb.Hello, model: ModelRuntime, models: Iterable[ModelRuntime]) -> None:
    """Check that the names of a worker's LoRA adapters mean nothing else.

    Raises InvalidRequest.
    """
    for adapter in hello.adapters:
        if not adapter.name or len(adapter.fingerprint) != ADAPTER_BYTES:
            raise InvalidRequest(
                "adapters", f"{adapter.name!r}: an adapter needs a name and a fingerprint of {ADAPTER_BYTES} bytes"
            )
        for other in models:
            if adapter.name == other.name:
                raise InvalidRequest("adapters", f"{adapter.name!r} is the name of a served model")
            if other is not model and adapter.name in other.fleet.adapters:
                raise InvalidRequest("adapters", f"{adapter.name!r} is an adapter of {other.name!r}")
        if adapter.name == AUTO:
            raise InvalidRequest("adapters", f"{AUTO!r} is reserved: clients send it to have a model chosen")


def _check(hello: pb.Hello) -> None:
    """Check a Hello.

    Raises Incompatible for another protocol version and a worker without a stream_port, and InvalidRequest for values
    that placement cannot use and that would fail every request.
    """
    if hello.protocol != PROTOCOL:
        worker = f"worker {hello.worker_id} speaks version {hello.protocol} of the internal protocol"
        raise Incompatible(f"{worker}, this router version {PROTOCOL}", "protocol")
    for field in ("worker_id", "address", "incarnation", "model_fingerprint"):
        if not getattr(hello, field):
            raise InvalidRequest(field, "is empty")
    if not hello.stream_address:  # a worker of an earlier version may be without
        raise Incompatible(
            f"is null at worker {hello.worker_id}: this router reaches workers there only", "stream_port"
        )
    for field in ("block_tokens", "num_blocks", "block_bytes"):
        if getattr(hello, field) < 1:
            raise InvalidRequest(field, "must be at least 1")
    if hello.role not in (pb.ROLE_PREFILL, pb.ROLE_DECODE):
        raise InvalidRequest("role", f"must be ROLE_PREFILL or ROLE_DECODE, not {hello.role}")
