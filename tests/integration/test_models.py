"""Two models of different vocabulary behind one router, and a third without workers: real processes, sim engines."""

import asyncio
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from cluster.errors import InvalidRequest, ServiceError, StartError, Unavailable, UnknownModel
from engine.config import WorkerConfig
from protos import inference_pb2 as pb
from support.processes import (
    Stream,
    alive,
    assert_equal_answers,
    engine_of,
    finished,
    kill_worker,
    named,
    state_of,
    until,
)
from support.refusals import refusal_of
from support.sim_directories import write_sim_model, write_tokenizer
from tandem.cli.client.explain import model_table
from tandem.client import Client
from tandem.local.local_cluster import LocalCluster, start_role
from tandem.topology import ClusterModel, plan_models

SIM: dict[str, Any] = {"engine": "sim", "sim_step_ms": 4.0, "max_prefill_tokens": 64, "kv_memory_mib": 4}
RULES = [
    {"name": "drafts", "tasks": ["draft"], "models": ["small", "idle"]},
    {"name": "short", "max_prompt_tokens": 100, "min_quality": 0.0, "models": ["small", "large"]},
    {"name": "long", "models": ["large", "idle"]},
]
SHORT, LONG = "x" * 60, "y" * 300
"""A token is a byte."""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[ClusterModel]:
    folder = tmp_path_factory.mktemp("served")
    for name, vocab_size in (("small", 600), ("large", 900), ("idle", 700)):
        write_tokenizer(write_sim_model(folder / name, vocab_size), vocab_size)
    return [
        ClusterModel(path=folder / "small", input_price=1, output_price=2, quality=0.4, prefill=0),
        ClusterModel(
            path=folder / "large", input_price=10, output_price=20, quality=0.9, tasks=("code",), worker={"port": 0}
        ),
        ClusterModel(path=folder / "idle", quality=0.1, prefill=0, decode=0),
    ]


def cluster_of(models: list[ClusterModel], **router: Any) -> LocalCluster:
    settings = {"port": 0, "no_worker_grace_s": 0.3, "model_rules": RULES} | router
    return LocalCluster(plan_models(models, settings, SIM, sorted(os.sched_getaffinity(0))))


async def answer(client: Client, text: str, max_tokens: int = 5, **asked: Any) -> pb.Finish:
    sampling = pb.Sampling(max_tokens=max_tokens, temperature=0, ignore_eos=True, **asked.pop("sampling", {}))
    async for message in client.generate(text, sampling=sampling, timeout_s=30, **asked):
        last = message
    return last.finish


async def test_requests_go_to_the_model_they_name_or_to_the_one_the_rules_choose(models: list[ClusterModel]) -> None:
    async with cluster_of(models) as cluster, Client(cluster.address) as client:
        listed = {model.name: model for model in await client.list_models()}
        assert [(m.name, m.vocab_size, m.prefill_workers, m.decode_workers) for m in listed.values()] == [
            ("small", 600, 0, 1),
            ("large", 900, 1, 1),
            ("idle", 700, 0, 0),
        ]
        assert (listed["large"].output_per_million, list(listed["large"].tasks)) == (20, ["code"])
        assert not listed["idle"].HasField("input_per_million")

        # Named.
        for name in ("small", "large"):
            finish = await answer(client, SHORT, model=name)
            assert (finish.receipt.model, finish.receipt.model_reason) == (name, "named by the request")
            assert finish.receipt.placement.decode_worker == f"{name}-decode-0"
        price = finish.receipt.price
        assert (price.input_per_million, price.output_per_million) == (10, 20)
        assert (price.input, price.output) == pytest.approx((60 * 10 / 1e6, 5 * 20 / 1e6))
        several = await answer(client, SHORT, model="large", sampling={"n": 3})
        assert several.usage.completion_tokens == 5, "of one choice"
        assert several.receipt.price.output == pytest.approx(3 * 5 * 20 / 1e6)

        # By price, by length, by quality, by task.
        cheap = (await answer(client, SHORT, model="auto")).receipt
        assert cheap.model == "small"
        assert cheap.model_reason == (
            "auto: rule 'short': the cheapest that is fit at 7e-05; passed over: "
            "large (estimated no cheaper); idle (not allowed by the rule)"
        )
        long = (await answer(client, LONG, model="auto")).receipt
        assert long.model == "large"
        assert "rule 'long'" in long.model_reason
        assert "idle (no decode worker)" in long.model_reason
        good = (await answer(client, SHORT, model="auto", min_quality=0.5)).receipt
        assert good.model == "large"
        assert "small (it has quality 0.4, below the 0.5 asked)" in good.model_reason
        assert (await answer(client, LONG, model="auto", task="draft")).receipt.model == "small"

        await explained(client)
        await refused(client)
        await a_worker_of_another_model(cluster, client, models)


async def explained(client: Client) -> None:
    explanation = await client.explain(LONG, model="auto", max_ttft_ms=20_000, sampling=pb.Sampling(max_tokens=5))
    assert explanation.model == "large"
    assert {candidate.decode_worker for candidate in explanation.candidates} == {"large-decode-0"}
    small, large, idle = explanation.models
    assert (small.model, small.fit, small.verdict) == ("small", False, "not allowed by the rule")
    assert (large.fit, large.counted, large.prompt_tokens) == (True, True, 300)
    assert large.price == pytest.approx((300 * 10 + 5 * 20) / 1e6)
    assert 0 < large.ttft_ms < 20_000
    assert (idle.fit, idle.verdict) == (False, "no decode worker")
    console = Console(width=160, record=True)
    console.print(model_table(explanation.models))
    shown = console.export_text()
    assert "not allowed by the rule" in shown
    assert f"{large.ttft_ms:.1f}" in shown
    by_name = await client.explain(SHORT, model="small")
    assert (by_name.model, by_name.model_reason, len(by_name.models)) == ("small", "named by the request", 0)


async def refused(client: Client) -> None:
    cases: list[tuple[dict[str, Any], type[ServiceError], str, str]] = [
        ({"model": "medium"}, UnknownModel, "model", "'small', 'large', 'idle' are"),
        ({}, InvalidRequest, "model", "is empty, but several models are served"),
        ({"model": "idle"}, Unavailable, "", "no decode worker of 'idle' has joined"),
        ({"model": "small", "min_quality": 0.5}, InvalidRequest, "min_quality", "'small' has quality 0.4"),
        ({"model": "large", "task": "draft"}, InvalidRequest, "task", "'large' is for code, not for 'draft'"),
        ({"model": "auto", "min_quality": 0.95}, InvalidRequest, "min_quality", "large (it has quality 0.9"),
        ({"model": "auto", "min_quality": 1.5}, InvalidRequest, "min_quality", "must be 0 to 1, not 1.5"),
        ({"model": "small", "min_quality": float("nan")}, InvalidRequest, "min_quality", "must be 0 to 1, not nan"),
        ({"model": "auto", "task": "t" * 257}, InvalidRequest, "task", "longer than 256 characters"),
    ]
    for asked, kind, field, words in cases:
        with refusal_of(field, kind, says=words):
            await answer(client, SHORT, **asked)
    with pytest.raises(InvalidRequest, match="have different meanings in small, large"):
        await Stream(client, [1, 2, 3], 5, model="auto").task


async def a_worker_of_another_model(cluster: LocalCluster, client: Client, models: list[ClusterModel]) -> None:
    """It is told why, and the model that had no workers is served as soon as it has one."""
    unknown = write_sim_model(models[0].path.parent / "unknown", 650)
    config = WorkerConfig(model=unknown, worker_id="stranger", routers=tuple(cluster.addresses), **SIM)
    role = await start_role("decode_worker", "stranger", config)
    assert await asyncio.wait_for(role.process.wait(), 20) != 0, "it cannot go on"
    assert sum(model.decode_workers for model in await client.list_models()) == 2

    joins = WorkerConfig(model=models[2].path, worker_id="idle-decode-0", **SIM)
    await cluster.add_worker("decode_worker", joins)

    async def served() -> bool:
        return (await client.list_models())[2].decode_workers == 1

    await until(served, "the third model has a worker")
    receipt = (await answer(client, LONG, model="auto")).receipt
    assert receipt.model == "idle", "nothing is cheaper than what costs nothing"
    assert not receipt.HasField("price")


async def test_one_models_workers_die_and_the_other_does_not_notice(
    models: list[ClusterModel], audit: Callable[..., Any]
) -> None:
    """Twice the same load on both. The second time all workers of one are killed in mid-stream."""
    two = models[:2]
    limits = {"default_tenant": {"max_running": 64}}
    rules = {"model_rules": [], "worker_silence_s": 5.0, "default_model": "auto"}
    async with cluster_of(two, **rules, **limits) as cluster, Client(cluster.address) as client:

        def start(name: str, salt: str, max_tokens: int = 60) -> list[Stream]:
            prompts = [[number + 1] * (100 + number) for number in range(6)]
            return [Stream(client, prompt, max_tokens, model=name, cache_salt=salt) for prompt in prompts]

        undisturbed = await finished(start("small", "1"))
        await finished(start("large", "1"))

        lost, kept = start("large", "2", 2000), start("small", "2")
        for stream in (*lost, *kept):
            await stream.reached(3)
        dying = [named(cluster, name) for name in ("large-decode-0", "large-prefill-0")]
        engines = [engine_of(worker) for worker in dying]
        for worker in dying:
            kill_worker(worker)
        more = start("small", "3")
        assert_equal_answers(await finished(kept), undisturbed)
        assert_equal_answers(await finished(more), undisturbed)
        assert {stream.receipt.placement.attempt for stream in (*kept, *more)} == {1}
        for stream in lost:
            with pytest.raises(Unavailable):  # and not by the other model
                await stream.task
        for model in ("", "auto"):
            finish = await answer(client, SHORT, model=model)
            assert finish.receipt.model == "small"
        assert finish.receipt.model_reason.endswith("passed over: large (no decode worker)")
        await audit(alive(cluster))

        await until(lambda: not any(state_of(pid) for pid in engines), "no engine is left of what was killed")


@pytest.mark.parametrize("same_path", [True, False])
async def test_a_router_does_not_start_with_two_models_of_one_name(
    models: list[ClusterModel], tmp_path: Path, same_path: bool
) -> None:
    twin = models[0].path if same_path else write_sim_model(tmp_path / "small", 601)
    doubled = plan_models([models[0], ClusterModel(path=twin)], {"port": 0}, SIM, [0])
    with refusal_of(
        "router: models.1.name", StartError, says=f"{models[0].path} and {twin} have the same name, 'small'"
    ):
        await start_role("router", "router", doubled.router)
