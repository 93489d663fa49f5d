"""`tandem bench` and `tandem calibrate` against real clusters."""

import asyncio
import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from cluster.errors import StartError
from sizing.calibrate import calibrate
from sizing.calibration import Calibration
from support.long_runs import long
from support.processes import report_of, until
from tandem.cli.main import app
from tandem.loadgen.command import OfferedLoad, OutputOptions, run_bench
from tandem.loadgen.comparison import run_comparison
from tandem.loadgen.frontends import GrpcFrontend, HttpFrontend
from tandem.storyteller import STORYTELLER
from workloads.profiles import profile_named
from workloads.request import BadSetup
from workloads.results import Slo
from workloads.traces.reading import Trace, Window, served_of

TIMING = {"engine": "sim", "sim_step_ms": 2.0, "sim_prompt_token_us": 20.0, "sim_reads": "last"}


def quiet() -> Console:
    return Console(file=io.StringIO(), width=120)


async def test_what_is_offered_is_what_is_served_and_what_is_logged(
    model: Path, cluster_of: Any, tmp_path: Path
) -> None:
    files = {name: tmp_path / name for name in ("figures.json", "picture.png", "log")}
    async with cluster_of(model, prefill=1, decode=1, **TIMING) as cluster:
        load = OfferedLoad(profile_named("short-chat"), rate=40.0, most=60, scale=0.2, seed=3)
        wanted = OutputOptions(Slo(5.0, 1.0), 2, 3.0, *files.values())
        console = quiet()
        report = await run_bench(console, GrpcFrontend([cluster.address], "", 60), load, wanted)
    offered = list(load.requests(4096))
    results = report.results
    assert (results.requests, results.finished, results.refused, results.failed) == (60, 60, 0, 0)
    assert results.input_tokens == sum(request.input_tokens for request in offered)
    assert results.output_tokens == sum(request.output_tokens for request in offered)
    assert results.hit_rate > 0.2  # of a few system prompts, and of turns
    assert report.receipts.count == 60
    assert report.receipts.blocks["mismatched"] == 0
    assert report.receipts.blocks["moved"] == report.receipts.blocks["verified"]
    said = json.loads(files["figures.json"].read_text())
    assert said["results"]["finished"] == 60
    assert said["results"]["within_slo"] == 1.0
    assert files["picture.png"].read_bytes().startswith(b"\x89PNG")
    again = list(Trace(files["log"], Window()))
    assert [(each.input_tokens, each.output_tokens, each.hash_ids) for each in again] == [
        (each.input_tokens, each.output_tokens, each.hash_ids) for each in offered
    ]
    assert "60 finished" in console.file.getvalue()  # type: ignore[attr-defined]

    runner = CliRunner()
    found = tmp_path / "calibration.json"
    assert runner.invoke(app, ["calibrate", str(files["log"]), "-o", str(found)]).exit_code == 0
    assert Calibration.read(found) == calibrate(served_of(files["log"]))
    arguments = ["replay", str(files["log"]), "--gpus", "2", "--calibration", str(found), "--modes", "conditional"]
    replayed = runner.invoke(app, arguments)
    assert replayed.exit_code == 0, replayed.output
    assert "conditional 1P:1D" in replayed.output


async def test_text_has_about_as_many_tokens_as_it_should(cluster_of: Any) -> None:
    async with cluster_of(STORYTELLER, prefill=0, decode=1, engine="sim") as cluster:
        load = OfferedLoad(profile_named("short-chat"), concurrency=4, most=8, scale=0.15)
        report = await run_bench(
            quiet(), GrpcFrontend([cluster.address], "", 600, as_text=True), load, OutputOptions(Slo(60.0, 60.0))
        )
    assert report.results.finished == 8
    assert report.most_under_way == 4


async def test_interrupted_it_reports_what_is_over(model: Path, cluster_of: Any) -> None:
    async with cluster_of(model, prefill=0, decode=1, **TIMING) as cluster:
        load = OfferedLoad(profile_named("short-chat"), rate=20.0, duration_s=600.0, scale=0.1)
        console = quiet()
        running = asyncio.ensure_future(
            run_bench(console, GrpcFrontend([cluster.address], "", 60), load, OutputOptions(Slo(1.0, 1.0)))
        )

        async def at_work() -> bool:
            return (await report_of(cluster.decode[0].address)).requests > 0

        await until(at_work, "requests are on their way")
        await asyncio.sleep(2)
        running.cancel()
        report = await running
    assert 0 < report.results.finished < 100
    assert report.exit_code == 130
    assert "interrupted" in console.file.getvalue()  # type: ignore[attr-defined]


async def test_requests_longer_than_the_context_are_left_out_and_said_to_be(
    model: Path, cluster_of: Any, tmp_path: Path
) -> None:
    trace, figures, picture = tmp_path / "trace", tmp_path / "figures.json", tmp_path / "picture.png"
    rows = [{"timestamp": 0, "input_length": length, "output_length": 5} for length in (100, 1 << 20, 200)]
    trace.write_text("".join(json.dumps(row) + "\n" for row in rows))
    console = quiet()
    async with cluster_of(model, prefill=0, decode=1, **TIMING) as cluster:
        load, frontend = OfferedLoad(trace=Trace(trace, Window()), most=9), GrpcFrontend([cluster.address], "", 60)
        report = await run_bench(console, frontend, load, OutputOptions(Slo(5.0, 1.0), None, None, figures, picture))
    assert (report.results.finished, report.left_out, report.requests_of_trace, report.exit_code) == (2, 1, 3, 0)
    assert "1 of 3 left out: longer than the context" in console.file.getvalue()  # type: ignore[attr-defined]
    assert json.loads(figures.read_text())["left_out"] == {"longer_than_context": 1, "of": 3}
    trace.write_text(json.dumps(rows[1]) + "\n")
    async with cluster_of(model, prefill=0, decode=1, **TIMING) as cluster:
        with pytest.raises(BadSetup, match="all 1 requests are longer"):
            await run_bench(console, GrpcFrontend([cluster.address], "", 60), load, OutputOptions(Slo(5.0, 1.0)))


async def test_a_model_that_is_not_served_is_named(model: Path, cluster_of: Any) -> None:
    async with cluster_of(model, prefill=0, decode=1, **TIMING) as cluster:
        with pytest.raises(StartError, match="model: name one of"):
            await run_bench(
                quiet(),
                GrpcFrontend([cluster.address], "other", 60),
                OfferedLoad(profile_named("short-chat"), most=1),
                OutputOptions(Slo(1.0, 1.0)),
            )


@long
async def test_by_http_it_sees_the_same(cluster_of: Any) -> None:
    async with cluster_of(STORYTELLER, prefill=0, decode=1, engine="sim", router={"http_port": 0}) as cluster:
        load = OfferedLoad(profile_named("short-chat"), concurrency=4, most=8, scale=0.3)
        frontend = HttpFrontend(f"http://{cluster.router.http_address}", "", 60, receipts=True)
        report = await run_bench(quiet(), frontend, load, OutputOptions(Slo(60.0, 60.0)))
        wrong = HttpFrontend(f"http://{cluster.router.http_address}/v1", "other", 60)
        with pytest.raises(StartError, match="model: name one of"):
            await run_bench(quiet(), wrong, load, OutputOptions(Slo(1.0, 1.0)))
    offered = list(load.requests(2048))
    assert report.results.finished == 8
    assert report.results.output_tokens == sum(request.output_tokens for request in offered)
    assert report.results.input_tokens == sum(request.input_tokens for request in offered)
    assert report.receipts.count == 8


async def test_two_ways_to_the_same_workers_are_compared_without_sharing_prompts(cluster_of: Any) -> None:
    async with cluster_of(STORYTELLER, prefill=0, decode=1, router={"http_port": 0}, **TIMING) as cluster:
        port = cluster.router.http_address.rpartition(":")[2]
        urls = [f"http://{host}:{port}" for host in ("127.0.0.1", "localhost")]
        load = OfferedLoad(profile_named("short-chat"), rate=20.0, most=8, scale=0.15, seed=1)
        console = quiet()
        found = await run_comparison(console, {url: HttpFrontend(url, "", 600) for url in urls}, load, rounds=2)
    for results in (each for rounds in found.values() for each in rounds):
        assert (results.finished, results.failed) == (8, 0)
    hits = [results.hit_rate for rounds in found.values() for results in rounds]
    assert max(hits) < 0.9  # a repeated load would find all but the last block
    assert "/ the first" in console.file.getvalue()  # type: ignore[attr-defined]
