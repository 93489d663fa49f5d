"""Commands that serve by stock servers: `vllm serve` as it is."""

from pathlib import Path
from typing import Annotated, Any

import typer

from cluster.config import parse_overrides, read_file
from cluster.errors import StartError
from tandem.cli.common import SERVE, SIZE, console, run

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


@app.command(rich_help_panel=SIZE)
def compare(
    urls: Annotated[list[str], typer.Argument(metavar="URL URL...", help="addresses with OpenAI's API")],
    trace: Annotated[
        Path | None, typer.Option(help="trace file, as `tandem bench` reads it; default: a load profile")
    ] = None,
    profile: Annotated[
        str, typer.Option(help="load profile: short-chat, long-context-qa, tool-calling or offline-batch")
    ] = "short-chat",
    model: Annotated[str, typer.Option(help="name of the model; default: the only one")] = "",
    rate: Annotated[float, typer.Option(help="requests per second; with a trace: factor on its request rate")] = 1.0,
    duration: Annotated[float, typer.Option(help="duration of each turn, in seconds")] = 60.0,
    warmup: Annotated[float, typer.Option(help="seconds at the beginning of each turn that are not counted")] = 0.0,
    rounds: Annotated[int, typer.Option(min=1, help="number of turns of each address")] = 3,
    timeout: Annotated[float, typer.Option(help="deadline of each request, in seconds")] = 600.0,
    api_key: Annotated[str, typer.Option(envvar="OPENAI_API_KEY", help="API key of all addresses")] = "",
) -> None:
    """Load several addresses in turns, and print latencies and cache hits side by side.

    For example a Service of `vllm serve`, and Tandem's router before the same servers. Each turn has its own prompts,
    so none finds what another one cached.
    """
    from tandem.loadgen.command import OfferedLoad
    from tandem.loadgen.comparison import run_comparison
    from tandem.loadgen.frontends import HttpFrontend
    from workloads.profiles import profile_named
    from workloads.request import check_above_0
    from workloads.traces.reading import Trace, Window

    check_above_0("timeout", timeout)
    if len(urls) < 2 or len(set(urls)) < len(urls):
        raise StartError("urls", "name at least two addresses, each once")
    load = OfferedLoad(
        profile=None if trace else profile_named(profile),
        trace=None if trace is None else Trace(trace, Window(rate=rate)),
        rate=rate,
        duration_s=duration,
        warmup_s=warmup,
    )
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    run(run_comparison(console, {url: HttpFrontend(url, model, timeout, headers) for url in urls}, load, rounds))


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
