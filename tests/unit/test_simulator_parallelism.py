"""Stages and groups in sizing: the arithmetic by hand, and groups that live and die together."""

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from engine.backends.sim.settings import StepWork
from sizing.cluster.cluster import Failure
from sizing.comparison.planned import autoscaled
from sizing.comparison.replay import Setup, cluster_spec, scenarios
from sizing.gpus import GPUS, HOST_GPUS, Gpu, Roofline
from sizing.models.known_models import known_shape
from sizing.models.model_shape import ModelShape
from sizing.plan.load import OfferedLoad
from sizing.plan.search import plan
from workloads.request import BadSetup

H100, H200 = GPUS["H100"], GPUS["H200"]


LLAMA_405B, DEEPSEEK_V3 = known_shape("llama-3.1-405b"), known_shape("deepseek-v3")


def setup_of(shape: ModelShape, gpu: Gpu, **others: Any) -> Setup:
    return Setup(model=shape, gpu=gpu, **others)


# ------------------------------------------------------------------ the arithmetic


def test_stages_divide_the_work_of_a_step_and_not_its_weights() -> None:
    """A batch of each stage reads all weights on its way, over the bandwidth of one stage."""
    one, two = Roofline(LLAMA_405B, H200, 8), Roofline(LLAMA_405B, H200, 8, pp=2)
    assert two.gpus == 16
    single = StepWork(streams=1, context_tokens=1)
    assert two.seconds_of(single) == pytest.approx(one.seconds_of(single), rel=1e-6)
    prompt = StepWork(prompt_tokens=8192, prompt_pairs=8192 * 4096)
    assert two.seconds_of(prompt) - two.step_s == pytest.approx((one.seconds_of(prompt) - one.step_s) / 2)
    contexts = StepWork(streams=64, context_tokens=64 * 4096)
    kv_s = 64 * 4096 * LLAMA_405B.kv_bytes_per_token / (4.8e12 * 0.75 * one.effective_gpus)
    assert one.seconds_of(contexts) - two.seconds_of(contexts) == pytest.approx(kv_s / 2)


def test_stages_have_their_memory_together() -> None:
    with pytest.raises(BadSetup, match="812 GB of weights, 8 x H100 have 640 GB"):
        Roofline(LLAMA_405B, H100, 8).num_blocks(64)
    blocks = Roofline(LLAMA_405B, H100, 8, pp=2).num_blocks(64)
    assert blocks == (16 * 80e9 * 0.9 - LLAMA_405B.weight_bytes) // (64 * 516_096)


def test_a_group_has_each_expert_once_and_the_rest_in_each_worker() -> None:
    """61 layers, 3 of them dense; 58 x 256 experts of 3 x 7168 x 2048 parameters in float8."""
    experts = 58 * 256 * 3 * 7168 * 2048
    assert DEEPSEEK_V3.expert_layers == 58
    assert DEEPSEEK_V3.expert_bytes == experts
    roofline = Roofline(DEEPSEEK_V3, H200, dp=16)
    assert roofline.weight_bytes == DEEPSEEK_V3.weight_bytes - experts * 15 / 16
    assert roofline.num_blocks(64) == (141e9 * 0.9 - roofline.weight_bytes) // (64 * 70_272)


def test_a_worker_of_a_group_reads_its_experts_for_the_tokens_of_all() -> None:
    alone, shared = DEEPSEEK_V3.weight_bytes_read(4), DEEPSEEK_V3.weight_bytes_read(4, 16)
    rest = DEEPSEEK_V3.weight_bytes - DEEPSEEK_V3.expert_bytes
    assert alone - rest == pytest.approx(DEEPSEEK_V3.expert_bytes * (1 - (1 - 8 / 256) ** 4))
    assert shared - rest == pytest.approx(DEEPSEEK_V3.expert_bytes / 16 * (1 - (1 - 8 / 256) ** 64))


def test_hidden_states_cross_hosts_and_no_more() -> None:
    """Each token goes to the other host once, in float8, and comes back in bfloat16, in each of 58 layers."""
    prompt = StepWork(prompt_tokens=1000, prompt_pairs=500_000)
    here = Roofline(DEEPSEEK_V3, H200, dp=HOST_GPUS)
    both = Roofline(DEEPSEEK_V3, H200, dp=2 * HOST_GPUS)
    exchange_s = 1000 * 58 * 7168 * 3 / 50e9
    assert both.seconds_of(prompt) - here.seconds_of(prompt) == pytest.approx(exchange_s)
    many = Roofline(DEEPSEEK_V3, H200, dp=16 * HOST_GPUS)  # a token has 8 experts, on as many hosts at most
    assert many.seconds_of(prompt) - here.seconds_of(prompt) == pytest.approx(8 * exchange_s)


# ------------------------------------------------------------------ clusters


def test_a_model_that_fits_no_host_is_planned_with_stages() -> None:
    load = OfferedLoad(rate=2, prompt=2000, output=300)
    made = plan(setup_of(LLAMA_405B, H200, gpus=1), load)
    assert made.setup.pp == 1
    made = plan(setup_of(LLAMA_405B, H100, gpus=1, slo=replace(Setup(LLAMA_405B, H100, 1).slo, itl_s=0.1)), load)
    assert made.setup.pp == 2
    workers, setup = made.together.scenario.decode, made.together.setup
    assert (setup.tp, setup.pp) == (8, 2)
    assert made.together.gpus == 16 * workers


def test_a_plan_with_groups_has_whole_groups_only() -> None:
    made = plan(setup_of(DEEPSEEK_V3, H200, gpus=16, dp=16), OfferedLoad(rate=40, prompt=2000, output=500))
    shape = made.apart.scenario
    assert (made.together.scenario.decode % 16, shape.prefill % 16, shape.decode % 16) == (0, 0, 0)


def test_replayed_clusters_have_whole_groups() -> None:
    setup = setup_of(DEEPSEEK_V3, H200, gpus=64, dp=16)
    shapes = {(each.prefill, each.decode) for each in scenarios(setup)}
    assert shapes == {(0, 64), (16, 48), (32, 32), (48, 16)}
    with pytest.raises(BadSetup, match="split: workers come in groups of 16"):
        scenarios(setup, splits=[(8, 56)])
    with pytest.raises(BadSetup, match="autoscale"):
        autoscaled(setup, 8, 60.0)


def test_a_worker_takes_its_group_with_it() -> None:
    setup = setup_of(DEEPSEEK_V3, H200, gpus=32, dp=16, failures=(Failure(10.0, "decode-0017"),))
    (scenario,) = scenarios(setup, modes=["aggregated"])
    killed = Counter(failure.worker_id for failure in cluster_spec(setup, scenario).failures)
    assert killed == Counter(f"decode-{number:04}" for number in range(16, 32))


@pytest.mark.parametrize(
    ("shape", "others", "said"),
    [
        (LLAMA_405B, {"gpus": 8, "dp": 8}, "dp: llama-3.1-405b has no experts"),
        (DEEPSEEK_V3, {"gpus": 24, "dp": 24}, "dp: 24 does not divide the 256 experts"),
        (DEEPSEEK_V3, {"gpus": 24, "dp": 16}, "dp: 24 GPUs cannot be divided into groups of 16 workers of 1"),
        (LLAMA_405B, {"gpus": 8, "tp": 8, "pp": 2}, "pp: 8 GPUs cannot be divided into workers of 16"),
        (LLAMA_405B, {"gpus": 127, "pp": 127}, "pp: 127 is above the 126 layers"),
        (LLAMA_405B, {"gpus": 8, "pp": 0}, "pp: 0 is not at least 1"),
    ],
)
def test_shapes_that_cannot_be(shape: ModelShape, others: dict[str, Any], said: str) -> None:
    with pytest.raises(BadSetup, match=said):
        setup_of(shape, H200, **others)
