"""Puts the router together."""

import asyncio
import logging

from cluster.errors import TandemError
from cluster.rpc import Server
from engine.model_dir import ModelDir
from protos import membership_pb2_grpc as pb_grpc
from router.config import RouterConfig
from router.dispatch import Dispatcher
from router.fleet import Fleet
from router.grammar_checker import GrammarChecker
from router.membership_service import MembershipService
from router.prompts import PromptEncoder
from router.service import NAME, InferenceService
from router.serving import Serving

log = logging.getLogger(__name__)


class Router:
    """A started router."""

    def __init__(self, server: Server, grammars: GrammarChecker, address: str) -> None:
        self.address = address
        self._server = server
        self._grammars = grammars

    async def failed(self) -> TandemError:
        """A router has nothing that could fail by itself."""
        never: asyncio.Future[TandemError] = asyncio.get_running_loop().create_future()
        return await never

    async def stop(self) -> None:
        await self._server.stop(grace_s=0.5)
        await self._grammars.close()


async def start_router(config: RouterConfig) -> Router:
    """Read the model's config and tokenizer, serve. Raises StartError."""
    model_dir = ModelDir.open(config.model)
    # Read here, so that a config that lacks them is refused now and not with the first request.
    log.info("%s: %d tokens, context %d", model_dir.name, model_dir.vocab_size, model_dir.max_context_tokens)
    encoder = PromptEncoder(model_dir)
    fleet = Fleet(config.id(), config.priors(), config.learn_rates)
    dispatcher = Dispatcher(fleet, config)
    grammars = GrammarChecker(model_dir, config.grammar_limit_s)
    serving = Serving(config, model_dir, encoder, grammars, fleet, dispatcher)
    server = Server()
    InferenceService(serving, fleet, model_dir, encoder).add_to(server.grpc)
    membership = MembershipService(fleet, model_dir, config.worker_silence_s, dispatcher.kick)
    pb_grpc.add_MembershipServicer_to_server(membership, server.grpc)
    port = await server.start(config.host, config.port, [NAME, "tandem.internal.v1.Membership"])
    await server.mark_serving()
    return Router(server, grammars, f"{config.host}:{port}")
