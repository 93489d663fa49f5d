"""Parts common to commands: the console, options of the router to call, and running coroutines.

Running of a cluster on Ray, for several commands.
"""

import asyncio
import functools
import inspect
import os
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer
from rich.console import Console

from cluster.errors import StartError, Unavailable
from cluster.install import needing
from tandem.progress import ProgressSteps

if TYPE_CHECKING:
    from tandem.cluster_file import Cluster
    from tandem.ray.driver import Work


console = Console(highlight=False)

SERVE, USE, INSPECT, SIZE = "Serve", "Use", "Inspect", "Size"
"""Groups of commands in `tandem --help`."""
DEFAULT_ADDRESS = "127.0.0.1:50051"
NOBODY_THERE = "failed to connect to all addresses"
"""Beginning of gRPC's message when no server answers."""


def _ascii(param: typer.CallbackParam, value: str) -> str:
    """Check a value for a call's metadata.

    Raises StartError without the value, which may be a secret.
    """
    if not (value.isascii() and value.isprintable()):
        raise StartError(f"{param.opts[0]} (or {param.envvar})", "must be printable ASCII")
    return value


def out_file(*names: str, help: str, metavar: str = "FILE") -> Any:  # noqa: A002 # typer's word
    """Return an option for an output file, checked before the work and not after it."""
    return typer.Option(*names, metavar=metavar, help=help, callback=_writable)


def model_option(help: str) -> Any:  # noqa: A002 # typer's word
    """Return an option for a model's directory or repository, or the demo model's name."""
    return typer.Option(metavar="DIR|ORG/NAME[@REVISION]|storyteller", help=help, parser=_model)


def _model(text: str) -> Path:
    from engine.model.hub import model_path
    from tandem.storyteller import NAME, STORYTELLER

    return STORYTELLER if text == NAME and not Path(text).exists() else Path(model_path(text))


def _writable(param: typer.CallbackParam, value: Path | None) -> Path | None:
    """Check that a file can be written.

    Raises StartError.
    """
    if value is None:
        return None
    if reason := _in_the_way(value):
        raise StartError(param.opts[0], f"cannot write {value}: {reason}")
    return value


def _in_the_way(path: Path) -> str:
    """Return why a path cannot be written; empty if it can."""
    try:
        if path.is_dir():
            return "it is a directory"
        if not path.parent.is_dir():
            return f"there is no directory {path.parent}"
        return "" if os.access(path if path.exists() else path.parent, os.W_OK) else "permission denied"
    except OSError as error:  # a folder without access, a name that is too long
        return error.strerror or str(error)


Address = Annotated[
    str,
    typer.Option(
        *("--address", "-a"),
        envvar="TANDEM_ADDRESS",
        help="host:port of a router; several: a,b",
        callback=_ascii,
    ),
]
ACCESS = "Access"
ApiKey = Annotated[
    str,
    typer.Option(
        envvar="TANDEM_API_KEY",
        callback=_ascii,
        help="API key, where the cluster needs one; prefer the variable, since others can read a command line",
        rich_help_panel=ACCESS,
    ),
]
TlsCa = Annotated[
    Path | None,
    typer.Option(envvar="TANDEM_TLS_CA", help="use TLS, and trust this CA (PEM)", rich_help_panel=ACCESS),
]
TlsCert = Annotated[
    Path | None,
    typer.Option(
        envvar="TANDEM_TLS_CERT",
        help="certificate of this client, where the cluster needs one (PEM)",
        rich_help_panel=ACCESS,
    ),
]
TlsKey = Annotated[
    Path | None, typer.Option(envvar="TANDEM_TLS_KEY", help="key of --tls-cert (PEM)", rich_help_panel=ACCESS)
]
Tls = Annotated[
    bool,
    typer.Option("--tls", envvar="TANDEM_TLS", help="use TLS, and trust well-known CAs", rich_help_panel=ACCESS),
]

OfModel = "Which model"
Model = Annotated[
    str, typer.Option(help="name of a served model, or auto; default: the router's choice", rich_help_panel=OfModel)
]


def asking(command: Callable[..., None]) -> Callable[..., None]:
    """Add the options of the router to call; the command gets them as its first parameter, a Target."""

    @functools.wraps(command)
    def asked(
        *,
        address: str,
        api_key: str,
        tls: bool,
        tls_ca: Path | None,
        tls_cert: Path | None,
        tls_key: Path | None,
        **rest: Any,
    ) -> None:
        from cluster.network.tls import ClientIdentity
        from tandem.client import Target

        visitor = ClientIdentity(tls_ca, tls_cert, tls_key) if tls or tls_ca or tls_cert or tls_key else None
        try:
            command(Target(address, api_key, visitor), **rest)
        except Unavailable as error:
            if not str(error).startswith(NOBODY_THERE):
                raise
            why = str(error).rpartition(": ")[2]
            where = "`tandem demo` or `tandem up` starts one here; --address or TANDEM_ADDRESS names another"
            if "refused" not in why:  # a server is there
                where += "; does it have TLS?" if visitor else "; if it has TLS, --tls or --tls-ca is needed"
            raise Unavailable(f"no router answers at {address}: {why}. {where}") from error

    own = list(inspect.signature(command).parameters.values())[1:]
    both = [*own, *inspect.signature(_access).parameters.values()]
    asked.__signature__ = inspect.Signature(both)  # type: ignore[attr-defined]  # what typer reads
    asked.__annotations__ = {parameter.name: parameter.annotation for parameter in both}
    return asked


def _access(
    address: Address = DEFAULT_ADDRESS,
    api_key: ApiKey = "",
    tls: Tls = False,
    tls_ca: TlsCa = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
) -> None:
    """Declare the options; only the signature is used."""


Result = TypeVar("Result")
LoopFactory = Callable[[], asyncio.AbstractEventLoop]


def run(work: Coroutine[Any, Any, Result], loop: LoopFactory | None = None) -> Result:
    """Run a coroutine to its end, or until Ctrl-C; return its result."""
    try:
        with asyncio.Runner(loop_factory=loop) as runner:
            return runner.run(work)
    except KeyboardInterrupt:
        raise typer.Exit(130) from None


def run_cluster(file: Path, work: "Work") -> None:
    """Run the cluster of a file, on ports that the system chooses, until `work` is done."""
    from tandem.cluster_file import read_cluster

    cluster = read_cluster(file, None, 1, 1)
    named = {"cluster_name": f"batch-{os.getpid()}"} | cluster.settings.router  # beside a cluster that `tandem up` runs
    serve_cluster(cluster, {"port": 0, "http_port": None, "cluster_name": named["cluster_name"]}, {}, work=work)


def serve_cluster(
    cluster: "Cluster",
    router: dict[str, Any],
    worker: dict[str, Any],
    routers: int = 1,
    autoscale: bool = False,
    work: "Work | None" = None,
    verbose: bool = False,
) -> None:
    """Serve until Ctrl-C, `tandem down`, or the end of `work`; `router` and `worker` override the file's settings."""
    from engine.host.cores import available_cores
    from kvtransfer.hardware.topology import read_host

    for each in cluster.models:
        console.print(f"tandem: {each.known_as}, {each.prefill} prefill + {each.decode} decode")
    cluster.check()  # before Ray is started in vain
    worker = cluster.default_engine(worker, len(read_host().gpus)) | worker
    # An engine that is told its cores keeps them for good, but workers come and go here.
    topology = cluster.plan(
        router, worker, available_cores(), routers, finds_cores=lambda config: config.finds_own_cores
    )
    with ProgressSteps(console, "tandem: ") as steps:
        steps("looking for a Ray cluster")
        with needing("ray"):
            from tandem.ray.driver import serve  # importing Ray takes a second: print something first
            from tandem.ray.pool_executor import planner_config
            from tandem.ray.settings import RaySettings
        planner = planner_config(cluster.settings.planner, topology.router) if autoscale else None
        settings = RaySettings.parse(cluster.settings.ray)
        settings.check(autoscale)
        run(serve(topology, steps, settings, planner, work, verbose))
