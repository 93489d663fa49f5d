"""The router's HTTP port: the OpenAI API and the console, behind one check of keys.

Imported only where there is such a port: FastAPI takes a fifth of a router's start.
"""

from contextlib import AsyncExitStack

from prometheus_client import CollectorRegistry

from cluster.network.tls import Credentials
from cluster.process.drain import Drain
from router.admission.arrivals import Arrivals
from router.batches.service import Batches
from router.config import RouterConfig
from router.frontend.console.routes import add_console
from router.frontend.grpc_service import InferenceService
from router.frontend.http.server.cors import open_to_pages
from router.frontend.http.server.guard import guarded
from router.frontend.http.server.server import OpenAiServer
from router.frontend.http_app import make_app
from router.frontend.openai.responses.response_store import ResponseStore
from router.models.model_runtimes import ModelRuntimes
from router.request_path.queries import Queries
from router.request_path.request_handler import RequestHandler
from router.security.api_keys import ApiKeys


async def open_http(
    config: RouterConfig,
    port: int,
    credentials: Credentials | None,
    handler: RequestHandler,
    queries: Queries,
    models: ModelRuntimes,
    requests: Drain,
    keys: ApiKeys,
    inference: InferenceService,
    arrivals: Arrivals,
    parts: AsyncExitStack,
    registry: CollectorRegistry,
) -> OpenAiServer:
    """Start serving; `parts` closes what was started.

    Raises StartError.
    """
    http = OpenAiServer(config.host, port, credentials, config.max_connection_s, config.http_port_shared)
    app = make_app(handler, queries, models, requests, keys, config, arrivals, registry)
    add_console(app, keys, inference.status, queries.recent)
    batches: Batches | None = app.state.batches
    if batches is not None:
        parts.push_async_callback(batches.close)
        batches.runner.start()
    responses: ResponseStore = app.state.responses
    parts.push_async_callback(responses.close)
    parts.push_async_callback(http.close)
    await http.start(open_to_pages(guarded(app, keys), config.cors_origins))
    return http
