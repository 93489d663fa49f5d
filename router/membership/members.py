"""Members of a router: workers that joined the fleets of their models, whatever brings their messages."""

import logging
import secrets
import time
from collections.abc import Callable, Iterable, Iterator

from cluster.errors import AlreadyExists, Incompatible, InvalidRequest
from cluster.network.rpc import PROTOCOL
from kvcache.block_keys import ADAPTER_BYTES
from protos import membership_pb2 as pb
from router.models.config import AUTO
from router.models.model_runtime import ModelRuntime
from router.models.model_runtimes import ModelRuntimes
from router.placement.fleet.worker_records import WorkerRecord

log = logging.getLogger(__name__)

ALIVE_S = 1.0
"""Seconds since its last message for which a worker counts as alive; workers send four times as often."""


class Members:
    """Members of one router."""

    def __init__(self, models: ModelRuntimes, clock: Callable[[], float] = time.monotonic) -> None:
        self._models = models
        self._clock = clock
        self._last_report_at: dict[WorkerRecord, float] = {}
        """Time of the last message, by joined worker."""

    def left(self, model: ModelRuntime, worker: WorkerRecord) -> None:
        """Process that a member left."""
        log.info("%s left", worker.worker_id)
        self._last_report_at.pop(worker, None)
        model.fleet.left(worker)
        model.links.let_go()
        model.dispatcher.kick()

    def admit(self, hello: pb.Hello) -> tuple[ModelRuntime, WorkerRecord]:
        """Let a worker join the model that it serves.

        Raises ServiceError.
        """
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
        self._last_report_at[worker] = self._clock()
        return model, worker

    def _replace(self, old: WorkerRecord, hello: pb.Hello) -> None:
        """Replace a worker of the same id.

        Raises AlreadyExists when the old one is still sending.

        A worker's stream may break unnoticed, and its successor arrive before that is seen.
        """
        if old.hello.incarnation == hello.incarnation:
            return
        silent_s = self._clock() - self._last_report_at[old]
        if silent_s < ALIVE_S:
            raise AlreadyExists(
                f"{hello.worker_id!r} is in use by the worker at {old.hello.address}: "
                f"give the worker at {hello.address} another worker_id",
                "worker_id",
            )
        log.warning("%s has been silent for %.1f s and is replaced by another process", old.worker_id, silent_s)
        lose(old)

    def absorb(self, model: ModelRuntime, worker: WorkerRecord, message: pb.WorkerMessage) -> Iterator[None]:
        """Process a member's message; other work may run at each yield.

        Events were lost if the worker's `next_cache_sequence` is None afterwards. Raises ServiceError.
        """
        if model.fleet.worker(worker.worker_id) is not worker:
            raise AlreadyExists(f"another stream of {worker.worker_id!r} has replaced this one", "worker_id")
        self._last_report_at[worker] = self._clock()
        has_cache, has_load = message.HasField("cache"), message.HasField("load")
        if message.HasField("hello"):
            raise InvalidRequest("hello", "was sent twice")
        if not (has_cache or has_load):
            raise InvalidRequest("load", "a worker's message needs cache or load, and has neither")
        if has_cache:
            yield from model.fleet.change_cache(worker, message.cache)
        if has_load:
            model.fleet.reported(worker, message.load)
            model.on_worker_report()
        model.dispatcher.kick()


def lose(worker: WorkerRecord) -> None:
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


def hello_of(first: pb.WorkerMessage | None) -> pb.Hello:
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
