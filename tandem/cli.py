"""The `tandem` command."""

import asyncio
import math
import os
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
import uvloop
from rich.console import Console

from cluster.config import parse_overrides
from cluster.errors import StartError, TandemError
from tandem.steps import Steps

if TYPE_CHECKING:
    from cluster.tls import Visitor

app = typer.Typer(
    name="tandem",
    help="Serve a language model with prefill and decode on separate workers.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
console = Console(highlight=False)

DEFAULT_ADDRESS = "127.0.0.1:50051"
Address = Annotated[
    str, typer.Option("--address", "-a", envvar="TANDEM_ADDRESS", help="host:port of a router, or of several: a,b")
]
ACCESS = "Access"
ApiKey = Annotated[
    str,
    typer.Option(
        envvar="TANDEM_API_KEY",
        help="where the cluster asks for one; better in the environment: others can read a command line",
        rich_help_panel=ACCESS,
    ),
]
TlsCa = Annotated[
    Path | None,
    typer.Option(envvar="TANDEM_TLS_CA", help="speak TLS, and believe these authorities (PEM)", rich_help_panel=ACCESS),
]
TlsCert = Annotated[
    Path | None,
    typer.Option(envvar="TANDEM_TLS_CERT", help="own certificate, where one is asked for", rich_help_panel=ACCESS),
]
TlsKey = Annotated[Path | None, typer.Option(envvar="TANDEM_TLS_KEY", help="and its key", rich_help_panel=ACCESS)]
Tls = Annotated[
    bool,
    typer.Option("--tls", envvar="TANDEM_TLS", help="speak TLS, by well-known authorities", rich_help_panel=ACCESS),
]
MaxTokens = Annotated[int | None, typer.Option(help="most tokens to generate")]
Temperature = Annotated[float | None, typer.Option(help="0 is greedy")]
TopP = Annotated[float | None, typer.Option(help="keep the likeliest tokens up to this probability")]
TopK = Annotated[int | None, typer.Option(help="keep the k likeliest tokens; 0 keeps all")]
Seed = Annotated[int | None, typer.Option(help="the same seed gives the same text")]
Stop = Annotated[list[str] | None, typer.Option(help="end before this string; may be given several times")]
MinP = Annotated[float | None, typer.Option(help="keep tokens this likely compared with the likeliest")]
RepetitionPenalty = Annotated[float | None, typer.Option(help="above 1: less of what prompt and output have")]
PresencePenalty = Annotated[float | None, typer.Option(help="above 0: less of what the output has")]
FrequencyPenalty = Annotated[float | None, typer.Option(help="above 0: less of what the output has often")]
LogitBias = Annotated[list[str] | None, typer.Option(metavar="TOKEN=BIAS", help="added to a token's logit; repeatable")]
MinTokens = Annotated[int | None, typer.Option(help="fewest tokens to generate")]
StopTokenId = Annotated[list[int] | None, typer.Option(help="end after this token; repeatable")]
IgnoreEos = Annotated[bool, typer.Option("--ignore-eos", help="go on after the model's end token")]
Logprobs = Annotated[int | None, typer.Option(help="show log probabilities, and those of so many likeliest tokens")]
PromptLogprobs = Annotated[
    int | None, typer.Option(help="show those of the prompt's tokens too, and of so many likeliest ones")
]
Choices = Annotated[int | None, typer.Option("--n", help="so many completions")]
BeamWidth = Annotated[int | None, typer.Option(help="beam search of so many beams")]
LengthPenalty = Annotated[float | None, typer.Option(help="of beam search; above 0 favours longer text")]
STRUCTURED = "Structured output (one of)"
JsonSchema = Annotated[
    str | None, typer.Option(metavar="SCHEMA|@FILE", help="JSON of this schema", rich_help_panel=STRUCTURED)
]
JsonObject = Annotated[bool, typer.Option("--json", help="any JSON object", rich_help_panel=STRUCTURED)]
Regex = Annotated[str | None, typer.Option(help="text that matches", rich_help_panel=STRUCTURED)]
Grammar = Annotated[
    str | None, typer.Option(metavar="LARK|@FILE", help="text of this grammar", rich_help_panel=STRUCTURED)
]
Choice = Annotated[
    list[str] | None, typer.Option(help="this text, or another given so; repeatable", rich_help_panel=STRUCTURED)
]
OfModel = "Which model"
Model = Annotated[str, typer.Option(help="a served model, or auto; default: the router's", rich_help_panel=OfModel)]
Task = Annotated[str, typer.Option(help="what the model must be good at", rich_help_panel=OfModel)]
MinQuality = Annotated[float, typer.Option(help="what it must have at least, 0 to 1", rich_help_panel=OfModel)]
MaxTtft = Annotated[float | None, typer.Option(help="milliseconds to the first token", rich_help_panel=OfModel)]
ShowReceipt = Annotated[bool, typer.Option("--receipt", help="show where the KV came from and where the time went")]


@app.command()
def up(
    model: Annotated[Path | None, typer.Option(help="directory of a Hugging Face decoder-only model")] = None,
    prefill: Annotated[int, typer.Option(help="prefill workers")] = 1,
    decode: Annotated[int, typer.Option(help="decode workers")] = 1,
    routers: Annotated[int, typer.Option(help="routers; any of them serves any request")] = 1,
    host: Annotated[str, typer.Option(help="address the routers listen on")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="port of the first router, the others follow; 0 chooses")] = 50051,
    http_port: Annotated[int | None, typer.Option(help="of the OpenAI-compatible API, likewise; default: 8000")] = None,
    no_http: Annotated[bool, typer.Option("--no-http", help="serve gRPC only")] = False,
    worker: Annotated[list[str] | None, typer.Option(metavar="KEY=VALUE", help="setting of every worker")] = None,
    router: Annotated[list[str] | None, typer.Option(metavar="KEY=VALUE", help="setting of every router")] = None,
    config: Annotated[
        Path | None, typer.Option(help="YAML file with `worker:` and `router:` mappings, and a list `models:`")
    ] = None,
    autoscale: Annotated[
        bool, typer.Option("--autoscale", help="pools size themselves, as `planner:` in the file says")
    ] = False,
) -> None:
    """Start a router and workers as Ray actors, and serve until Ctrl-C.

    Uses the Ray cluster it finds, or starts one. `ray job submit --working-dir . -- tandem up ...` is the same.
    """
    from tandem.cluster_file import read_cluster

    cluster = read_cluster(config, model, prefill, decode)
    for each in cluster.models:
        console.print(f"tandem: {each.known_as}, {each.prefill} prefill + {each.decode} decode")
    cluster.check()  # before Ray is started for nothing
    settings = {"host": host, "port": port} | cluster.http_settings(http_port, no_http)
    settings |= parse_overrides(router or [])
    topology = cluster.plan(settings, parse_overrides(worker or []), _cores(), routers)
    with Steps(console, "tandem: ") as steps:
        steps("looking for a Ray cluster")
        try:
            from tandem.ray_cluster import serve  # importing Ray takes a second: say something first
            from tandem.ray_planner import planner_config
            from tandem.ray_settings import RaySettings
        except ModuleNotFoundError as error:
            raise StartError("ray", f"{error}; install tandem-serving[ray]") from None
        planner = planner_config(cluster.settings.planner, topology.router) if autoscale else None
        _run(serve(topology, steps, RaySettings.parse(cluster.settings.ray), planner))


CLUSTER_NAME = "tandem"
Name = Annotated[str, typer.Option("--name", help="the cluster's `cluster_name`")]


@app.command()
def scale(
    counts: Annotated[list[str], typer.Argument(metavar="ROLE=N", help="prefill=3, decode=5, or both")],
    model: Annotated[str, typer.Option(help="whose workers, where there are several models")] = "",
    name: Name = CLUSTER_NAME,
) -> None:
    """Change the number of workers of a cluster that `tandem up` runs on this Ray cluster; no stream is lost."""
    from tandem.ray_control import order

    wanted: dict[str, int] = {}
    for text in counts:
        role, _, count = text.partition("=")
        if not count.isdecimal():
            raise StartError("scale", f"{text!r} is not ROLE=N, such as decode=5")
        wanted[role] = int(count)
    order(name, "scale", wanted, model)


@app.command()
def switch(
    worker: Annotated[str, typer.Argument(help="its id, as `tandem status` shows it")],
    to: Annotated[str, typer.Option(help="prefill or decode")],
    address: Annotated[
        str, typer.Option("--address", "-a", envvar="TANDEM_ADDRESS", help="host:port where workers join a router")
    ] = DEFAULT_ADDRESS,
    tls_ca: Annotated[Path | None, typer.Option(help="of the cluster's members (PEM)", rich_help_panel=ACCESS)] = None,
    tls_cert: Annotated[Path | None, typer.Option(help="of a member", rich_help_panel=ACCESS)] = None,
    tls_key: Annotated[Path | None, typer.Option(help="and its key", rich_help_panel=ACCESS)] = None,
) -> None:
    """Give a worker the other role in place: its weights stay loaded and its cache as it is; no stream is lost."""
    from cluster.tls import TlsSettings, member_of
    from tandem.switching import switch_worker

    member = member_of(TlsSettings(tls_ca=tls_ca, tls_cert=tls_cert, tls_key=tls_key))
    _run(switch_worker(console, address.split(",")[0], member, worker, to))


@app.command()
def restart(name: Name = CLUSTER_NAME) -> None:
    """Restart the workers of a cluster on this Ray cluster, one after the other; no stream is lost."""
    from tandem.ray_control import order

    order(name, "restart", {})


@app.command()
def down(name: Name = CLUSTER_NAME) -> None:
    """End a cluster that `tandem up` runs on this Ray cluster."""
    from tandem.ray_control import order

    order(name, "down", {})


@app.command()
def generate(
    prompt: Annotated[str, typer.Argument(help="text to continue")],
    address: Address = DEFAULT_ADDRESS,
    max_tokens: MaxTokens = None,
    temperature: Temperature = None,
    top_p: TopP = None,
    top_k: TopK = None,
    seed: Seed = None,
    min_p: MinP = None,
    repetition_penalty: RepetitionPenalty = None,
    presence_penalty: PresencePenalty = None,
    frequency_penalty: FrequencyPenalty = None,
    logit_bias: LogitBias = None,
    stop: Stop = None,
    stop_token_id: StopTokenId = None,
    min_tokens: MinTokens = None,
    ignore_eos: IgnoreEos = False,
    logprobs: Logprobs = None,
    prompt_logprobs: PromptLogprobs = None,
    n: Choices = None,
    beam_width: BeamWidth = None,
    length_penalty: LengthPenalty = None,
    json_schema: JsonSchema = None,
    json_object: JsonObject = False,
    regex: Regex = None,
    grammar: Grammar = None,
    choice: Choice = None,
    model: Model = "",
    task: Task = "",
    min_quality: MinQuality = 0.0,
    max_ttft_ms: MaxTtft = None,
    receipt: ShowReceipt = False,
    api_key: ApiKey = "",
    tls: Tls = False,
    tls_ca: TlsCa = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
) -> None:
    """Continue a text; tokens appear as they are sampled."""
    from tandem.client import Target
    from tandem.generated import stream_text
    from tandem.talk import make_sampling, make_structured, parse_logit_bias

    structured = make_structured(
        json_schema=json_schema, json_object=json_object or None, regex=regex, grammar=grammar, choice=choice or None
    )
    sampling = make_sampling(
        max_tokens=max_tokens,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        seed=seed,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        presence_penalty=presence_penalty,
        frequency_penalty=frequency_penalty,
        logit_bias=parse_logit_bias(logit_bias),
        stop=stop,
        stop_token_ids=stop_token_id,
        min_tokens=min_tokens,
        ignore_eos=ignore_eos,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        n=n,
        beam_width=beam_width,
        length_penalty=length_penalty,
        structured=structured,
    )
    asked = {"model": model, "task": task, "min_quality": min_quality, "max_ttft_ms": max_ttft_ms}
    target = Target(address, api_key, _visitor(tls, tls_ca, tls_cert, tls_key))
    _run(stream_text(console, target, prompt, sampling, receipt, **asked))


@app.command()
def explain(
    prompt: Annotated[str, typer.Argument(help="text to continue")],
    address: Address = DEFAULT_ADDRESS,
    max_tokens: MaxTokens = None,
    most: Annotated[int, typer.Option(help="candidates to show, the cheapest first", min=1)] = 10,
    model: Model = "",
    task: Task = "",
    min_quality: MinQuality = 0.0,
    max_ttft_ms: MaxTtft = None,
    api_key: ApiKey = "",
    tls: Tls = False,
    tls_ca: TlsCa = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
) -> None:
    """Show which model and workers a request would go to now, and what each way to start it is predicted to cost.
    Nothing is started."""
    from tandem.client import Target
    from tandem.explained import show_explanation
    from tandem.talk import make_sampling

    asked = {"model": model, "task": task, "min_quality": min_quality, "max_ttft_ms": max_ttft_ms}
    target = Target(address, api_key, _visitor(tls, tls_ca, tls_cert, tls_key))
    _run(show_explanation(console, target, prompt, make_sampling(max_tokens=max_tokens), most, **asked))


@app.command()
def chat(
    address: Address = DEFAULT_ADDRESS,
    system: Annotated[str, typer.Option(help="what the model is told first")] = "",
    max_tokens: MaxTokens = None,
    temperature: Temperature = None,
    top_p: TopP = None,
    top_k: TopK = None,
    seed: Seed = None,
    model: Model = "",
    receipt: ShowReceipt = False,
    api_key: ApiKey = "",
    tls: Tls = False,
    tls_ca: TlsCa = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
) -> None:
    """Talk with the model; an empty line or Ctrl-D ends it."""
    from tandem.client import Target
    from tandem.talk import chat_loop, make_sampling

    sampling = make_sampling(max_tokens=max_tokens, temperature=temperature, top_p=top_p, top_k=top_k, seed=seed)
    target = Target(address, api_key, _visitor(tls, tls_ca, tls_cert, tls_key))
    _run(chat_loop(console, target, system, sampling, receipt, model))


@app.command()
def status(
    address: Address = DEFAULT_ADDRESS,
    api_key: ApiKey = "",
    tls: Tls = False,
    tls_ca: TlsCa = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
) -> None:
    """Show the workers, the line and the links as a router sees them now."""
    from tandem.client import Target
    from tandem.status import show_status

    _run(show_status(console, Target(address, api_key, _visitor(tls, tls_ca, tls_cert, tls_key))))


@app.command()
def top(
    address: Address = DEFAULT_ADDRESS,
    interval: Annotated[float, typer.Option(help="seconds between two looks", min=0.1)] = 1.0,
    api_key: ApiKey = "",
    tls: Tls = False,
    tls_ca: TlsCa = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
) -> None:
    """Watch the cluster; Ctrl-C ends it."""
    from tandem.client import Target
    from tandem.status import follow

    _run(follow(console, Target(address, api_key, _visitor(tls, tls_ca, tls_cert, tls_key)), interval))


@app.command()
def batch(
    source: Annotated[Path, typer.Argument(metavar="IN.jsonl", help="a GenerateRequest as JSON on each line")],
    out: Annotated[Path, typer.Option("--out", "-o", metavar="OUT.jsonl", help="answers, in the order they come")],
    address: Address = DEFAULT_ADDRESS,
    concurrency: Annotated[int, typer.Option(help="requests at a time", min=1)] = 32,
    timeout: Annotated[float, typer.Option(help="seconds, of a request")] = 600.0,
    priority: Annotated[int, typer.Option(help="of lines that say none; below 0 leaves room for others")] = -1,
    receipts: Annotated[bool, typer.Option("--receipts", help="write them too")] = False,
    api_key: ApiKey = "",
    tls: Tls = False,
    tls_ca: TlsCa = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
) -> None:
    """Work through a file of prompts. Interrupted, or where some failed: run it again, and it does the rest.

    Exit code: 1 where some failed.
    """
    from tandem.client import Target
    from tandem.offline import run_batch

    target = Target(address, api_key, _visitor(tls, tls_ca, tls_cert, tls_key))

    async def work() -> None:
        outcome = await run_batch(console, target, source, out, concurrency, timeout, priority, receipts)
        if outcome.failed:
            raise typer.Exit(1)

    _run(work())


@app.command()
def demo(
    requests: Annotated[int, typer.Option(help="concurrent requests", min=8)] = 8,
    model: Annotated[Path | None, typer.Option(help="another model directory; default: the storyteller")] = None,
    routers: Annotated[int, typer.Option(help="routers; the requests take turns", min=1)] = 1,
) -> None:
    """Start a router, a prefill and a decode worker, and watch concurrent requests being served."""
    console.print("tandem demo: a router, a prefill worker and a decode worker, each a process of its own")
    from tandem.demo import run_demo

    _run(run_demo(console, requests, model, _cores(), routers))


@app.command()
def doctor(
    config: Annotated[Path | None, typer.Option(help="YAML file with a `worker:` mapping")] = None,
    model: Annotated[Path | None, typer.Option(help="directory of the model to be served")] = None,
    workers: Annotated[int, typer.Option(help="processes on this host; each pair is tried")] = 2,
    set_: Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="setting of a worker")] = None,
    print_json: Annotated[bool, typer.Option("--json", help="print everything as JSON")] = False,
) -> None:
    """Check this host before any request: what is installed and allowed, and whether KV moves between workers.

    Exit code: 0 all right, 1 something is broken, 2 it could not be checked.
    """
    from tandem.cluster_file import read_settings
    from tandem.doctor.command import run_doctor

    settings = read_settings(config).worker | parse_overrides(set_ or [])
    raise typer.Exit(run_doctor(console, settings, model, workers, print_json))


@app.command(name="replay")
def replay_trace(
    trace: Annotated[Path, typer.Argument(help="Mooncake's JSON lines, Azure's CSV, or a log of receipts")],
    gpus: Annotated[int, typer.Option(help="of every cluster that is compared")] = 8,
    gpu: Annotated[str, typer.Option(help="B200, H200, H100, A100, L40S, A10 or L4")] = "H100",
    tp: Annotated[int, typer.Option(help="GPUs of one worker")] = 1,
    model: Annotated[Path | None, typer.Option(help="directory with a config.json; default: Llama 3.1 8B")] = None,
    modes: Annotated[str, typer.Option(help="who computes prompts")] = "aggregated,disaggregated,conditional",
    split: Annotated[list[str] | None, typer.Option(metavar="P:D", help="workers of each role; repeatable")] = None,
    policies: Annotated[
        str, typer.Option(help="who chooses workers: ours,round-robin,least-loaded,prefix-hash")
    ] = "ours",
    ttft: Annotated[float, typer.Option(help="SLO: seconds to the first token")] = 1.0,
    itl: Annotated[float, typer.Option(help="SLO: milliseconds between tokens, the mean of a request")] = 50.0,
    rate: Annotated[float, typer.Option(help="requests come so many times as fast")] = 1.0,
    start: Annotated[float, typer.Option(help="leave out what comes before, in seconds of the trace")] = 0.0,
    duration: Annotated[float | None, typer.Option(help="and what comes so much later than that")] = None,
    requests: Annotated[int | None, typer.Option(help="at most so many")] = None,
    spread: Annotated[float, typer.Option(help="seconds: each request comes up to so much later, by chance")] = 0.0,
    price: Annotated[float | None, typer.Option(help="USD per GPU and hour; default: a table's")] = None,
    routers: Annotated[int, typer.Option(help="each with a view of its own")] = 1,
    lag: Annotated[float, typer.Option(help="milliseconds until a router hears of a cache or a load")] = 10.0,
    block_tokens: Annotated[int, typer.Option(help="tokens of a KV block")] = 64,
    calibration: Annotated[
        Path | None, typer.Option(metavar="FILE", help="workers as `tandem calibrate` found them, instead of a GPU's")
    ] = None,
    kill: Annotated[list[str] | None, typer.Option(metavar="WORKER@S", help="it dies then; repeatable")] = None,
    autoscale: Annotated[
        int | None, typer.Option(metavar="MOST", help="and a cluster that a planner sizes: up to so many of each role")
    ] = None,
    worker_start: Annotated[float, typer.Option(help="seconds until a worker that it starts serves")] = 60.0,
    swing: Annotated[float, typer.Option(help="the rate's highest, of its lowest: a sine, the lowest first")] = 1.0,
    period: Annotated[float, typer.Option(help="of that, in seconds after --rate")] = 3600.0,
    seed: Annotated[int, typer.Option(help="the same seed gives the same figures")] = 0,
    json_path: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="write all figures")] = None,
    png: Annotated[Path | None, typer.Option(metavar="FILE", help="draw the comparison; needs matplotlib")] = None,
    log_decisions: Annotated[Path | None, typer.Option(metavar="FILE", help="append placement's decisions")] = None,
) -> None:
    """Should I disaggregate? Replay a trace through clusters that do not exist, with the router and the engine that do.

    In virtual time: computing and links are modelled, everything that decides is real.
    """
    from simulator.calibration import Calibration
    from simulator.gpus import gpu_named
    from simulator.model_shape import open_shape
    from simulator.planned import autoscaled
    from simulator.replay import Setup, scenarios
    from simulator.results import Slo
    from simulator.traces.reading import Trace, Window
    from simulator.traces.swing import Swing
    from tandem.replay import compare, parse_failures, parse_modes, parse_policies, parse_splits

    setup = Setup(
        model=open_shape(model),
        gpu=gpu_named(gpu),
        gpus=gpus,
        tp=tp,
        slo=Slo(ttft, itl / 1e3),
        usd_per_gpu_hour=price,
        block_tokens=block_tokens,
        calibration=Calibration.read(calibration) if calibration else None,
        num_routers=routers,
        event_lag_s=lag / 1e3,
        failures=parse_failures(kill or []),
        seed=seed,
    )
    window = Window(rate, start, math.inf if duration is None else duration, requests, spread, seed)
    found = scenarios(setup, parse_modes(modes), parse_policies(policies), parse_splits(split or []))
    if autoscale is not None:
        found.append(autoscaled(setup, autoscale, worker_start))
    requests_of = Swing(Trace(trace, window), swing, period)
    compare(console, setup, found, requests_of, trace.name, json_path, png, log_decisions)


@app.command()
def bench(
    trace: Annotated[
        Path | None, typer.Argument(help="Mooncake's JSON lines, Azure's CSV, or a log of receipts; else a profile")
    ] = None,
    address: Address = DEFAULT_ADDRESS,
    http: Annotated[str, typer.Option(metavar="URL", help="a server of OpenAI's API, instead of gRPC")] = "",
    api_key: ApiKey = "",
    tls: Tls = False,
    tls_ca: TlsCa = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
    model: Model = "",
    profile: Annotated[
        str, typer.Option(help="short-chat, long-context-qa, tool-calling or offline-batch")
    ] = "short-chat",
    scale: Annotated[float, typer.Option(help="multiplies the profile's lengths")] = 1.0,
    rate: Annotated[float, typer.Option(help="requests a second; of a trace: so many times as fast")] = 1.0,
    even: Annotated[bool, typer.Option("--even", help="equal gaps between requests, instead of Poisson")] = False,
    concurrency: Annotated[int | None, typer.Option(help="so many at a time, instead of a rate")] = None,
    start: Annotated[float, typer.Option(help="of a trace: leave out what comes before, in seconds")] = 0.0,
    duration: Annotated[float | None, typer.Option(help="seconds of requests")] = None,
    requests: Annotated[int | None, typer.Option(help="at most so many")] = None,
    warmup: Annotated[float, typer.Option(help="seconds at the beginning that are not counted")] = 0.0,
    as_text: Annotated[bool | None, typer.Option("--text/--tokens", help="prompts as text or as token ids")] = None,
    vocab_size: Annotated[int, typer.Option(help="of the model, for token ids by HTTP")] = 0,
    context: Annotated[int, typer.Option(help="of the model, where an HTTP server does not say it")] = 0,
    receipts: Annotated[bool, typer.Option("--receipts", help="ask for them by HTTP too (Tandem only)")] = False,
    timeout: Annotated[float, typer.Option(help="seconds, of a request")] = 600.0,
    tenant: Annotated[str, typer.Option(help="who asks")] = "",
    ttft: Annotated[float, typer.Option(help="SLO: seconds to the first token")] = 1.0,
    itl: Annotated[float, typer.Option(help="SLO: milliseconds between tokens, the mean of a request")] = 50.0,
    gpus: Annotated[int | None, typer.Option(help="of the cluster; default: as many as workers")] = None,
    price: Annotated[float | None, typer.Option(help="USD per GPU and hour")] = None,
    seed: Annotated[int, typer.Option(help="the same seed offers the same")] = 0,
    json_path: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="write all figures")] = None,
    png: Annotated[Path | None, typer.Option(metavar="FILE", help="draw them; needs matplotlib")] = None,
    log: Annotated[
        Path | None, typer.Option(metavar="FILE", help="write requests and receipts, for replay and calibrate")
    ] = None,
) -> None:
    """Load a live cluster, and see what its clients see.

    In an open loop, times count from when a request was due, whenever it was sent. Everything is greedy and as long as
    the profile or the trace says (`ignore_eos`).
    """
    from simulator.results import Slo
    from simulator.traces.reading import Trace, Window
    from simulator.workloads import profile_named
    from tandem.loadgen.command import Load, Wanted, run_bench
    from tandem.loadgen.doors import Door, GrpcDoor, HttpDoor

    load = Load(
        profile=None if trace else profile_named(profile),
        trace=Trace(trace, Window(rate=rate, start_s=start, seed=seed)) if trace else None,
        rate=rate,
        even=even,
        concurrency=concurrency,
        duration_s=duration,
        most=requests,
        warmup_s=warmup,
        scale=scale,
        seed=seed,
    )
    door: Door
    visitor = _visitor(tls, tls_ca, tls_cert, tls_key)
    if http:
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        if tenant:
            headers["x-tenant"] = tenant
        door = HttpDoor(http, model, timeout, headers, as_text is not False, receipts, vocab_size, context, visitor)
    else:
        door = GrpcDoor(address.split(","), model, timeout, tenant, as_text is True, api_key, visitor)
    wanted = Wanted(Slo(ttft, itl / 1e3), gpus, price, json_path, png, log)
    _run(run_bench(console, door, load, wanted), uvloop.new_event_loop)


keys = typer.Typer(help="API keys of a cluster.", no_args_is_help=True)
app.add_typer(keys, name="keys")


@keys.command()
def new(
    name: Annotated[str, typer.Option(help="by which logs call it")],
    tenant: Annotated[str, typer.Option(help="whose limits and quota its requests count against")] = "",
    model: Annotated[list[str] | None, typer.Option(help="that it may use; repeatable; default: all")] = None,
    operator: Annotated[bool, typer.Option("--operator", help="it may see the whole cluster: status, console")] = False,
    days: Annotated[float | None, typer.Option(help="until it expires; default: never", min=0)] = None,
) -> None:
    """Make a key, and the entry for `api_keys_file` by which routers know it. The key is shown this once."""
    from router.api_keys import entry_for, new_key

    key = new_key()
    console.print(f"# the key, for whoever is to use it; it is kept nowhere\n{key}", soft_wrap=True, markup=False)
    console.print("# the entry, for api_keys_file", markup=False)
    console.print(entry_for(key, name, tenant, model or [], days, operator), end="", soft_wrap=True, markup=False)


@app.command()
def calibrate(
    log: Annotated[Path, typer.Argument(help="of `tandem bench --log`")],
    out: Annotated[Path, typer.Option("--out", "-o", metavar="FILE", help="for `tandem replay --calibration`")],
    blocks: Annotated[int | None, typer.Option(help="of a worker's pool; default: 256 MiB of them", min=1)] = None,
    prefill_chunk: Annotated[int, typer.Option(help="max_prefill_tokens of the prefill workers", min=1)] = 512,
    decode_chunk: Annotated[int, typer.Option(help="and of the decode workers", min=1)] = 128,
) -> None:
    """Learn from the receipts of a live cluster how long its steps, its transfers and its messages take."""
    from simulator.fitting import calibrate as fit
    from simulator.traces.reading import served_of
    from tandem.calibrated import show_calibration

    found = fit(served_of(log), blocks, prefill_chunk, decode_chunk)
    found.write(out)
    show_calibration(console, found, out)


@app.command(name="plan")
def plan_cluster(
    rate: Annotated[float, typer.Option(help="requests per second, coming by chance (Poisson)")],
    prompt: Annotated[float, typer.Option(help="tokens of a prompt, the mean")],
    output: Annotated[float, typer.Option(help="tokens of an output, the mean")],
    hit_rate: Annotated[float, typer.Option(help="of a prompt's tokens: those that are cached, 0 to 1")] = 0.0,
    variation: Annotated[float, typer.Option(help="of both lengths: standard deviation over mean; 0: all equal")] = 0.5,
    gpu: Annotated[str, typer.Option(help="B200, H200, H100, A100, L40S, A10 or L4")] = "H100",
    decode_gpu: Annotated[str | None, typer.Option(help="of decode workers, where they have others")] = None,
    model: Annotated[Path | None, typer.Option(help="directory with a config.json; default: Llama 3.1 8B")] = None,
    ttft: Annotated[float, typer.Option(help="SLO: seconds to the first token")] = 1.0,
    itl: Annotated[float, typer.Option(help="SLO: milliseconds between tokens, the mean of a request")] = 50.0,
    price: Annotated[float | None, typer.Option(help="USD per GPU and hour, any; default: a table's")] = None,
    block_tokens: Annotated[int, typer.Option(help="tokens of a KV block")] = 64,
    simulate: Annotated[int, typer.Option(help="try the plan with so many requests in virtual time")] = 0,
    json_path: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="write all figures")] = None,
) -> None:
    """How many GPUs, and should I disaggregate? The smallest cluster of each kind that keeps the SLO for nine of ten
    requests, with the arithmetic.

    A matter of formulas: what a trace of yours does in such a cluster, `tandem replay` says.
    """
    from simulator.gpus import gpu_named
    from simulator.model_shape import open_shape
    from simulator.plan.load import Load
    from simulator.replay import Setup
    from simulator.results import Slo
    from tandem.plan import make_plan

    setup = Setup(
        model=open_shape(model),
        gpu=gpu_named(gpu),
        gpus=1,
        decode_gpu=None if decode_gpu is None else gpu_named(decode_gpu),
        slo=Slo(ttft, itl / 1e3),
        usd_per_gpu_hour=price,
        block_tokens=block_tokens,
    )
    make_plan(console, setup, Load(rate, prompt, output, hit_rate, variation), simulate, json_path)


def main() -> None:
    """Entry point: a Tandem error is one line, the cause; everything else is a bug and keeps its traceback."""
    try:
        app()
    except TandemError as error:
        console.file.flush()
        print(f"error: {error}", file=sys.stderr, flush=True)
        sys.exit(2)


def _visitor(tls: bool, ca: Path | None, cert: Path | None, key: Path | None) -> "Visitor | None":
    """None: in the clear."""
    from cluster.tls import Visitor

    return Visitor(ca, cert, key) if tls or ca or cert or key else None


LoopFactory = Callable[[], asyncio.AbstractEventLoop]


def _run(work: Coroutine[Any, Any, object], loop: LoopFactory | None = None) -> None:
    try:
        with asyncio.Runner(loop_factory=loop) as runner:
            runner.run(work)
    except KeyboardInterrupt:
        raise typer.Exit(130) from None


def _cores() -> list[int]:
    return sorted(os.sched_getaffinity(0))


if __name__ == "__main__":
    main()
