"""Start of the endpoint picker's port.

Imported only where there is one: Envoy's messages are a package of their own.
"""

from contextlib import AsyncExitStack
from dataclasses import dataclass

from cluster.errors import StartError
from cluster.network.rpc import MAX_MESSAGE_BYTES, Server
from cluster.network.tls import Credentials
from cluster.process.drain import Drain
from router.admission.arrivals import Arrivals
from router.admission.limits.tenant_limits import TenantLimits
from router.config import RouterConfig
from router.frontend.envoy.picker import Picker
from router.frontend.envoy.service import NAME, EndpointPickerService
from router.models.model_runtimes import ModelRuntimes
from router.request_path.observation import Observer
from router.security.api_keys import ApiKeys

GRACE_S = 0.5
"""Seconds for calls in flight when the server stops."""


@dataclass(frozen=True, slots=True)
class OpenPicker:
    """Endpoint picker that listens."""

    server: Server
    address: str


async def open_picker(
    config: RouterConfig,
    port: int,
    credentials: Credentials | None,
    models: ModelRuntimes,
    tenant_limits: TenantLimits,
    arrivals: Arrivals,
    observer: Observer,
    keys: ApiKeys,
    requests: Drain,
    parts: AsyncExitStack,
) -> OpenPicker:
    """Start listening; `parts` closes what was started.

    Raises StartError.
    """
    max_body_bytes = config.max_body_mib << 20
    if config.epp_tls and credentials is None:
        raise StartError("epp_tls", "needs tls_cert and tls_key, or tls_public_cert and tls_public_key")
    trust = credentials if config.epp_tls else None
    # Without a check of the gateway's own key: clients' keys are in the headers of their requests.
    server = Server(trust, (), config.max_connection_s, MAX_MESSAGE_BYTES + max_body_bytes, is_public=True)
    picker = Picker(config, models, tenant_limits, arrivals, observer, keys)
    EndpointPickerService(picker, requests, max_body_bytes).add_to(server.grpc)
    parts.push_async_callback(server.stop, GRACE_S)
    bound = await server.start(config.host, port, [NAME], "epp_port")
    return OpenPicker(server, f"{config.host}:{bound}")
