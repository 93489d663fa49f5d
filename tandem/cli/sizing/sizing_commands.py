"""Commands that size a cluster, and that measure one."""

import math
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tandem.cli.common import SIZE, Model, asking, console, model_option, out_file, run

if TYPE_CHECKING:
    from tandem.client import Target

app = typer.Typer()
Group = Annotated[
    int | None,
    typer.Option(help="workers of a group that share out a model's experts (data and expert parallelism); default: 1"),
]
TRACE = "trace file: BurstGPT's or Azure's CSV, Mooncake's JSON lines, a log of receipts, of LiteLLM or of spans"
ColumnNames = Annotated[
    str | None,
    typer.Option(
        metavar="FIELD=COLUMN,...",
        help="columns of any CSV or JSON lines: time=, prompt=, output= (tokens), session=, model=; keys by dots",
    ),
]
OnlyModel = Annotated[str, typer.Option(help="replay only the trace's requests of this model")]
JsonOut = Annotated[Path | None, out_file("--json", help="file for all figures as JSON")]


@app.command(name="plan", rich_help_panel=SIZE)
def plan_cluster(
    rate: Annotated[float | None, typer.Option(help="requests per second, with Poisson arrivals")] = None,
    prompt: Annotated[float | None, typer.Option(help="mean number of prompt tokens")] = None,
    output: Annotated[float | None, typer.Option(help="mean number of output tokens")] = None,
    hit_rate: Annotated[float, typer.Option(help="share of prompt tokens that are cached, 0 to 1")] = 0.0,
    variation: Annotated[
        float, typer.Option(help="standard deviation of both lengths, as a share of the mean; 0: all equal")
    ] = 0.5,
    gpu: Annotated[
        str | None,
        typer.Option(
            help="GPU of the workers: B200, H200, H100, A100, L40S, A10 or L4; default: H100, or what --values names"
        ),
    ] = None,
    decode_gpu: Annotated[str | None, typer.Option(help="GPU of decode workers, where it differs")] = None,
    model: Annotated[Path | None, model_option("model; default: Llama 3.1 8B; no weights are read")] = None,
    pp: Annotated[
        int | None,
        typer.Option(help="pipeline stages of a worker (vLLM); default: 1, or more where the model fits no 8 GPUs"),
    ] = None,
    dp: Group = None,
    ttft: Annotated[float, typer.Option(help="SLO of the time to first token, in seconds")] = 1.0,
    itl: Annotated[float, typer.Option(help="SLO of a request's mean time between tokens, in milliseconds")] = 50.0,
    price: Annotated[float | None, typer.Option(help="price of a GPU hour in USD; default: a built-in table")] = None,
    block_tokens: Annotated[int, typer.Option(help="tokens of a KV block")] = 64,
    simulate: Annotated[int, typer.Option(help="number of simulated requests that check the plan; 0: none")] = 0,
    values: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="FILE",
            help="Helm chart values: only check whether their pools fit GPUs and memory limits; may be repeated",
        ),
    ] = None,
    shape: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=SHAPE", help="shape of a model in --values: a known name, a directory, or org/name"),
    ] = None,
    json_path: JsonOut = None,
) -> None:
    """Print the smallest cluster of each kind that keeps the SLO: how many GPUs, disaggregated or not.

    The SLO must hold for nine of ten requests; every figure comes with its formula. For a trace of your own use `tandem
    replay`. With --values it says instead whether each pool of a chart's values fits its device, and exits with 1 where
    one does not.
    """
    from sizing.comparison.replay import Setup
    from sizing.gpus import gpu_named
    from sizing.models.known_models import named_shape
    from sizing.plan.load import OfferedLoad
    from tandem.cli.sizing.fit import parse_shapes, read_values, refuse_beside_values, show_fit
    from tandem.cli.sizing.plan import make_plan, needed
    from workloads.results import Slo

    load = {"rate": rate, "prompt": prompt, "output": output}
    if values:
        others = {"model": model, "decode_gpu": decode_gpu, "pp": pp, "dp": dp, "simulate": simulate or None}
        refuse_beside_values({**load, **others})
        named = gpu_named(gpu).name if gpu is not None else ""
        if not show_fit(console, read_values(values), parse_shapes(shape or []), named, json_path):
            raise typer.Exit(1)
        return
    if shape:
        raise typer.BadParameter("needs --values", param_hint="--shape")
    setup = Setup(
        model=named_shape(model),
        gpu=gpu_named("H100" if gpu is None else gpu),
        gpus=(pp or 1) * (dp or 1),
        pp=1 if pp is None else pp,
        dp=1 if dp is None else dp,
        decode_gpu=None if decode_gpu is None else gpu_named(decode_gpu),
        slo=Slo(ttft, itl / 1e3),
        usd_per_gpu_hour=price,
        block_tokens=block_tokens,
    )
    means = {name: needed(name, value) for name, value in load.items()}
    make_plan(console, setup, OfferedLoad(**means, hit_rate=hit_rate, variation=variation), simulate, json_path)


@app.command(name="replay", rich_help_panel=SIZE)
def replay_trace(
    trace: Annotated[Path, typer.Argument(help=TRACE)],
    columns: ColumnNames = None,
    only_model: OnlyModel = "",
    gpus: Annotated[int, typer.Option(help="number of GPUs of every compared cluster")] = 8,
    gpu: Annotated[str | None, typer.Option(help="GPU: B200, H200, H100, A100, L40S, A10 or L4; default: H100")] = None,
    tp: Annotated[
        int | None, typer.Option(help="number of GPUs of one worker (tensor parallelism); default: 1")
    ] = None,
    pp: Annotated[
        int | None, typer.Option(help="pipeline stages of one worker, each of --tp GPUs (vLLM); default: 1")
    ] = None,
    dp: Group = None,
    model: Annotated[Path | None, model_option("model; default: Llama 3.1 8B; no weights are read")] = None,
    modes: Annotated[
        str,
        typer.Option(
            help="compared clusters: aggregated (no prefill workers), disaggregated, conditional (the router decides)"
        ),
    ] = "aggregated,disaggregated,conditional",
    split: Annotated[
        list[str] | None,
        typer.Option(metavar="P:D", help="number of prefill and decode workers to compare; may be repeated"),
    ] = None,
    policies: Annotated[
        str, typer.Option(help="compared placement policies: ours,round-robin,least-loaded,prefix-hash")
    ] = "ours",
    ttft: Annotated[float, typer.Option(help="SLO of the time to first token, in seconds")] = 1.0,
    itl: Annotated[float, typer.Option(help="SLO of a request's mean time between tokens, in milliseconds")] = 50.0,
    rate: Annotated[float, typer.Option(help="factor on the trace's request rate")] = 1.0,
    start: Annotated[float, typer.Option(help="time of the trace at which the replay begins, in seconds")] = 0.0,
    duration: Annotated[
        float | None, typer.Option(help="length of the replayed part of the trace, in seconds; default: to its end")
    ] = None,
    requests: Annotated[int | None, typer.Option(help="largest number of requests to replay")] = None,
    spread: Annotated[float, typer.Option(help="largest random delay of each request, in seconds")] = 0.0,
    price: Annotated[
        float | None,
        typer.Option(
            help="price of a GPU hour in USD, or of a worker hour with --calibration; default: a built-in table"
        ),
    ] = None,
    routers: Annotated[int, typer.Option(help="number of routers, each with its own view of the cluster")] = 1,
    lag: Annotated[
        float | None, typer.Option(help="delay until a router hears of a change, in milliseconds; default: 10")
    ] = None,
    store: Annotated[
        float | None, typer.Option(help="size of a KV store that all workers share, in TB; default: no store")
    ] = None,
    store_rate: Annotated[
        float, typer.Option(help="bandwidth of that store in each direction for all workers together, in GB/s")
    ] = 10.0,
    block_tokens: Annotated[int | None, typer.Option(help="tokens of a KV block; default: 64")] = None,
    calibration: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="calibration file of `tandem calibrate`, used instead of a GPU's data"),
    ] = None,
    kill: Annotated[
        list[str] | None,
        typer.Option(metavar="WORKER@S", help="worker to kill at a second of the replay; may be repeated"),
    ] = None,
    autoscale: Annotated[
        int | None,
        typer.Option(
            metavar="MOST", help="largest number of workers per role for a cluster that the planner sizes, compared too"
        ),
    ] = None,
    worker_start: Annotated[
        float, typer.Option(help="seconds until a worker that the planner starts can serve")
    ] = 60.0,
    swing: Annotated[
        float,
        typer.Option(help="ratio of the highest to the lowest request rate; the rate follows a sine from its lowest"),
    ] = 1.0,
    period: Annotated[
        float, typer.Option(help="period of the rate's sine, in seconds of the replay after --rate")
    ] = 3600.0,
    seed: Annotated[int, typer.Option(help="seed of all random draws; the same seed gives the same figures")] = 0,
    repeat: Annotated[
        int,
        typer.Option(
            metavar="SEEDS", help="run with further seeds, at most this many, until one choice is clearly better"
        ),
    ] = 4,
    json_path: JsonOut = None,
    png: Annotated[Path | None, out_file(help="file for a picture of the comparison; needs matplotlib")] = None,
    log_decisions: Annotated[Path | None, out_file(help="file to which placement decisions are appended")] = None,
) -> None:
    """Replay a trace through simulated clusters with the real router and engine.

    Answers whether to disaggregate. Time is virtual: computation and links are modelled, all decisions are made by the
    real code.
    """
    from sizing.calibration import Calibration
    from sizing.comparison.planned import autoscaled
    from sizing.comparison.replay import Setup, scenarios
    from sizing.gpus import gpu_named
    from sizing.models.known_models import named_shape
    from tandem.cli.sizing.replay import (
        compare,
        parse_failures,
        parse_modes,
        parse_policies,
        parse_splits,
        refuse_beside_calibration,
        seeds_that_differ,
        store_of,
    )
    from workloads.results import Slo
    from workloads.traces.columns import parse_columns
    from workloads.traces.reading import RateSwing, Trace, Window

    if calibration is not None:
        theirs = {"gpu": gpu, "model": model, "tp": tp, "pp": pp, "dp": dp, "lag": lag, "block_tokens": block_tokens}
        refuse_beside_calibration([name for name, value in theirs.items() if value is not None])
    setup = Setup(
        model=named_shape(model),
        gpu=gpu_named("H100" if gpu is None else gpu),
        gpus=gpus,
        tp=1 if tp is None else tp,
        pp=1 if pp is None else pp,
        dp=1 if dp is None else dp,
        slo=Slo(ttft, itl / 1e3),
        usd_per_gpu_hour=price,
        block_tokens=64 if block_tokens is None else block_tokens,
        calibration=Calibration.read(calibration) if calibration else None,
        calibration_name=calibration.name if calibration else "",
        num_routers=routers,
        event_lag_s=0.01 if lag is None else lag / 1e3,
        failures=parse_failures(kill or []),
        store=None if store is None else store_of(store, store_rate),
        seed=seed,
    )
    window = Window(rate, start, math.inf if duration is None else duration, requests, spread, seed, only_model)
    named = None if columns is None else parse_columns(columns)
    compared = scenarios(setup, parse_modes(modes), parse_policies(policies), parse_splits(split or []))
    if autoscale is not None:
        compared.append(autoscaled(setup, autoscale, worker_start))
    seeds = seeds_that_differ(repeat, spread, routers)

    read: list[Trace] = []

    def trace_of(seed: int) -> RateSwing:
        read.append(Trace(trace, replace(window, seed=seed), named))
        return RateSwing(read[-1], swing, period)

    compare(console, setup, compared, trace_of, seeds, trace.name, json_path, png, log_decisions)
    if num_failed := read[0].num_failed:
        console.print(f"{num_failed} requests without a prompt or an output, as failed ones are, were left out")


@app.command(rich_help_panel=SIZE)
@asking
def bench(
    target: "Target",
    trace: Annotated[
        Path | None,
        typer.Argument(help=f"{TRACE}; default: a load profile"),
    ] = None,
    columns: ColumnNames = None,
    only_model: OnlyModel = "",
    http: Annotated[str, typer.Option(metavar="URL", help="server with OpenAI's API, instead of gRPC")] = "",
    model: Model = "",
    profile: Annotated[
        str, typer.Option(help="load profile: short-chat, long-context-qa, tool-calling or offline-batch")
    ] = "short-chat",
    scale: Annotated[float, typer.Option(help="factor on the profile's lengths")] = 1.0,
    rate: Annotated[float, typer.Option(help="requests per second; with a trace: factor on its request rate")] = 1.0,
    even: Annotated[
        bool, typer.Option("--even", help="equal gaps between requests, instead of Poisson arrivals")
    ] = False,
    concurrency: Annotated[int | None, typer.Option(help="number of requests at a time, instead of a rate")] = None,
    start: Annotated[float, typer.Option(help="time of the trace at which the load begins, in seconds")] = 0.0,
    spread: Annotated[float, typer.Option(help="largest random delay of each request of a trace, in seconds")] = 0.0,
    duration: Annotated[float | None, typer.Option(help="duration of the load, in seconds")] = None,
    requests: Annotated[int | None, typer.Option(help="largest number of requests")] = None,
    warmup: Annotated[float, typer.Option(help="seconds at the beginning that are not counted")] = 0.0,
    as_text: Annotated[
        bool | None,
        typer.Option(
            "--text/--tokens", help="send prompts as text or as token ids; default: token ids over gRPC, text over HTTP"
        ),
    ] = None,
    vocab_size: Annotated[int, typer.Option(help="vocabulary size of the model, for token ids over HTTP")] = 0,
    context: Annotated[
        int, typer.Option(help="context length of the model, where an HTTP server does not report it")
    ] = 0,
    receipts: Annotated[bool, typer.Option("--receipts", help="request receipts over HTTP too (Tandem only)")] = False,
    timeout: Annotated[float, typer.Option(help="deadline of each request, in seconds")] = 600.0,
    tenant: Annotated[str, typer.Option(help="tenant of the requests")] = "",
    ttft: Annotated[float, typer.Option(help="SLO of the time to first token, in seconds")] = 1.0,
    itl: Annotated[float, typer.Option(help="SLO of a request's mean time between tokens, in milliseconds")] = 50.0,
    gpus: Annotated[
        int | None, typer.Option(help="number of GPUs of the cluster; default: the number of workers")
    ] = None,
    price: Annotated[float | None, typer.Option(help="price of a GPU hour in USD")] = None,
    seed: Annotated[int, typer.Option(help="seed of the load; the same seed offers the same requests")] = 0,
    json_path: JsonOut = None,
    png: Annotated[Path | None, out_file(help="file for a picture of the figures; needs matplotlib")] = None,
    log: Annotated[
        Path | None,
        out_file(help="file for requests and receipts, for `tandem replay` and `calibrate`"),
    ] = None,
) -> None:
    """Load a live cluster, and measure what its clients see.

    With --rate, latency counts from the planned send time, even if the request was sent later. Sampling is greedy, and
    outputs are as long as the profile or the trace says (`ignore_eos`).
    """
    from tandem.loadgen.command import OfferedLoad, OutputOptions, run_bench
    from tandem.loadgen.frontends import Frontend, GrpcFrontend, HttpFrontend
    from workloads.profiles import profile_named
    from workloads.request import check_above_0
    from workloads.results import Slo
    from workloads.traces.columns import parse_columns
    from workloads.traces.reading import Trace, Window

    check_above_0("timeout", timeout)
    check_above_0("vocab_size", vocab_size, or_0=True)
    check_above_0("context", context, or_0=True)
    named = None if columns is None else parse_columns(columns)
    offered = None
    if trace is not None:
        offered = Trace(trace, Window(rate=rate, start_s=start, spread_s=spread, seed=seed, model=only_model), named)
    load = OfferedLoad(
        profile=None if trace else profile_named(profile),
        trace=offered,
        rate=rate,
        even=even,
        concurrency=concurrency,
        duration_s=duration,
        most=requests,
        warmup_s=warmup,
        scale=scale,
        seed=seed,
    )
    frontend: Frontend
    if http:
        headers = {"Authorization": f"Bearer {target.api_key}"} if target.api_key else {}
        if tenant:
            headers["x-tenant"] = tenant
        frontend = HttpFrontend(
            http, model, timeout, headers, as_text is not False, receipts, vocab_size, context, target.tls
        )
    else:
        frontend = GrpcFrontend(
            target.address.split(","), model, timeout, tenant, as_text is True, target.api_key, target.tls
        )
    wanted = OutputOptions(Slo(ttft, itl / 1e3), gpus, price, json_path, png, log)
    exit_codes: list[int] = []

    async def offer() -> None:
        exit_codes.append((await run_bench(console, frontend, load, wanted)).exit_code)

    import uvloop

    run(offer(), uvloop.new_event_loop)
    if any(exit_codes):
        raise typer.Exit(exit_codes[0])


@app.command(rich_help_panel=SIZE)
def calibrate(
    log: Annotated[Path, typer.Argument(help="log of `tandem bench --log`")],
    out: Annotated[Path, out_file("--out", "-o", help="file for the calibration, for `tandem replay --calibration`")],
    blocks: Annotated[
        int | None,
        typer.Option(help="number of blocks of a worker's pool; default: as many as fit into 256 MiB", min=1),
    ] = None,
    prefill_chunk: Annotated[int, typer.Option(help="max_prefill_tokens of the prefill workers", min=1)] = 512,
    decode_chunk: Annotated[int, typer.Option(help="max_prefill_tokens of the decode workers", min=1)] = 128,
    block_bytes: Annotated[
        int | None, typer.Option(help="size of a KV block in bytes, needed where the log shows no KV transfer")
    ] = None,
    nic_gbps: Annotated[
        float | None,
        typer.Option(help="speed of a worker's NIC in Gbit/s, needed where the log shows few KV transfers"),
    ] = None,
    model: Annotated[
        Path | None, model_option("model that tells the bytes of a KV block, instead of --block-bytes")
    ] = None,
    gpu: Annotated[str | None, typer.Option(help="GPU model whose NIC speed is taken, instead of --nic-gbps")] = None,
) -> None:
    """Estimate from a cluster's receipts how long its steps, transfers and messages take.

    An aggregated cluster transfers nothing: pass --block-bytes (or --model) and --nic-gbps (or --gpu).
    """
    from sizing.calibrate import AssumedRates
    from sizing.calibrate import calibrate as fit
    from sizing.gpus import SEQUENCE_TOKENS, gpu_named
    from sizing.models.known_models import named_shape
    from tandem.cli.sizing.calibrate import show_calibration
    from workloads.traces.reading import served_of

    nic_bytes_per_s = None if nic_gbps is None else nic_gbps * 1e9 / 8
    if nic_bytes_per_s is None and gpu is not None:
        nic_bytes_per_s = gpu_named(gpu).nic_bytes_per_s
    kv_token_bytes = None if model is None else named_shape(model).mean_token_bytes(SEQUENCE_TOKENS)
    assumed = AssumedRates(kv_token_bytes, block_bytes, nic_bytes_per_s)
    calibration = fit(served_of(log), blocks, prefill_chunk, decode_chunk, assumed)
    calibration.write(out)
    show_calibration(console, calibration, out)
