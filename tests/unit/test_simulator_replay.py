"""Comparisons of clusters, and what a person sees of them."""

import io
import json
import math
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from cluster.errors import StartError
from engine.backends.sim.settings import StepTiming
from router.placement.snapshots import decided_again, read_recorded
from sizing.calibration import Calibration, LoggedFleet
from sizing.cluster.cluster import SimCluster
from sizing.comparison.planned import autoscaled
from sizing.comparison.replay import Scenario, Setup, learnt_by, replay, scenarios
from sizing.comparison.report import advice, as_json, tables_of
from sizing.gpus import gpu_named
from sizing.models.model_shape import DEFAULT_CONFIG, open_shape
from support.virtual_cluster import cluster_spec, random_requests
from tandem.cli.main import app
from tandem.cli.sizing.replay import seeds_that_differ
from tandem.progress import ShareProgress
from workloads.request import BadSetup, Outcome, TraceRequest
from workloads.results import Slo

LLAMA = open_shape(None)
SETUP = Setup(LLAMA, gpu_named("h100"), gpus=4)


def test_scenarios() -> None:
    names = [scenario.name for scenario in scenarios(SETUP, policies=("ours", "round-robin"))]
    assert names == [
        *("aggregated 4", "aggregated 4 round-robin"),
        *("disaggregated 1P:3D", "disaggregated 2P:2D", "disaggregated 3P:1D"),
        *("disaggregated 1P:3D round-robin", "disaggregated 2P:2D round-robin", "disaggregated 3P:1D round-robin"),
        *("conditional 1P:3D", "conditional 2P:2D", "conditional 3P:1D"),
    ]
    with pytest.raises(BadSetup, match="2:3 must add up to the 4 workers"):
        scenarios(SETUP, splits=[(2, 3)])
    with pytest.raises(BadSetup, match="tp"):
        Setup(LLAMA, gpu_named("H100"), gpus=4, tp=3)
    with pytest.raises(BadSetup, match="known are"):
        gpu_named("H1000")


def test_a_comparison_as_a_person_sees_it() -> None:
    trace = random_requests(5, 30, rate=20.0)
    runs = [replay(SETUP, scenario, trace) for scenario in scenarios(SETUP, splits=[(1, 3)])]
    assert [run.results.finished for run in runs] == [30, 30, 30]
    disaggregated = runs[1].results
    assert disaggregated.moved_bytes > 0
    assert runs[0].busy.keys() == {"decode"}
    console = Console(file=io.StringIO(), width=120)
    for table in tables_of(runs, SETUP):
        console.print(table)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert all(run.scenario.name in text for run in runs)
    again = as_json([replay(SETUP, run.scenario, trace) for run in runs], SETUP, "t")
    assert json.dumps(again) == json.dumps(as_json(runs, SETUP, "t"))
    cost = runs[0].results.usd_per_million_output_tokens
    assert cost == pytest.approx(4 * 3.0 * runs[0].results.duration_s / 3600 / runs[0].results.output_tokens * 1e6)


def test_a_long_last_output_decides_nothing() -> None:
    """Goodput is of the time in which requests come, the same for all clusters."""
    trace = [TraceRequest(number, 0.5 * number, 200, 20) for number in range(11)]
    slow = [*trace[:-1], replace(trace[-1], output_tokens=2000)]
    ordinary, straggling = (replay(SETUP, Scenario("aggregated", 0, 4), each).results for each in (trace, slow))
    assert straggling.duration_s > 2 * ordinary.duration_s
    assert straggling.kept == ordinary.kept == 11
    assert straggling.goodput_per_gpu == ordinary.goodput_per_gpu == pytest.approx(11 / 5.0 / 4)
    at_once = replay(SETUP, Scenario("aggregated", 0, 4), [replace(each, arrival_s=0.0) for each in trace]).results
    assert at_once.arrivals_s == SETUP.slo.ttft_s


def test_what_is_drawn_beside_the_slo_is_what_it_is_about() -> None:
    """The mean of each request; a single token has none."""
    trace = [TraceRequest(0, 0.0, 200, 1), TraceRequest(1, 5.0, 200, 40)]
    outcomes: list[Outcome] = []
    results = replay(SETUP, Scenario("aggregated", 0, 4), trace, on_end=outcomes.append).results
    assert results.request_itl_s.p50 == results.request_itl_s.p99 == outcomes[-1].itl_s


def test_every_logged_decision_is_made_again() -> None:
    log, seeds = io.StringIO(), random.Random(0)
    for shape in ((0, 3), (2, 3)):
        spec = replace(
            cluster_spec(*shape),
            make_fleet=lambda name, priors, learn: LoggedFleet(name, priors, learn, log),
            num_routers=2,
            seed=seeds.randrange(100),
        )
        SimCluster(spec, lambda _: None).run(random_requests(shape[0], 40, rate=15.0))
    lines = log.getvalue().splitlines()
    assert len(lines) >= 80
    logged = [read_recorded(json.loads(line)) for line in lines]
    assert all(decided_again(snapshot) == decision for decision, snapshot in logged)
    lenders = [decision.lender_id for decision, _ in logged]
    assert any(lenders)
    assert not all(lenders)


def write_trace(path: Path, count: int = 20) -> Path:
    rows = [
        {"timestamp": 100 * n, "input_length": 600 + 50 * (n % 5), "output_length": 40, "hash_ids": [n % 3, 100 + n]}
        for n in range(count)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_the_command(tmp_path: Path) -> None:
    trace, figures, log = write_trace(tmp_path / "t.jsonl"), tmp_path / "out.json", tmp_path / "log"
    options = ["--gpus", "2", "--split", "1:1", "--rate", "2", "--spread", "0.1", "--policies", "ours,least-loaded"]
    written = ["--json", str(figures), "--log-decisions", str(log)]
    done = CliRunner().invoke(app, ["replay", str(trace), *options, *written])
    assert done.exit_code == 0, done.output
    assert "conditional 1P:1D" in done.output
    said = json.loads(figures.read_text())
    assert [run["name"] for run in said["runs"]] == [
        *("aggregated 2", "aggregated 2 least-loaded", "disaggregated 1P:1D", "disaggregated 1P:1D least-loaded"),
        "conditional 1P:1D",
    ]
    assert all(run["results"]["finished"] == 20 for run in said["runs"])
    assert said["verdict"] == "even"
    assert said["advice"].startswith("Even")
    assert "95 % interval, 1 seed" in done.output.replace("\n", " "), "every request keeps the SLO in both"
    assert said["difference"]["interval"] == [0.0, 0.0]
    logged = [read_recorded(json.loads(line)) for line in log.read_text().splitlines()]
    assert all(decided_again(snapshot) == decision for decision, snapshot in logged)
    again = CliRunner().invoke(app, ["replay", str(trace), *options, "--json", str(tmp_path / "again.json")])
    assert again.exit_code == 0
    assert (tmp_path / "again.json").read_text() == figures.read_text()


UNDECIDED = ["--gpus", "2", "--split", "1:1", "--modes", "aggregated,disaggregated", "--ttft", "0.035", "--rate", "4"]


def test_the_command_repeats_what_is_undecided(tmp_path: Path) -> None:
    """A run that draws nothing at random is the same for every seed, so it is not repeated."""
    trace, figures = write_trace(tmp_path / "t.jsonl", 200), tmp_path / "out.json"

    def difference(*options: str) -> dict[str, Any]:
        done = CliRunner().invoke(app, ["replay", str(trace), *UNDECIDED, *options, "--json", str(figures)])
        assert done.exit_code == 0, done.output
        return json.loads(figures.read_text())["difference"]  # type: ignore[no-any-return]

    assert difference()["seeds"] == 1
    spread = difference("--spread", "1")
    assert 1 < spread["seeds"] <= 4
    assert len(set(spread["goodput_per_gpu"]["aggregated"])) == spread["seeds"]
    assert difference("--spread", "1", "--repeat", "1")["seeds"] == 1
    assert (seeds_that_differ(4, 0.0, 1), seeds_that_differ(4, 0.0, 2)) == (1, 4)


def test_progress_without_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    with ShareProgress(Console(), every_s=0.01) as progress, progress.part("aggregated 2", 50.0) as advance:
        advance(20.0)
        err = ""
        while "aggregated 2: 40% done, " not in err:
            out, more = capsys.readouterr()
            assert out == ""
            err += more
    terminal = Console(file=io.StringIO(), force_terminal=True, width=80)
    with ShareProgress(terminal, every_s=0.01) as progress, progress.part("aggregated 2", 50.0) as advance:
        advance(20.0)
    assert capsys.readouterr().err == ""
    assert "aggregated 2" in terminal.file.getvalue()  # type: ignore[attr-defined]


def test_the_command_with_a_planner(tmp_path: Path) -> None:
    trace, figures = write_trace(tmp_path / "t.jsonl"), tmp_path / "out.json"
    options = ["--gpus", "2", "--modes", "aggregated", "--swing", "10", "--period", "2", "--json", str(figures)]
    done = CliRunner().invoke(app, ["replay", str(trace), *options, "--autoscale", "3", "--worker-start", "0.5"])
    assert done.exit_code == 0, done.output
    assert "conditional 1P:1D autoscaled: workers" in done.output
    fixed, planned = json.loads(figures.read_text())["runs"]
    assert (fixed["sizes"], planned["results"]["finished"]) == ([], 20)
    assert planned["sizes"][0] == {
        "at_s": 0.0,
        "prefill": 1,
        "decode": 1,
        "starting": 0,
        "wanted_prefill": 1,
        "wanted_decode": 1,
    }
    assert planned["scenario"]["autoscale"]["policy"]["prefill"]["max_workers"] == 3


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--gpu", "TPU"], "gpu: 'TPU' is not known"),
        (["--split", "1-1"], "is not PREFILL:DECODE"),
        (["--modes", "both"], "modes: 'both' is not known"),
        (["--policies", "best"], "policies: 'best' is not known"),
        (["--kill", "decode-0000"], "is not WORKER@SECONDS"),
        (["--store", "0"], "store: 0 is not above 0"),
        (["--store", "1", "--store-rate", "nan"], "store_rate: nan is not above 0"),
        (["--kill", "nobody@1"], "nobody"),
        (["--gpus", "0"], "gpus: 0 is not at least 1"),
        (["--rate", "0"], "rate: 0.0 is not"),
        (["--lag", "-1"], "lag: -1 ms"),
        (["--autoscale", "0"], "autoscale: 0 is not at least 1"),
        (["--autoscale", "2", "--worker-start", "-1"], "worker_start: -1.0 is not a number of seconds from 0"),
        (["--swing", "0.5"], "swing: 0.5 is not at least 1"),
        (["--kill", "decode-0000@1", "--kill", "decode-0000@2"], "kill: decode-0000 is named twice"),
        (["--modes", 1000 * "x"], "x... is not known"),
        (["--split", "2:2"], "split: 2:2 must add up to the 2 workers"),
        (["--routers", "0"], "routers: 0 is not at least 1"),
        (["--tp", "2", "--gpus", "3"], "tp: 3 GPUs cannot be divided"),
        (["--tp", "3", "--gpus", "3"], "tp: 3 does not divide the 32 heads of Llama 3.1 8B"),
        (["--duration", "0"], "duration: 0.0 is not"),
        (["--repeat", "0"], "repeat: must be 1 to 10, not 0"),
        (["--repeat", "11"], "repeat: must be 1 to 10, not 11"),
        (["--png", "/nonexistent/x"], "there is no directory /nonexistent"),
        (["--log-decisions", "."], "--log-decisions: cannot write .: it is a directory"),
        (["--log-decisions", "log", "--modes", "disaggregated"], "log_decisions: has no effect"),
        (["--log-decisions", "log", "--policies", "round-robin"], "log_decisions: has no effect"),
    ],
)
def test_the_command_with_a_bad_option(tmp_path: Path, options: list[str], said: str) -> None:
    trace = write_trace(tmp_path / "t.jsonl", 2)
    done = CliRunner().invoke(app, ["replay", str(trace), "--gpus", "2", *options])
    assert done.exit_code != 0
    assert isinstance(done.exception, StartError)
    assert said in str(done.exception)


CALIBRATION = Calibration(
    decode=StepTiming(0.004, 1e-5),
    nic_bytes_per_s=1e9,
    read_latency_s=1e-5,
    message_s=1e-4,
    block_tokens=16,
    block_bytes=1 << 16,
    num_blocks=2000,
    not_measured={"block_bytes": "given"},
)


def test_routers_of_a_calibrated_cluster_know_how_fast_it_is() -> None:
    timing = StepTiming(step_s=0.01, prompt_token_s=1e-4, stream_s=2e-4)
    lent = StepTiming(step_s=0.02, prompt_token_s=5e-5)
    warm = learnt_by(CALIBRATION.model_copy(update={"decode": timing, "prefill": lent, "nic_bytes_per_s": 5e8}))
    assert warm.decode_prefill_tokens_per_s == pytest.approx(10_000)
    assert warm.prefill_tokens_per_s == pytest.approx(20_000)
    assert (warm.step_s, warm.stream_delay_s, warm.kv_bytes_per_s) == (0.01, 2e-4, 5e8)
    assert warm.loan_overhead_s == pytest.approx(0.003 + 0.01), "a lender's step is dearer by that"
    unseen = learnt_by(CALIBRATION.model_copy(update={"decode": timing, "decode_prompts": False}))
    assert unseen.decode_prefill_tokens_per_s == 1000, "their default"
    idle = learnt_by(CALIBRATION.model_copy(update={"decode": StepTiming(), "prefill": None}))
    assert 0 < idle.step_s < 1e-3
    assert 0 < idle.prefill_tokens_per_s < math.inf


def test_a_calibration_is_what_is_replayed_and_what_is_said(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    trace, figures, found = write_trace(tmp_path / "t.jsonl"), tmp_path / "out.json", tmp_path / "mine.json"
    CALIBRATION.write(found)
    options = ["--gpus", "2", "--modes", "aggregated", "--calibration", str(found), "--json", str(figures)]
    runner = CliRunner()
    done = runner.invoke(app, ["replay", str(trace), *options, "--autoscale", "2", "--png", str(tmp_path / "p.png")])
    assert done.exit_code == 0, done.output
    assert "2 workers as those of mine.json" in done.output
    assert "not measured: bytes of a block: given" in done.output
    assert "H100" not in done.output
    assert "USD" not in done.output
    said = json.loads(figures.read_text())
    assert (said["setup"]["gpu"], said["setup"]["calibration_name"]) == (None, "mine.json")
    assert said["setup"]["calibration"]["not_measured"] == {"block_bytes": "given"}
    assert said["runs"][0]["results"]["usd_per_million_output_tokens"] is None
    priced = runner.invoke(app, ["replay", str(trace), *options, "--price", "2"])
    assert "USD" in priced.output
    for option, value in (("gpu", "B200"), ("tp", "1"), ("lag", "500"), ("block-tokens", "64"), ("model", "x")):
        refused = runner.invoke(app, ["replay", str(trace), *options, f"--{option}", value])
        assert isinstance(refused.exception, BadSetup)
        assert str(refused.exception).startswith(f"{option.replace('-', '_')}: is already set by the calibration file")


def test_a_death_on_demand(tmp_path: Path) -> None:
    trace, figures = write_trace(tmp_path / "t.jsonl"), tmp_path / "out.json"
    options = ["--gpus", "2", "--modes", "aggregated", "--kill", "decode-0000@0.9", "--json", str(figures)]
    done = CliRunner().invoke(app, ["replay", str(trace), *options])
    assert done.exit_code == 0, done.output
    (run,) = json.loads(figures.read_text())["runs"]
    assert run["results"]["finished"] == 20
    assert run["results"]["placed_again"] > 0
    at_once = CliRunner().invoke(app, ["replay", str(trace), "--gpus", "2", "--kill", "decode-0000@0"])
    assert at_once.exit_code == 0, at_once.output


def test_prompts_longer_than_a_models_context_are_refused(tmp_path: Path) -> None:
    config = DEFAULT_CONFIG | {"max_position_embeddings": 800}
    (tmp_path / "config.json").write_text(json.dumps(config))
    trace = write_trace(tmp_path / "t.jsonl")
    options = ["--gpus", "2", "--modes", "aggregated", "--model", str(tmp_path)]
    done = CliRunner().invoke(app, ["replay", str(trace), *options])
    assert done.exit_code == 0, done.output
    assert "4 x longer than the model's context of 800 tokens" in done.output


def test_the_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from sizing.comparison.plot import write_plot

    trace = random_requests(5, 10, rate=20.0)
    setup = replace(SETUP, slo=Slo(0.05, 0.01))
    runs = [replay(setup, scenario, trace) for scenario in scenarios(setup, splits=[(1, 3)])]
    runs.append(replay(setup, autoscaled(setup, 2, 0.5), trace))
    write_plot(tmp_path / "p.png", runs, setup, "made up", 20 * "a long headline, ")
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")


def test_nothing_finished_is_no_number() -> None:
    refused = replay(SETUP, Scenario("aggregated", 0, 4), [TraceRequest(0, 0.0, 1 << 23, 1)])
    assert refused.results.refused == 1
    assert math.isnan(refused.results.ttft_s.mean)
    assert advice([refused, refused]) == "Nothing was served: larger than every pool"
    assert as_json([refused], SETUP, "t")["runs"][0]["results"]["ttft_s"]["mean"] is None
