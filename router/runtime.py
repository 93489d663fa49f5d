"""Puts the router together."""

import asyncio
import logging
import secrets
from contextlib import AsyncExitStack

from cluster.discovery import Discovery, RouterEntry
from cluster.drain import Drain
from cluster.errors import StartError, TandemError
from cluster.redis_discovery import open_discovery
from cluster.rpc import Server
from engine.model_dir import ModelDir
from protos import membership_pb2_grpc as pb_grpc
from router.admission.redis_quota import RedisLedger
from router.config import RouterConfig
from router.dispatch import Dispatcher
from router.fleet import Fleet
from router.grammar_checker import GrammarChecker
from router.membership_service import MembershipService
from router.prompts import PromptEncoder
from router.service import NAME, InferenceService
from router.serving import Serving

log = logging.getLogger(__name__)

EVERYWHERE = ("0.0.0.0", "::", "[::]")
"""Hosts to listen on that are none to be reached by."""
END_S = 1.0
"""For what was told to end."""


class Router:
    """A started router."""

    def __init__(
        self,
        config: RouterConfig,
        server: Server,
        grammars: GrammarChecker,
        requests: Drain,
        address: str,
        discovery: Discovery,
        ledger: RedisLedger | None,
    ) -> None:
        self.address = address
        self._config = config
        self._server = server
        self._grammars = grammars
        self._requests = requests
        self._discovery = discovery
        self._ledger = ledger

    async def failed(self) -> TandemError:
        """A router has nothing that could fail by itself."""
        never: asyncio.Future[TandemError] = asyncio.get_running_loop().create_future()
        return await never

    async def told_to_stop(self) -> None:
        """Signals only."""
        await asyncio.get_running_loop().create_future()

    async def drain(self) -> None:
        """Take nothing more; finish what is under way for `drain_s`, and end the rest with an error that says so."""
        self._requests.begin()
        await self._server.announce_stop()
        await self._discovery.withdraw()
        if not await self._requests.idle(self._config.drain_s):
            log.warning("ending %d requests that took longer than %g s", self._requests.end_all(), self._config.drain_s)
            await self._requests.idle(END_S)

    async def stop(self) -> None:
        await self._discovery.withdraw()
        await self._discovery.close()
        if self._ledger is not None:
            await self._ledger.close()
        await self._server.stop(grace_s=0.5)
        await self._grammars.close()


async def start_router(config: RouterConfig) -> Router:
    """Read the model's config and tokenizer, serve, announce. Raises StartError."""
    model_dir = ModelDir.open(config.model)
    # Read here, so that a config that lacks them is refused now and not with the first request.
    log.info("%s: %d tokens, context %d", model_dir.name, model_dir.vocab_size, model_dir.max_context_tokens)
    encoder = PromptEncoder(model_dir)
    async with AsyncExitStack() as undo:
        discovery = await _open_discovery(config)
        undo.push_async_callback(discovery.close)
        incarnation = secrets.token_bytes(16)
        fleet = Fleet(config.id(), config.priors(), config.learn_rates, incarnation.hex()[:8])
        ledger = await _open_ledger(config, undo)
        dispatcher = Dispatcher(fleet, config, ledger)
        grammars = GrammarChecker(model_dir, config.grammar_limit_s)
        serving = Serving(config, model_dir, encoder, grammars, fleet, dispatcher)
        server, requests = Server(), Drain()
        InferenceService(serving, fleet, model_dir, encoder, requests).add_to(server.grpc)
        membership = MembershipService(
            fleet, model_dir, config.worker_silence_s, dispatcher.kick, incarnation, serving.links.departed
        )
        pb_grpc.add_MembershipServicer_to_server(membership, server.grpc)
        port = await server.start(config.host, config.port, [NAME, "tandem.internal.v1.Membership"])
        await server.mark_serving()
        undo.pop_all()
    discovery.announce(RouterEntry(config.id(), f"{config.advertise_host or config.host}:{port}", incarnation.hex()))
    return Router(config, server, grammars, requests, f"{config.host}:{port}", discovery, ledger)


async def _open_discovery(config: RouterConfig) -> Discovery:
    if config.redis_url and config.host in EVERYWHERE and not config.advertise_host:
        raise StartError("advertise_host", f"is needed with redis_url: nobody can reach {config.host!r}")
    discovery = open_discovery(config.redis_url, config.cluster_name)
    await discovery.start()
    return discovery


async def _open_ledger(config: RouterConfig, undo: AsyncExitStack) -> RedisLedger | None:
    """Quotas are counted for all routers together where there is a Redis."""
    if not config.redis_url:
        return None
    ledger = RedisLedger(config.redis_url, config.cluster_name)
    undo.push_async_callback(ledger.close)
    await ledger.start()
    return ledger
