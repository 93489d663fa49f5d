"""The router's HTTP port: OpenAI's API and the console, behind one guard.

Imported only where there is such a port: FastAPI takes a fifth of a router's start.
"""

from cluster.drain import Drain
from cluster.tls import Credentials
from router.config import RouterConfig
from router.console.routes import add_console
from router.models.served_model import ServedModels
from router.openai.app import make_app
from router.openai.guard import guarded
from router.openai.server import OpenAiServer
from router.security.api_keys import ApiKeys
from router.service import InferenceService
from router.serving import Serving


async def open_http(
    config: RouterConfig,
    port: int,
    credentials: Credentials | None,
    serving: Serving,
    models: ServedModels,
    requests: Drain,
    keys: ApiKeys,
    inference: InferenceService,
) -> OpenAiServer:
    """Serving; to be closed. Raises StartError."""
    http = OpenAiServer(config.host, port, credentials, config.max_connection_s)
    app = make_app(serving, models, requests, keys, config)
    add_console(app, keys, inference.status, serving.recent)
    await http.start(guarded(app, keys))
    return http
