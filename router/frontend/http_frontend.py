"""The router's HTTP port: the OpenAI API and the console, behind one check of keys.

Imported only where there is such a port: FastAPI takes a fifth of a router's start.
"""

from cluster.drain import Drain
from cluster.tls import Credentials
from router.admission.arrivals import Arrivals
from router.config import RouterConfig
from router.frontend.console.routes import add_console
from router.frontend.grpc_service import InferenceService
from router.frontend.http.guard import guarded
from router.frontend.http.server import OpenAiServer
from router.frontend.http_app import make_app
from router.models.model_runtime import ModelRuntimes
from router.request_path.request_handler import RequestHandler
from router.security.api_keys import ApiKeys


async def open_http(
    config: RouterConfig,
    port: int,
    credentials: Credentials | None,
    handler: RequestHandler,
    models: ModelRuntimes,
    requests: Drain,
    keys: ApiKeys,
    inference: InferenceService,
    arrivals: Arrivals,
) -> OpenAiServer:
    """Start serving; the caller closes the server.

    Raises StartError.
    """
    http = OpenAiServer(config.host, port, credentials, config.max_connection_s)
    app = make_app(handler, models, requests, keys, config, arrivals)
    add_console(app, keys, inference.status, handler.recent)
    await http.start(guarded(app, keys))
    return http
