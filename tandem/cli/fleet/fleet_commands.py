"""Commands that serve by stock servers: `vllm serve` as it is."""

from pathlib import Path
from typing import Annotated, Any

import typer

from cluster.config import parse_overrides, read_file
from cluster.errors import StartError
from tandem.cli.common import SERVE

app = typer.Typer()

Fleet = Annotated[Path | None, typer.Option(metavar="FILE", help="YAML file with the fleet's servers: docs/fleet.md")]
Host = Annotated[str, typer.Option(help="address on which the router listens")]
Settings = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="setting of the router; may be repeated")
]


@app.command(rich_help_panel=SERVE)
def route(
    urls: Annotated[
        list[str] | None, typer.Argument(metavar="[URL]...", help="servers, such as http://10.0.0.5:8000")
    ] = None,
    fleet: Fleet = None,
    host: Host = "127.0.0.1",
    http_port: Annotated[int, typer.Option(min=0, max=65535, help="port of the OpenAI-compatible API")] = 8080,
    port: Annotated[int, typer.Option(min=0, max=65535, help="gRPC port, which `tandem status` asks")] = 50051,
    set_: Settings = None,
) -> None:
    """Route requests to `vllm serve` servers that run already, and serve until Ctrl-C.

    Nothing changes at the servers. Clients that call them directly go on beside the router.
    """
    listen = {"host": host, "http_port": http_port, "port": port}
    raise typer.Exit(run_router(urls or [], fleet, listen | parse_overrides(set_ or [])))


@app.command(rich_help_panel=SERVE)
def epp(
    fleet: Fleet = None,
    host: Host = "127.0.0.1",
    epp_port: Annotated[int, typer.Option("--port", min=0, max=65535, help="port that the gateway calls")] = 9002,
    set_: Settings = None,
) -> None:
    """Pick servers for a gateway (InferencePool of Kubernetes' Gateway API), and serve until Ctrl-C.

    Requests and answers stay between gateway and servers. `tandem status` asks at port 50051.
    """
    raise typer.Exit(run_router([], fleet, {"host": host, "epp_port": epp_port} | parse_overrides(set_ or [])))


def run_router(urls: list[str], fleet: Path | None, settings: dict[str, Any]) -> int:
    """Run a router over a fleet until it is told to stop; return its exit code. Raises StartError."""
    from cluster.logs import set_up
    from cluster.process.life import run_role
    from router.config import RouterConfig
    from router.runtime import start_router

    values = read_file(fleet)
    servers = [*values.get("servers", []), *({"url": url} for url in urls)]
    if not servers:
        raise StartError("fleet", "name the servers' URLs, or a file by --fleet")
    config = RouterConfig.parse({"log_level": "info", **settings, "fleet": values | {"servers": servers}})
    set_up("router", config.id(), config)
    return run_role(lambda: start_router(config))
