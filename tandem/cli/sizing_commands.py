"""Commands that size a cluster, and that measure one."""

import math
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tandem.cli.common import Model, asking, console, model_option, out_file, run

if TYPE_CHECKING:
    from tandem.client import Target

app = typer.Typer()
JsonOut = Annotated[Path | None, out_file("--json", help="write all figures")]


@app.command(name="plan")
def plan_cluster(
    rate: Annotated[float | None, typer.Option(help="requests per second, coming by chance (Poisson)")] = None,
    prompt: Annotated[float | None, typer.Option(help="tokens of a prompt, the mean")] = None,
    output: Annotated[float | None, typer.Option(help="tokens of an output, the mean")] = None,
    hit_rate: Annotated[float, typer.Option(help="of a prompt's tokens: those that are cached, 0 to 1")] = 0.0,
    variation: Annotated[float, typer.Option(help="of both lengths: standard deviation over mean; 0: all equal")] = 0.5,
    gpu: Annotated[
        str | None,
        typer.Option(help="B200, H200, H100, A100, L40S, A10 or L4; default: H100; where --values names none"),
    ] = None,
    decode_gpu: Annotated[str | None, typer.Option(help="of decode workers, where they have others")] = None,
    model: Annotated[Path | None, model_option("default: Llama 3.1 8B; no weights are read")] = None,
    ttft: Annotated[float, typer.Option(help="SLO: seconds to the first token")] = 1.0,
    itl: Annotated[float, typer.Option(help="SLO: milliseconds between tokens, the mean of a request")] = 50.0,
    price: Annotated[float | None, typer.Option(help="USD per GPU and hour, any; default: a table's")] = None,
    block_tokens: Annotated[int, typer.Option(help="tokens of a KV block")] = 64,
    simulate: Annotated[int, typer.Option(help="try the plan with so many requests in virtual time")] = 0,
    values: Annotated[
        list[Path] | None,
        typer.Option(metavar="FILE", help="say whether each pool of the chart's values fits its device; repeatable"),
    ] = None,
    shape: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=SHAPE", help="of a model in --values: a known name, a directory, or org/name"),
    ] = None,
    json_path: JsonOut = None,
) -> None:
    """Print the smallest cluster of each kind that keeps the SLO: how many GPUs, disaggregated or not.

    The SLO must hold for nine of ten requests; every figure comes with its formula. For a trace of your own use `tandem
    replay`. With --values it says instead whether each pool of a chart's values fits its device, and exits with 1 where
    one does not.
    """
    from simulator.gpus import gpu_named
    from simulator.model_shape import open_shape
    from simulator.plan.load import Load
    from simulator.replay import Setup
    from simulator.results import Slo
    from tandem.cli.fit import parse_shapes, read_values, refuse_beside_values, show_fit
    from tandem.cli.plan import make_plan, needed

    load = {"rate": rate, "prompt": prompt, "output": output}
    if values:
        refuse_beside_values(load | {"model": model, "decode_gpu": decode_gpu, "simulate": simulate or None})
        named = gpu_named(gpu).name if gpu is not None else ""
        if not show_fit(console, read_values(values), parse_shapes(shape or []), named, json_path):
            raise typer.Exit(1)
        return
    if shape:
        raise typer.BadParameter("goes with --values only", param_hint="--shape")
    setup = Setup(
        model=open_shape(model),
        gpu=gpu_named("H100" if gpu is None else gpu),
        gpus=1,
        decode_gpu=None if decode_gpu is None else gpu_named(decode_gpu),
        slo=Slo(ttft, itl / 1e3),
        usd_per_gpu_hour=price,
        block_tokens=block_tokens,
    )
    means = {name: needed(name, value) for name, value in load.items()}
    make_plan(console, setup, Load(**means, hit_rate=hit_rate, variation=variation), simulate, json_path)


@app.command(name="replay")
def replay_trace(
    trace: Annotated[Path, typer.Argument(help="Mooncake's JSON lines, Azure's CSV, or a log of receipts")],
    gpus: Annotated[int, typer.Option(help="of every cluster that is compared")] = 8,
    gpu: Annotated[str | None, typer.Option(help="B200, H200, H100, A100, L40S, A10 or L4; default: H100")] = None,
    tp: Annotated[int | None, typer.Option(help="GPUs of one worker; default: 1")] = None,
    model: Annotated[Path | None, model_option("default: Llama 3.1 8B; no weights are read")] = None,
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
    price: Annotated[
        float | None, typer.Option(help="USD per GPU and hour; default: a table's; of a worker, with --calibration")
    ] = None,
    routers: Annotated[int, typer.Option(help="each with a view of its own")] = 1,
    lag: Annotated[
        float | None, typer.Option(help="milliseconds until a router hears of a cache or a load; default: 10")
    ] = None,
    store: Annotated[
        float | None, typer.Option(help="TB of a store for KV that all workers share; default: no store")
    ] = None,
    store_rate: Annotated[float, typer.Option(help="GB/s of that store in each direction, for all together")] = 10.0,
    block_tokens: Annotated[int | None, typer.Option(help="tokens of a KV block; default: 64")] = None,
    calibration: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="--gpus workers as `tandem calibrate` found them, instead of a GPU's"),
    ] = None,
    kill: Annotated[list[str] | None, typer.Option(metavar="WORKER@S", help="it dies then; repeatable")] = None,
    autoscale: Annotated[
        int | None, typer.Option(metavar="MOST", help="and a cluster that a planner sizes: up to so many of each role")
    ] = None,
    worker_start: Annotated[float, typer.Option(help="seconds until a worker that it starts serves")] = 60.0,
    swing: Annotated[float, typer.Option(help="the rate's highest, of its lowest: a sine, the lowest first")] = 1.0,
    period: Annotated[float, typer.Option(help="of that, in seconds after --rate")] = 3600.0,
    seed: Annotated[int, typer.Option(help="the same seed gives the same figures")] = 0,
    repeat: Annotated[
        int, typer.Option(metavar="SEEDS", help="at most so many, from --seed on, while the advice is undecided")
    ] = 4,
    json_path: JsonOut = None,
    png: Annotated[Path | None, out_file(help="draw the comparison; needs matplotlib")] = None,
    log_decisions: Annotated[Path | None, out_file(help="append placement's decisions")] = None,
) -> None:
    """Replay a trace through simulated clusters with the real router and engine.

    Answers whether to disaggregate. Time is virtual: computation and links are modelled, all decisions are made by the
    real code.
    """
    from simulator.calibration import Calibration
    from simulator.gpus import gpu_named
    from simulator.model_shape import open_shape
    from simulator.planned import autoscaled
    from simulator.replay import Setup, scenarios
    from simulator.results import Slo
    from simulator.traces.reading import Trace, Window
    from simulator.traces.swing import RateSwing
    from tandem.cli.replay import (
        compare,
        parse_failures,
        parse_modes,
        parse_policies,
        parse_splits,
        refuse_beside_calibration,
        seeds_that_differ,
        store_of,
    )

    if calibration is not None:
        theirs = {"gpu": gpu, "model": model, "tp": tp, "lag": lag, "block_tokens": block_tokens}
        refuse_beside_calibration([name for name, value in theirs.items() if value is not None])
    setup = Setup(
        model=open_shape(model),
        gpu=gpu_named("H100" if gpu is None else gpu),
        gpus=gpus,
        tp=1 if tp is None else tp,
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
    window = Window(rate, start, math.inf if duration is None else duration, requests, spread, seed)
    found = scenarios(setup, parse_modes(modes), parse_policies(policies), parse_splits(split or []))
    if autoscale is not None:
        found.append(autoscaled(setup, autoscale, worker_start))
    seeds = seeds_that_differ(repeat, spread, routers)

    def trace_of(seed: int) -> RateSwing:
        return RateSwing(Trace(trace, replace(window, seed=seed)), swing, period)

    compare(console, setup, found, trace_of, seeds, trace.name, json_path, png, log_decisions)


@app.command()
@asking
def bench(
    target: "Target",
    trace: Annotated[
        Path | None, typer.Argument(help="Mooncake's JSON lines, Azure's CSV, or a log of receipts; else a profile")
    ] = None,
    http: Annotated[str, typer.Option(metavar="URL", help="a server of OpenAI's API, instead of gRPC")] = "",
    model: Model = "",
    profile: Annotated[
        str, typer.Option(help="short-chat, long-context-qa, tool-calling or offline-batch")
    ] = "short-chat",
    scale: Annotated[float, typer.Option(help="multiplies the profile's lengths")] = 1.0,
    rate: Annotated[float, typer.Option(help="requests a second; of a trace: so many times as fast")] = 1.0,
    even: Annotated[bool, typer.Option("--even", help="equal gaps between requests, instead of Poisson")] = False,
    concurrency: Annotated[int | None, typer.Option(help="so many at a time, instead of a rate")] = None,
    start: Annotated[float, typer.Option(help="of a trace: leave out what comes before, in seconds")] = 0.0,
    spread: Annotated[float, typer.Option(help="of a trace, seconds: each comes up to so much later, by chance")] = 0.0,
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
    json_path: JsonOut = None,
    png: Annotated[Path | None, out_file(help="draw them; needs matplotlib")] = None,
    log: Annotated[
        Path | None,
        out_file(help="write requests and receipts, for replay and calibrate"),
    ] = None,
) -> None:
    """Load a live cluster, and measure what its clients see.

    In an open loop, times count from when a request was due, whenever it was sent. Sampling is greedy, and outputs are
    as long as the profile or the trace says (`ignore_eos`).
    """
    from simulator.errors import check_above_0
    from simulator.results import Slo
    from simulator.traces.reading import Trace, Window
    from simulator.workloads import profile_named
    from tandem.loadgen.command import OfferedLoad, OutputOptions, run_bench
    from tandem.loadgen.frontends import Frontend, GrpcFrontend, HttpFrontend

    check_above_0("timeout", timeout)
    check_above_0("vocab_size", vocab_size, or_0=True)
    check_above_0("context", context, or_0=True)
    load = OfferedLoad(
        profile=None if trace else profile_named(profile),
        trace=Trace(trace, Window(rate=rate, start_s=start, spread_s=spread, seed=seed)) if trace else None,
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


@app.command()
def calibrate(
    log: Annotated[Path, typer.Argument(help="of `tandem bench --log`")],
    out: Annotated[Path, out_file("--out", "-o", help="for `tandem replay --calibration`")],
    blocks: Annotated[int | None, typer.Option(help="of a worker's pool; default: 256 MiB of them", min=1)] = None,
    prefill_chunk: Annotated[int, typer.Option(help="max_prefill_tokens of the prefill workers", min=1)] = 512,
    decode_chunk: Annotated[int, typer.Option(help="and of the decode workers", min=1)] = 128,
    block_bytes: Annotated[int | None, typer.Option(help="of a KV block, where none moved")] = None,
    nic_gbps: Annotated[float | None, typer.Option(help="Gbit/s of a worker's NIC, where hardly any KV moved")] = None,
    model: Annotated[Path | None, model_option("instead of --block-bytes")] = None,
    gpu: Annotated[
        str | None, typer.Option(help="H100 and the like, instead of --nic-gbps: one such GPU's NIC")
    ] = None,
) -> None:
    """Fit the durations of a live cluster's steps, transfers and messages to its receipts.

    An aggregated cluster transfers nothing: give the duration of a transfer as an option there.
    """
    from simulator.fitting import AssumedRates
    from simulator.fitting import calibrate as fit
    from simulator.gpus import gpu_named
    from simulator.model_shape import open_shape
    from simulator.traces.reading import served_of
    from tandem.cli.calibrate import show_calibration

    nic_bytes_per_s = None if nic_gbps is None else nic_gbps * 1e9 / 8
    if nic_bytes_per_s is None and gpu is not None:
        nic_bytes_per_s = gpu_named(gpu).nic_bytes_per_s
    kv_token_bytes = None if model is None else open_shape(model).kv_bytes_per_token
    given = AssumedRates(kv_token_bytes, block_bytes, nic_bytes_per_s)
    found = fit(served_of(log), blocks, prefill_chunk, decode_chunk, given)
    found.write(out)
    show_calibration(console, found, out)
