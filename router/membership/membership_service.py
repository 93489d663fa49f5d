"""The Membership service: feeds the fleets of the models from the workers' streams."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from typing import Any

import grpc

from cluster.errors import ServiceError
from cluster.network.error_status import to_status
from cluster.process.tasks import Tasks
from protos import membership_pb2 as pb
from protos import membership_pb2_grpc as pb_grpc
from router.decode_client.decode_streams import Inbox
from router.membership.members import Members, hello_of, lose
from router.membership.status import load_status
from router.models.model_runtime import ModelRuntime
from router.models.model_runtimes import ModelRuntimes
from router.placement.fleet.introductions import peers_of
from router.placement.fleet.worker_records import WorkerRecord

log = logging.getLogger(__name__)


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
        self._members = Members(models)

    async def Join(
        self, request_iterator: AsyncIterator[pb.WorkerMessage], context: Any
    ) -> AsyncIterator[pb.RouterMessage]:
        member: tuple[ModelRuntime, WorkerRecord] | None = None
        inbox: Inbox | None = None
        tasks = Tasks()
        try:
            messages = aiter(request_iterator)
            hello = hello_of(await anext(messages, None))
            model = self._models.of_worker(hello)
            if not model.knows(hello.config_fingerprint):
                async with model.receiving:
                    if not model.knows(hello.config_fingerprint):
                        yield pb.RouterMessage(files_wanted=pb.FilesWanted())
                        await model.receive(hello, messages)
            member = model, worker = self._members.admit(hello)
            inbox = Inbox(self._silence_s)
            peers = peers_of(worker.hello, model.fleet.workers)
            welcome = pb.Welcome(
                router_id=self._router_id, incarnation=self._incarnation, peers=peers, stream_key=worker.stream_key
            )
            yield pb.RouterMessage(welcome=welcome)
            tasks.spawn(inbox.follow(messages))
            model.links.open(worker, inbox)
            while (message := await inbox.get()) is not None:
                for _ in self._members.absorb(model, worker, message):
                    await asyncio.sleep(0)  # let streams run
                if worker.next_cache_sequence is None and message.HasField("cache"):
                    yield pb.RouterMessage(resync=pb.Resync())
            if inbox.is_silent:
                log.warning("%s was silent for %g s: lost", worker.worker_id, self._silence_s)
                self._on_lost(model.name)
                lose(worker)
        except ServiceError as error:
            with suppress(grpc.aio.InternalError):  # a worker that leaves has cancelled the call, and reads no status
                await context.abort_with_status(to_status(error))
        finally:
            if inbox is not None:
                inbox.close()
            if member is not None:
                self._members.left(*member)
            await tasks.close()

    async def Members(self, request: pb.MembersRequest, context: Any) -> pb.MembersReply:
        workers = [worker for model in self._models for worker in model.fleet.workers if worker.load is not None]
        num_decode = sum(worker.decodes for worker in workers)
        return pb.MembersReply(prefill_workers=len(workers) - num_decode, decode_workers=num_decode)

    async def Loads(self, request: pb.LoadsRequest, context: Any) -> pb.LoadsReply:
        models = [load_status(model.name, model.fleet, model.dispatcher.admission) for model in self._models]
        return pb.LoadsReply(router_id=self._router_id, incarnation=self._incarnation, models=models)
