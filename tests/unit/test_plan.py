"""Plans: what formulas say, what they say at their edges, and what a simulated cluster of that size does."""

import json
import math
import os
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from cluster.errors import StartError
from sizing.comparison.replay import Setup, bill, roofline_of
from sizing.gpus import GPUS, gpu_named
from sizing.models.model_shape import DEFAULT_CONFIG, open_shape, shape_of
from sizing.plan.arithmetic import sections
from sizing.plan.layouts import AggregatedPlan, DisaggregatedPlan
from sizing.plan.load import Lengths, OfferedLoad
from sizing.plan.prompts import PromptSteps, line_of, waiting
from sizing.plan.search import GOAL, Option, apart_of, check, plan, requests_of, smallest
from sizing.plan.streams import crossing, poisson_share, share_within
from tandem.cli.common import console
from tandem.cli.main import app
from workloads.request import BadSetup
from workloads.results import Slo

LLAMA = open_shape(None)
LLAMA_70B = shape_of(
    "70B",
    DEFAULT_CONFIG
    | {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64},
)


def setup_of(gpu: str, ttft_s: float, itl_s: float, **changes: object) -> Setup:
    return Setup(LLAMA, gpu_named(gpu), gpus=1, slo=Slo(ttft_s, itl_s), **changes)  # type: ignore[arg-type]


# ------------------------------------------------------------------ parts


@pytest.mark.parametrize(
    ("field", "value"),
    [("rate", 0.0), ("rate", math.nan), ("prompt", 0.5), ("output", 1e9), ("hit_rate", 1.1), ("variation", -0.1)],
)
def test_a_load_that_cannot_be(field: str, value: float) -> None:
    given_load: dict[str, float] = {"rate": 1.0, "prompt": 100.0, "output": 100.0}
    with pytest.raises(BadSetup, match=field):
        OfferedLoad(**(given_load | {field: value}))


@given(mean=st.floats(50, 1e5), variation=st.floats(0, 2))
def test_lengths_have_their_mean(mean: float, variation: float) -> None:
    lengths = Lengths(mean, variation)
    assert lengths.mean_of(float) == pytest.approx(mean, rel=1e-3)
    assert sum(share for share, _ in lengths.parts) == pytest.approx(1)
    assert all(after >= before * (1 - 1e-6) for (_, before), (_, after) in pairwise(lengths.parts))


@pytest.mark.parametrize("variation", [0.5, 1.0, 2.0, 3.0])
def test_lengths_vary_as_they_should(variation: float) -> None:
    """Long tails too: with a few longest ones cut off, lines would be shorter than they are."""
    lengths = Lengths(1000, variation)
    assert lengths.square == pytest.approx(1e6 * (1 + variation**2))
    assert lengths.mean_of(lambda tokens: tokens**2) == pytest.approx(lengths.square, rel=0.02)
    below = sum(share for share, length in lengths.parts if length <= lengths.quantile(0.9))
    assert below == pytest.approx(0.9, abs=0.03)


def test_waits_of_one_server_are_known_exactly() -> None:
    random_service, equal_service = waiting(8.0, 1, 0.1, 1.0), waiting(8.0, 1, 0.1, 0.0)
    assert random_service.mean_of_all_s == pytest.approx(0.8 * 0.1 / 0.2)  # M/M/1
    assert equal_service.mean_of_all_s == pytest.approx(0.8 * 0.1 / 0.2 / 2)  # M/D/1
    assert random_service.share_over(0.0) == pytest.approx(0.8)
    assert random_service.share_over(1.0) == pytest.approx(0.8 * math.exp(-0.2 / 0.1))


def test_waits_of_several_servers_are_near_erlang() -> None:
    """M/M/4 at 80 %: Erlang's C is 0.5964."""
    wait = waiting(32.0, 4, 0.1, 1.0)
    assert wait.mean_of_all_s == pytest.approx(0.5964 * 0.1 / (4 * 0.2), rel=0.05)
    assert waiting(39.0, 4, 0.1, 1.0).full
    assert waiting(39.0, 4, 0.1, 1.0).share_over(1e9) == 1.0


def test_a_prompt_alone_takes_the_sum_of_its_steps() -> None:
    roofline = roofline_of(setup_of("H100", 1, 0.05), "prefill", apart=True)
    steps = PromptSteps(roofline, 4096, 0.0)
    seconds, count = steps.alone(10_000)
    assert count == 3
    one_by_one = sum(
        steps.step_s(tokens, tokens * start + tokens * (tokens + 1) / 2)
        for start, tokens in ((0, 4096), (4096, 4096), (8192, 1808))
    )
    assert seconds == pytest.approx(one_by_one, rel=1e-6)
    packed, parts = steps.packed(10_000)
    assert parts == pytest.approx(10_000 / 4096)
    assert packed < seconds
    cached = PromptSteps(roofline, 4096, 0.75)
    assert cached.alone(10_000)[1] == 1
    assert cached.pairs(10_000) == pytest.approx(2500 * 7500 + 2500 * 2501 / 2)


def test_short_prompts_share_steps_when_many_are_in_line() -> None:
    """On an L4 a prompt of 100 tokens takes as long as the weights take to be read: 40 of them hardly longer."""
    steps = PromptSteps(roofline_of(setup_of("L4", 1, 0.05), "prefill", apart=True), 4096, 0.0)
    prompts = Lengths(100, 0.0)
    few, many = (line_of(steps, prompts, rate, 1) for rate in (0.1, 30.0))
    assert few.service_s == pytest.approx(steps.alone(100)[0], rel=0.01)
    assert few.together == 1
    assert many.service_s < few.service_s / 2
    assert many.busy == pytest.approx(1.0)
    assert many.together == pytest.approx(30 * (many.fixed_s + many.together * many.packed_s))  # who comes in a step
    assert not many.waiting.full


def test_crossings() -> None:
    assert crossing(lambda x: x - 3, 0.0, 10.0) == pytest.approx(3)
    assert crossing(lambda x: x - 30, 0.0, 10.0) == 10.0
    assert share_within(0.5, 0.0) == 0.0
    assert share_within(100.0, 50.0) > 0.999
    assert share_within(60.0, 60.0) == pytest.approx(0.5, abs=0.05)
    assert poisson_share(2.9, 1.5) == pytest.approx(math.exp(-1.5) * (1 + 1.5 + 1.125))
    assert poisson_share(55, 50.0) == pytest.approx(poisson_share(55, 50.001), abs=0.01)


loads = st.builds(
    OfferedLoad,
    rate=st.floats(0.1, 60),
    prompt=st.floats(50, 20_000),
    output=st.floats(1, 800),
    hit_rate=st.sampled_from([0.0, 0.5, 0.95]),
    variation=st.sampled_from([0.0, 0.5, 1.5]),
)
gpus = st.sampled_from(["H100", "A100", "L4"])


@settings(max_examples=40, deadline=None)
@given(load=loads, gpu=gpus, workers=st.integers(1, 20), ttft_s=st.floats(0.05, 5), itl_s=st.floats(0.01, 0.2))
def test_more_workers_keep_no_less_and_parts_are_shares(
    load: OfferedLoad, gpu: str, workers: int, ttft_s: float, itl_s: float
) -> None:
    setup = setup_of(gpu, ttft_s, itl_s)
    models: list[tuple[DisaggregatedPlan | AggregatedPlan, DisaggregatedPlan | AggregatedPlan]] = [
        (AggregatedPlan(setup, load, workers), AggregatedPlan(setup, load, 2 * workers)),
        (apart_of(setup, load, workers, workers), apart_of(setup, load, 2 * workers, 2 * workers)),
    ]
    for model, larger in models:
        assert all(0 <= part <= 1 for part in model.parts.values())
        assert larger.kept >= min(model.kept, GOAL) - 0.01


ADVICE = {"disaggregate": "Disaggregate: ", "aggregate": "Do not disaggregate: ", "even": "Even, ", None: "Nothing "}


@settings(max_examples=8, deadline=None)
@given(load=loads, gpu=gpus, ttft_s=st.floats(0.2, 5), itl_s=st.floats(0.02, 0.2))
def test_a_plan_is_smallest_and_its_arithmetic_whole(load: OfferedLoad, gpu: str, ttft_s: float, itl_s: float) -> None:
    made = plan(setup_of(gpu, ttft_s, itl_s), load)
    for option in (made.apart, made.together):
        if option is None:
            continue
        assert option.model.kept >= GOAL
        assert (option.gpus, option.usd_per_hour) == bill(option.setup, option.scenario)
        assert smaller_keeps_less(option)
    assert (made.apart is None) == ("disaggregated" in made.why_not)
    assert (made.together is None) == ("aggregated" in made.why_not)
    for _, lines in sections(made):
        assert all(line.value >= 0 and line.how for line in lines)
    assert made.advice.startswith(ADVICE[made.verdict])


def smaller_keeps_less(option: Option) -> bool:
    """With a worker less, wherever there is one to take."""
    setup, load, scenario = option.setup, option.model.load, option.scenario
    if isinstance(option.model, AggregatedPlan):
        return scenario.decode == 1 or AggregatedPlan(setup, load, scenario.decode - 1).kept < GOAL
    prefill, decode = scenario.prefill, scenario.decode
    smaller = [(prefill - 1, decode), (prefill, decode - 1)]
    return all(apart_of(setup, load, *shape).kept < GOAL for shape in smaller if min(shape))


def test_the_smallest_number() -> None:
    for wanted in (1, 2, 3, 7, 8, 9, 1000):
        assert smallest(lambda count: float(count >= wanted)) == wanted  # noqa: B023
    assert smallest(lambda _: 0.89) is None


def test_equal_or_uncertain_prices_are_even() -> None:
    """A difference counts if it stays with so much more load as the formulas may be wrong by."""
    same = plan(setup_of("A10", 0.5, 0.08), OfferedLoad(40, 250, 150))
    assert (same.verdict, same.advice) == (
        "even",
        "Even, so do not disaggregate: aggregated has fewer parts, and both take 3.75 USD an hour",
    )
    near = plan(setup_of("H100", 1.0, 0.016), OfferedLoad(20, 4000, 200))
    assert near.harder.gpus > near.together.gpus
    assert near.verdict == "even"
    assert near.advice.endswith(
        "; 15.00 USD an hour instead of 12.00 USD an hour, +25%, but with 15% more load, which is how exact the"
        " formulas are, aggregated takes 18.00 USD an hour"
    )


def test_what_is_clearly_cheaper_or_alone_keeps_the_slo_is_advised() -> None:
    """Splitwise's coding service: prefill on H100, decode on A100."""
    mixed = Setup(LLAMA_70B, GPUS["H100"], gpus=8, tp=8, decode_gpu=GPUS["A100"], slo=Slo(0.9, 0.026))
    made = plan(mixed, OfferedLoad(40, 2048, 28, variation=0.8))
    assert made.together is not None
    assert made.apart.usd_per_hour < made.harder.usd_per_hour < made.together.usd_per_hour
    assert (made.verdict, made.advice[:13]) == ("disaggregate", "Disaggregate:")
    alone = replace(made, together=None, why_not={"aggregated": "itl: too slow"})
    assert alone.verdict == "disaggregate"
    assert alone.advice == "Disaggregate: without, no cluster keeps the SLO: itl: too slow"
    other = replace(made, apart=None, why_not={"disaggregated": "ttft: too slow"})
    assert other.verdict == "aggregate"
    neither = replace(made, apart=None, together=None, why_not={"aggregated": "itl: too slow"})
    assert neither.verdict is None


# ------------------------------------------------------------------ bounds


@pytest.mark.parametrize(
    ("gpu", "slo", "load", "said"),
    [
        ("L4", (0.1, 0.2), OfferedLoad(0.1, 8000, 100), "ttft: a prompt of"),
        ("L4", (2.0, 0.005), OfferedLoad(0.1, 100, 100), "itl: a step of a single stream takes"),
        ("L4", (1e5, 0.5), OfferedLoad(0.001, 3_000_000, 100), "memory: a stream has"),
    ],
)
def test_what_no_number_of_gpus_mends(gpu: str, slo: tuple[float, float], load: OfferedLoad, said: str) -> None:
    made = plan(setup_of(gpu, *slo), load)
    assert made.apart is None
    assert made.together is None
    assert made.advice.startswith("Nothing keeps the SLO: " + said)
    assert all(reason.startswith(said) for reason in made.why_not.values())


@pytest.mark.parametrize("rate", [4e5, 1e6])
def test_more_workers_than_a_plan_counts_are_said_to_be(rate: float) -> None:
    made = plan(setup_of("H100", 1.0, 0.05), OfferedLoad(rate, 8000, 500))
    assert "would take more than 16,384 of them in a pool" in made.advice
    assert made.advice.startswith(("Nothing keeps the SLO: workers: ", "Nothing to compare: workers: "))


def test_own_gpus_cost_nothing_and_are_counted() -> None:
    load = OfferedLoad(20, 2000, 200)
    free, paid = (plan(setup_of("H100", 1, 0.05, usd_per_gpu_hour=price), load) for price in (0.0, 3.0))
    for one, other in ((free.apart, paid.apart), (free.together, paid.together)):
        assert (one.gpus, one.usd_per_hour) == (other.gpus, 0.0)
    assert free.advice == "Do not disaggregate: 3 GPUs instead of 2 GPUs, +50%"


def test_a_large_model_takes_tensor_parallelism() -> None:
    made = plan(replace(setup_of("H100", 2.0, 0.05), model=LLAMA_70B), OfferedLoad(2, 2000, 200))
    assert made.together.setup.tp >= 4  # 141 GB of weights; two H100 have 144 GB that can be used
    huge = shape_of("huge", DEFAULT_CONFIG | {"num_hidden_layers": 4000})
    with pytest.raises(BadSetup, match="weights"):
        plan(replace(setup_of("L4", 1, 0.05), model=huge), OfferedLoad(1, 100, 10))


def test_pools_of_different_gpus() -> None:
    load = OfferedLoad(40, 4000, 30)
    same = plan(setup_of("H100", 1, 0.05), load).apart
    mixed = plan(setup_of("H100", 1, 0.05, decode_gpu=GPUS["A10"]), load).apart
    assert same is not None
    roofline = mixed.model.decode.streams.roofline  # type: ignore[union-attr]
    assert roofline.gpu.name == "A10"
    assert mixed.model.prefill.line.steps.roofline.gpu.name == "H100"  # type: ignore[union-attr]
    assert mixed.usd_per_hour == pytest.approx(
        mixed.scenario.prefill * mixed.setup.tp * 3.0 + mixed.scenario.decode * (mixed.setup.decode_tp or 1) * 0.75
    )
    assert check(mixed, 300).results.kept_share >= GOAL


def test_the_links_can_be_what_is_short() -> None:
    slow = replace(GPUS["H100"], nic_bytes_per_s=2e9)
    load = OfferedLoad(20, 4000, 100)
    apart = apart_of(replace(setup_of("H100", 1, 0.05), gpu=slow), load, 4, 2)
    assert apart.link_utilisation > 1
    assert apart.kept == 0
    wide = apart_of(setup_of("H100", 1, 0.05), load, 4, 2)
    assert wide.link_utilisation == pytest.approx(20 * 4000 * LLAMA.kv_bytes_per_token / (2 * 50e9))


# ------------------------------------------------------------------ the simulator has the last word

TRIED = {
    "short chat, A10": ("A10", 0.5, 0.08, OfferedLoad(40, 250, 150), 700, 300),
    "long context, H100": ("H100", 3.0, 0.04, OfferedLoad(4, 12_000, 100), 300, 100),
    "decode-heavy, A100": ("A100", 0.5, 0.03, OfferedLoad(60, 200, 200), 700, 450),
    "prefill-heavy, H100": ("H100", 1.0, 0.05, OfferedLoad(30, 4000, 20), 500, 200),
}
"""GPU, SLO, load; requests through the planned cluster, and through half of it."""
ALL = [(name, kind) for name in TRIED for kind in ("together", "apart")]
QUICK = [("short chat, A10", "together"), ("prefill-heavy, H100", "apart")]


@pytest.mark.parametrize(("name", "kind"), ALL if os.environ.get("TANDEM_PLANS") == "all" else QUICK)
def test_a_simulated_cluster_of_the_planned_size_keeps_the_slo_and_half_of_it_does_not(name: str, kind: str) -> None:
    gpu, ttft_s, itl_s, load, count, count_of_half = TRIED[name]
    option = getattr(plan(setup_of(gpu, ttft_s, itl_s), load), kind)
    assert check(option, count).results.kept_share >= GOAL
    scenario = option.scenario
    half = replace(scenario, prefill=scenario.prefill // 2 or scenario.prefill, decode=scenario.decode // 2 or 1)
    assert bill(option.setup, half)[0] <= 0.6 * option.gpus
    assert check(replace(option, scenario=half), count_of_half).results.kept_share < GOAL


def test_requests_are_as_the_plan_assumes_them() -> None:
    load = OfferedLoad(10, 1000, 50, hit_rate=0.5)
    requests = list(requests_of(load, 4000))
    assert requests[-1].arrival_s == pytest.approx(400, rel=0.05)
    assert sum(each.input_tokens for each in requests) / 4000 == pytest.approx(1000, rel=0.05)
    assert sum(each.output_tokens for each in requests) / 4000 == pytest.approx(50, rel=0.05)
    one, other = requests[0].tokens(), requests[1].tokens()
    shared = next(place for place, (a, b) in enumerate(zip(one, other, strict=False)) if a != b)
    assert shared == pytest.approx(min(len(one), len(other)) / 2, abs=64)
    assert requests == list(requests_of(load, 4000))


# ------------------------------------------------------------------ the command

OPTIONS = ["plan", "--rate", "5", "--prompt", "2000", "--output", "100"]


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    figures = tmp_path / "plan.json"
    monkeypatch.setattr(console, "width", 180)
    done = CliRunner().invoke(app, [*OPTIONS, "--simulate", "100", "--json", str(figures)])
    assert done.exit_code == 0, done.output
    for text in ("2 x 32 layers x 8 KV heads x 128 x 2 B", "Little", "M/G/1", "E[output²]", "100 simulated requests"):
        assert text in done.output
    said = json.loads(figures.read_text())
    assert said["aggregated"]["gpus"] == 1
    assert said["disaggregated"]["gpus"] == 2
    assert said["verdict"] == "aggregate"
    assert said["advice"] == "Do not disaggregate: 6.00 USD an hour instead of 3.00 USD an hour, +100%"
    assert said["simulated"]["aggregated 1"] >= GOAL
    assert said["arithmetic"]["model and load"][1] == {
        "what": "KV of a token",
        "how": "2 x 32 layers x 8 KV heads x 128 x 2 B",
        "value": 131.072,
        "unit": "kB",
    }


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--gpu", "TPU"], "gpu: 'TPU' is not known"),
        (["--decode-gpu", "TPU"], "gpu: 'TPU' is not known"),
        (["--hit-rate", "2"], "hit_rate: 2 is not from 0 to 1"),
        (["--rate", "0"], "rate: 0 is not above 0 to 1e+06"),
        (["--simulate", "-1"], "simulate: -1 is not at least 0"),
        (["--block-tokens", "0"], "block_tokens: 0 is not at least 1"),
        (["--price", "-1"], "price: -1 is not at least 0"),
        (["--price", "inf"], "price: inf is not at least 0"),
        (["--itl", "nan"], "itl: nan is not above 0"),
        (["--ttft", "-1"], "ttft: -1 is not above 0"),
        (["--json", "/nonexistent/x"], "--json: cannot write /nonexistent/x: there is no directory /nonexistent"),
        (["--json", "."], "--json: cannot write .: it is a directory"),
        (["--json", 300 * "x"], "File name too long"),
    ],
)
def test_the_command_with_a_bad_option(options: list[str], said: str) -> None:
    done = CliRunner().invoke(app, [*OPTIONS, *options])
    assert isinstance(done.exception, StartError)
    assert said in str(done.exception)
