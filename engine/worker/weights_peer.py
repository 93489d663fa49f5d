"""The search for a live worker whose weights a new one may read, before the new one's engine starts.

A start never waits long for this: who does not answer in time is not asked again, and the disk is always there.
"""

import asyncio
import contextlib
import logging
import random
from collections.abc import Iterable
from contextlib import AsyncExitStack

import grpc

from cluster.discovery import Discovery
from cluster.rpc import channel
from cluster.tls import MemberIdentity
from engine.config import WorkerConfig
from engine.errors import ModelRefused
from engine.model.model_dir import ModelDir
from engine.weights.offer import WeightFile, WeightsOffer, may_replace
from engine.weights.page_cache import in_page_cache
from protos import membership_pb2 as pb
from protos import membership_pb2_grpc as pb_grpc

log = logging.getLogger(__name__)

LOOK_S = 1.0
"""Longest wait for routers, in seconds."""
OFFER_S = 3.0
"""Longest wait for one worker's offer, in seconds: its first one loads a transport's agent."""
MAX_ASKED = 3
"""Workers that are asked at most."""


def has_weights(config: WorkerConfig) -> bool:
    """Return whether the engine reads the files of a model directory itself."""
    return config.engine == "torch"


def lends_weights(config: WorkerConfig) -> bool:
    """Return whether the engine can lend its weight files, and read those of another."""
    return has_weights(config) and config.num_ranks == 1 and config.transport == "nixl"


class WeightsSource:
    """Source of a worker's weights; keeps a peer's offer open until it is closed."""

    def __init__(self) -> None:
        self.offer: WeightsOffer | None = None
        self.own = ""
        """Place of the worker's own files: disk, or page cache; empty for an engine without weights."""
        self._open = AsyncExitStack()

    async def find(
        self, config: WorkerConfig, model_dir: ModelDir, discovery: Discovery, trust: MemberIdentity | None
    ) -> None:
        """Look where the weights are; ask live workers where the settings want that.

        A directory without weights is left to the engine, which has more to say of a model that it refuses.
        """
        if not has_weights(config):
            return
        try:
            files = model_dir.weight_files()
        except ModelRefused:
            return
        cached = await asyncio.to_thread(in_page_cache, files)
        self.own = "page cache" if cached else "disk"
        # Packed weights are read layer by layer, see `engine/backends/torch/packed.py`.
        suited = lends_weights(config) and "quantization_config" not in model_dir.config
        if config.weights_from == "disk" or not suited or (cached and config.weights_from == "auto"):
            return
        wanted, known = [WeightFile.of(file) for file in files], model_dir.remembered_fingerprint()
        for address in await _addresses(config, model_dir, discovery, trust):
            if (offer := await self._ask(address, model_dir, trust)) is None:
                continue
            if may_replace(offer, wanted, known, trusted=config.weights_from == "peer"):
                self.offer = offer
                return
            log.info("no weights from %s: its files may differ from those of %s", offer.worker_id, model_dir.path)
            await self._open.aclose()

    async def close(self) -> None:
        """Give the peer's weights back."""
        await self._open.aclose()

    async def _ask(self, address: str, model_dir: ModelDir, trust: MemberIdentity | None) -> WeightsOffer | None:
        link = await self._open.enter_async_context(channel(address, trust))
        request = pb.WeightsRequest(config_fingerprint=model_dir.config_fingerprint())
        call = pb_grpc.WorkerStub(link).Weights(request)
        self._open.callback(call.cancel)
        try:
            async with asyncio.timeout(OFFER_S):
                reply = await call.read()
        except (grpc.aio.AioRpcError, TimeoutError) as error:
            why = error.details() if isinstance(error, grpc.aio.AioRpcError) else f"no answer within {OFFER_S:g} s"
            log.info("no weights from %s: %s", address, why)
            await self._open.aclose()
            return None
        assert isinstance(reply, pb.WeightsReply), "the stream ended without a message or an error"
        files = tuple(WeightFile(file.name, file.num_bytes, file.identity) for file in reply.files)
        return WeightsOffer(reply.worker_id, files, reply.fingerprint, reply.endpoint)


async def _addresses(
    config: WorkerConfig, model_dir: ModelDir, discovery: Discovery, trust: MemberIdentity | None
) -> list[str]:
    """Return addresses of live workers in the order to ask them: of a model of this name first, at random."""
    routers = set(config.routers)
    with contextlib.suppress(TimeoutError, StopAsyncIteration):
        async with asyncio.timeout(LOOK_S):
            routers |= await anext(discovery.listings())
    if not routers:
        return []
    asking = [asyncio.ensure_future(_loads(router, trust)) for router in routers]
    done, pending = await asyncio.wait(asking, timeout=LOOK_S, return_when=asyncio.ALL_COMPLETED)
    for each in pending:
        each.cancel()
    addresses: dict[str, bool] = {}
    for name, address in (pair for each in done for pair in each.result()):
        addresses[address] = addresses.get(address, False) or name == model_dir.name
    order = random.sample(sorted(addresses), len(addresses))
    return sorted(order, key=lambda address: not addresses[address])[:MAX_ASKED]


async def _loads(router: str, trust: MemberIdentity | None) -> Iterable[tuple[str, str]]:
    """Return model and address of a router's workers that have no other reason to be left alone."""
    async with channel(router, trust) as link:
        try:
            loads = await pb_grpc.MembershipStub(link).Loads(pb.LoadsRequest(), timeout=LOOK_S)
        except grpc.aio.AioRpcError as error:
            log.info("router %s names no workers: %s", router, error.details())
            return []
    return [
        (model.name, worker.address)
        for model in loads.models
        for worker in model.workers
        if worker.has_reported and not worker.draining
    ]
