"""Commands that start a cluster, and change a running one."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cluster.config import parse_overrides
from cluster.errors import InvalidRequest, StartError
from cluster.install import check_installed
from tandem.cli.common import ACCESS, DEFAULT_ADDRESS, INSPECT, SERVE, asking, console, model_option, run, serve_cluster

if TYPE_CHECKING:
    from tandem.client import Target

app = typer.Typer()
CLUSTER_NAME = "tandem"
Name = Annotated[str, typer.Option("--name", help="name of the cluster: the setting `cluster_name`")]


def drill_option(help: str, *names: str, metavar: str | None = None) -> Any:  # noqa: A002 # typer's word
    """Return an option of `tandem fault` for drills."""
    return typer.Option(*names, metavar=metavar, help=help, rich_help_panel="Drill")


def access_option(help: str) -> Any:  # noqa: A002 # typer's word
    """Return an option for a member's certificate."""
    return typer.Option(help=help, rich_help_panel=ACCESS)


@app.command(rich_help_panel=SERVE)
def up(
    model: Annotated[Path | None, model_option("decoder-only model to serve")] = None,
    prefill: Annotated[int, typer.Option(help="number of prefill workers")] = 1,
    decode: Annotated[int, typer.Option(help="number of decode workers")] = 1,
    routers: Annotated[int, typer.Option(help="number of routers; any router serves any request")] = 1,
    host: Annotated[str | None, typer.Option(help="address on which routers listen; default: 127.0.0.1")] = None,
    port: Annotated[
        int | None,
        typer.Option(
            min=0,
            max=65535,
            help="gRPC port of the first router; other routers take the next ones; 0 chooses; default: 50051",
        ),
    ] = None,
    http_port: Annotated[
        int | None, typer.Option(help="port of the OpenAI-compatible API of the first router; default: 8000")
    ] = None,
    no_http: Annotated[bool, typer.Option("--no-http", help="serve gRPC only")] = False,
    engine: Annotated[
        str | None,
        typer.Option(
            help="engine of every worker: torch, vllm, sim or a plug-in; default: vllm where there is a GPU, else torch"
        ),
    ] = None,
    worker: Annotated[list[str] | None, typer.Option(metavar="KEY=VALUE", help="setting of every worker")] = None,
    router: Annotated[list[str] | None, typer.Option(metavar="KEY=VALUE", help="setting of every router")] = None,
    config: Annotated[
        Path | None, typer.Option(help="YAML file with `worker:` and `router:` mappings, and a list `models:`")
    ] = None,
    autoscale: Annotated[
        bool,
        typer.Option(
            "--autoscale", help="let a planner change the number of workers; settings: `planner:` in the --config file"
        ),
    ] = False,
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="print the logs of Ray and of all processes, too")
    ] = False,
) -> None:
    """Start a router and workers as Ray actors, and serve until Ctrl-C.

    Uses the Ray cluster it finds, or starts one. As a Ray job: `ray job submit --working-dir . -- tandem up ...`.
    """
    from tandem.cluster_file import read_cluster

    cluster = read_cluster(config, model, prefill, decode)
    listen = {key: value for key, value in (("host", host), ("port", port)) if value is not None}
    settings = listen | cluster.http_settings(http_port, no_http) | parse_overrides(router or [])
    settings, no_files = cluster.with_files_folder(settings)
    if no_files:
        console.print(
            f"tandem: /v1/files and /v1/batches are off: their folder {no_files}", markup=False, soft_wrap=True
        )
    chosen = {"engine": engine} if engine is not None else {}
    serve_cluster(cluster, settings, chosen | parse_overrides(worker or []), routers, autoscale, verbose=verbose)


@app.command(rich_help_panel=SERVE)
def preprocessor(
    config: Annotated[Path | None, typer.Option(help="YAML file with settings; - reads standard input")] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="setting that overrides the file; may be repeated"),
    ] = None,
) -> None:
    """Start a preprocessor, which makes pictures, sounds and videos ready for models, and serve until Ctrl-C."""
    from cluster.config import read_file
    from preprocessor.config import PreprocessorConfig
    from preprocessor.program import run_preprocessor

    code = run_preprocessor(PreprocessorConfig.parse(read_file(config) | parse_overrides(set_ or [])))
    raise typer.Exit(code)


@app.command(rich_help_panel=SERVE)
def encoder(
    config: Annotated[Path | None, typer.Option(help="YAML file with settings; - reads standard input")] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="setting that overrides the file; may be repeated"),
    ] = None,
) -> None:
    """Start an encode worker, which computes embeddings of pictures for a model's workers, and serve until Ctrl-C."""
    from cluster.config import read_file
    from encode_worker.config import EncoderConfig
    from encode_worker.program import run_encode_worker

    raise typer.Exit(run_encode_worker(EncoderConfig.parse(read_file(config) | parse_overrides(set_ or []))))


@app.command(rich_help_panel=SERVE)
def scale(
    counts: Annotated[
        list[str], typer.Argument(metavar="ROLE=N", help="number of workers of a role, such as decode=3")
    ],
    model: Annotated[str, typer.Option(help="model whose workers to scale, where the cluster serves several")] = "",
    name: Name = CLUSTER_NAME,
) -> None:
    """Change the number of workers of a cluster started by `tandem up` on this Ray cluster; no stream is lost."""
    from tandem.ray.control import order

    wanted: dict[str, int] = {}
    for text in counts:
        role, _, count = text.partition("=")
        if not count.isdecimal():
            raise StartError("scale", f"{text!r} is not ROLE=N, such as decode=5")
        wanted[role] = int(count)
    for line in order(name, "scale", wanted, model):
        console.print(line, markup=False, soft_wrap=True)


@app.command(rich_help_panel=SERVE)
def switch(
    worker: Annotated[str, typer.Argument(help="id of the worker, as `tandem status` shows it")],
    to: Annotated[str, typer.Option(help="new role: prefill or decode")],
    address: Annotated[
        str,
        typer.Option(
            "--address",
            "-a",
            envvar="TANDEM_ADDRESS",
            help="host:port where a router accepts workers: its internal_port, else its port",
        ),
    ] = DEFAULT_ADDRESS,
    tls_ca: Annotated[
        Path | None, typer.Option(help="CA of the certificates of routers and workers (PEM)", rich_help_panel=ACCESS)
    ] = None,
    tls_cert: Annotated[
        Path | None, typer.Option(help="certificate signed by that CA (PEM)", rich_help_panel=ACCESS)
    ] = None,
    tls_key: Annotated[Path | None, typer.Option(help="key of that certificate (PEM)", rich_help_panel=ACCESS)] = None,
) -> None:
    """Switch a worker's role in place: its weights stay loaded and its cache stays; no stream is lost."""
    from cluster.network.tls import member_of
    from cluster.settings import TlsSettings
    from tandem.cli.cluster.switch import switch_worker

    member = member_of(TlsSettings(tls_ca=tls_ca, tls_cert=tls_cert, tls_key=tls_key))
    run(switch_worker(console, address.split(",")[0], member, worker, to))


@app.command(rich_help_panel=INSPECT)
@asking
def fault(
    target: "Target",
    kind: Annotated[str, typer.Argument(help="fault: kill, stop, delay, corrupt or partition")] = "",
    worker: Annotated[str, typer.Option(help="id of the worker, as `tandem status` shows it")] = "",
    peer: Annotated[str, typer.Option(help="id of the other worker of a partition")] = "",
    seconds: Annotated[float, typer.Option(help="duration of the fault in seconds; kill has none")] = 3.0,
    delay_ms: Annotated[float, typer.Option(help="delay of each message, in milliseconds")] = 200.0,
    blocks: Annotated[int, typer.Option(help="largest number of KV blocks to corrupt")] = 4,
    front: Annotated[
        bool, typer.Option("--front", help="stop: also the worker's gRPC process, not only its engine process")
    ] = False,
    drill: Annotated[
        str, drill_option("faults to inject one after another, while streams run", metavar="all|KIND,KIND")
    ] = "",
    rounds: Annotated[int, drill_option("number of rounds through all faults of the drill")] = 1,
    streams: Annotated[int, drill_option("number of streams at a time")] = 8,
    prompt_tokens: Annotated[int, drill_option("tokens of each stream's prompt")] = 512,
    output_tokens: Annotated[int, drill_option("tokens of each stream's output")] = 128,
    recovery_s: Annotated[float, drill_option("longest wait for workers to come back, in seconds")] = 120.0,
    model: Annotated[str, drill_option("served model; default: the only one")] = "",
    print_json: Annotated[bool, drill_option("print the report as JSON", "--json")] = False,
    member_ca: Annotated[Path | None, access_option("CA of the certificates of routers and workers (PEM)")] = None,
    member_cert: Annotated[Path | None, access_option("certificate signed by that CA (PEM)")] = None,
    member_key: Annotated[Path | None, access_option("key of that certificate (PEM)")] = None,
) -> None:
    """Inject one fault into a worker, or run a drill: faults under load, and a report of their effect on streams.

    Workers need the setting `faults: true`. Run the command on a host that reaches them; with TLS pass --member-cert.

    Exit code of a drill: 0 if no stream was lost or wrong and all workers recovered, otherwise 1.
    """
    from cluster.network.tls import member_of
    from cluster.settings import TlsSettings
    from tandem.cli.cluster.fault import faults_of, inject_fault, run_drill
    from tandem.drill.drill import DrillPlan
    from tandem.drill.load import LoadSize
    from tandem.drill.report import FaultOptions

    if bool(kind) == bool(drill):
        raise InvalidRequest("kind", "give either one fault or --drill")
    if kind and not worker:
        raise InvalidRequest("worker", "is missing")
    member = member_of(TlsSettings(tls_ca=member_ca, tls_cert=member_cert, tls_key=member_key))
    options = FaultOptions(seconds, delay_ms, blocks, front)
    if kind:
        run(inject_fault(console, target, member, kind, worker, peer, options))
        return
    plan = DrillPlan(faults_of(drill), rounds, options, worker, peer, recovery_s)
    size = LoadSize(streams, prompt_tokens, output_tokens)
    passed = run(run_drill(console, target, member, model, size, plan, print_json))
    raise typer.Exit(0 if passed else 1)


@app.command(rich_help_panel=INSPECT)
@asking
def cache(
    target: "Target",
    action: Annotated[str, typer.Argument(help="action: ls, pin, warm or drop")] = "ls",
    text: Annotated[str, typer.Argument(help="prompt to pin or to warm, or whose blocks to drop")] = "",
    prompt_file: Annotated[Path | None, typer.Option(help="file with the prompt")] = None,
    seconds: Annotated[float, typer.Option(help="time for which a pinned prompt stays, in seconds")] = 3600.0,
    tenant: Annotated[
        str | None, typer.Option(help="tenant of the prompt or the pins; default: none; for drop: all tenants")
    ] = None,
    workers: Annotated[int, typer.Option(help="number of decode workers to warm", min=1)] = 1,
    retention: Annotated[float | None, typer.Option(help="time for which warmed blocks stay, in seconds")] = None,
    everything: Annotated[bool, typer.Option("--all", help="drop all cached blocks that nothing uses")] = False,
    store: Annotated[
        bool,
        typer.Option(help="warm: also write the prompt's blocks to the shared store; drop: also remove them there"),
    ] = False,
    salt: Annotated[str, typer.Option(help="cache_salt of the prompt")] = "",
    worker: Annotated[str, typer.Option(help="id of one worker; default: all workers")] = "",
    model: Annotated[str, typer.Option(help="served model of the prompt; default: the only one")] = "",
    member_ca: Annotated[Path | None, access_option("CA of the certificates of routers and workers (PEM)")] = None,
    member_cert: Annotated[Path | None, access_option("certificate signed by that CA (PEM)")] = None,
    member_key: Annotated[Path | None, access_option("key of that certificate (PEM)")] = None,
) -> None:
    """Show KV pools and pinned prompts (ls), keep a prompt (pin), place one (warm), or release them (drop).

    drop releases pins; with a prompt or --all it removes cached blocks that no request uses. ls and drop call workers
    directly: run them on a host that reaches the workers; with TLS pass --member-cert.
    """
    from cluster.network.tls import member_of
    from cluster.settings import TlsSettings
    from tandem.cli.cluster.cache import ACTIONS, Prompt, drop_cached, drop_pins, list_caches, pin, read_prompt, warm

    if action not in ACTIONS:
        raise InvalidRequest("action", f"unknown action {action!r}; known are {', '.join(ACTIONS)}")
    member = member_of(TlsSettings(tls_ca=member_ca, tls_cert=member_cert, tls_key=member_key))
    text = read_prompt(text, prompt_file)
    if action == "pin":
        run(pin(console, target, model, text, seconds, tenant or ""))
    elif action == "warm":
        run(warm(console, target, Prompt(text, model, tenant or "", salt), workers, retention, store))
    elif action == "drop" and (text or everything or prompt_file):
        if bool(text) == everything:
            raise InvalidRequest("text", "give either a prompt or --all")
        prompt = Prompt(text, model, tenant or "", salt) if text else None
        run(drop_cached(console, target, member, worker, prompt, store))
    elif action == "drop" and store:
        raise InvalidRequest("store", "removes the objects of a prompt: give a prompt")
    elif action == "drop":
        run(drop_pins(console, target, member, worker, tenant))
    else:
        run(list_caches(console, target, member, worker))


@app.command(rich_help_panel=SERVE)
def restart(name: Name = CLUSTER_NAME) -> None:
    """Restart the workers of a cluster on this Ray cluster, one after the other; no stream is lost."""
    from tandem.ray.control import order

    order(name, "restart", {})


@app.command(rich_help_panel=SERVE)
def down(name: Name = CLUSTER_NAME) -> None:
    """Stop a cluster started by `tandem up` on this Ray cluster."""
    from tandem.ray.control import order

    order(name, "down", {})


@app.command(rich_help_panel=SERVE)
def demo(
    requests: Annotated[int, typer.Option(help="number of concurrent requests", min=8)] = 8,
    model: Annotated[Path | None, model_option("model to serve; default: the storyteller")] = None,
    routers: Annotated[int, typer.Option(help="number of routers; requests go to them in turn", min=1)] = 1,
) -> None:
    """Start a router, a prefill and a decode worker, and watch concurrent requests being served."""
    check_installed("torch", "tandem demo")
    console.print("tandem demo: a router, a prefill worker and a decode worker, each a process of its own")
    from engine.host.cores import available_cores
    from tandem.cli.cluster.demo import run_demo

    run(run_demo(console, requests, model, available_cores(), routers))


@app.command(rich_help_panel=INSPECT)
def doctor(
    config: Annotated[Path | None, typer.Option(help="YAML file with a `worker:` mapping")] = None,
    model: Annotated[Path | None, model_option("model to check the settings with")] = None,
    workers: Annotated[
        int, typer.Option(help="number of test processes on this host; KV transfer is tested between each pair")
    ] = 2,
    set_: Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="setting of a worker")] = None,
    print_json: Annotated[bool, typer.Option("--json", help="print everything as JSON")] = False,
    peer: Annotated[
        list[str] | None,
        typer.Option(
            metavar="HOST:PORT", help="address of another host, on which `tandem doctor --listen` runs; may be repeated"
        ),
    ] = None,
    listen: Annotated[
        int | None,
        typer.Option(
            metavar="PORT", min=0, max=65535, help="listen on this port for a doctor on another host; 0 chooses"
        ),
    ] = None,
) -> None:
    """Check this host before any request: packages, limits, devices, and KV transfers between workers.

    For several hosts: run `tandem doctor --listen PORT` on all but one. On that one pass --peer HOST:PORT for each of
    the others.

    Exit code: 0 all right, 1 something is broken, 2 a check could not run or an option is wrong.
    """
    from tandem.cluster_file import read_settings
    from tandem.doctor.command import listen_for_doctor, run_doctor

    settings = read_settings(config).worker | parse_overrides(set_ or [])
    if listen is not None and peer:
        raise StartError("listen", "cannot be combined with --peer: only the host that runs the checks names peers")
    if listen is not None:
        return listen_for_doctor(console, settings, model, listen)
    raise typer.Exit(run_doctor(console, settings, model, workers, print_json, peer or []))


keys = typer.Typer(help="Make API keys.", no_args_is_help=True)
app.add_typer(keys, name="keys", rich_help_panel=SERVE)


@keys.command()
def new(
    name: Annotated[str, typer.Option(help="name of the key in logs")],
    tenant: Annotated[
        str | None,
        typer.Option(help="tenant of the key's requests, for limits, quota and cache; default: the key's name"),
    ] = None,
    model: Annotated[
        list[str] | None, typer.Option(help="model that the key may use; may be repeated; default: all")
    ] = None,
    operator: Annotated[
        bool, typer.Option("--operator", help="let the key see the whole cluster: status, console")
    ] = False,
    days: Annotated[float | None, typer.Option(help="days until the key expires; default: never", min=0)] = None,
) -> None:
    """Make an API key, and its entry for a router's `api_keys_file`.

    The key is shown only once.
    """
    from router.security.api_keys import entry_for, new_key

    key = new_key()
    console.print(f"# the key, for its user; it is stored nowhere else\n{key}", soft_wrap=True, markup=False)
    console.print("# the entry, for api_keys_file", markup=False)
    console.print(
        entry_for(key, name, name if tenant is None else tenant, model or [], days, operator),
        end="",
        soft_wrap=True,
        markup=False,
    )
