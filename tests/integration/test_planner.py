"""The planner's process: over real routers, and over an API server that speaks Kubernetes' scale subresource."""

import asyncio
import json
import random
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cluster.errors import StartError
from cluster.network.rpc import READINESS
from planner.executors import ExecutorFailed, KubernetesConfig, KubernetesExecutor
from planner.runtime import PlannerConfig, start_planner
from support.processes import Stream, engine_of, finished, running, says, until, workers_joined
from support.scale_api import ScaleApi
from support.tuned import tuned
from tandem.local.local_cluster import start_role, stop_process

VOCAB = 600
SIM: dict[str, Any] = {"engine": "sim", "sim_step_ms": 5.0, "kv_memory_mib": 16, "drain_s": 0.5}
NARROW = SIM | {"kv_memory_mib": 1, "reserve_output_tokens": 5000}
"""A decode worker has room for one such request at a time."""

QUICK = {"down_after_s": 1.0, "start_s": 20.0}


@pytest.fixture(scope="module")
def model(sim_model: Callable[..., Path]) -> Path:
    return sim_model(VOCAB)


@pytest.fixture
def account(tmp_path: Path) -> Path:
    """As Kubernetes mounts it."""
    (tmp_path / "token").write_text("a-token\n")
    (tmp_path / "namespace").write_text("serving")
    return tmp_path


def prompt_of(seed: int, num_tokens: int) -> list[int]:
    return random.Random(seed).choices(range(VOCAB), k=num_tokens)


def kubernetes(api: ScaleApi, account: Path, **names: str) -> KubernetesExecutor:
    pools = {"prefill": "p", "decode": "d"} | names
    return KubernetesExecutor(KubernetesConfig.parse({"api_server": api.url, "account_dir": account} | pools))


async def test_kubernetes_scales_what_differs_and_nothing_else(account: Path) -> None:
    with ScaleApi("a-token", p=2, d=0) as api:
        executor = kubernetes(api, account)
        assert await executor.sizes() == {"prefill": 2, "decode": 0}
        await executor.scale("prefill", 2)
        await executor.scale("decode", 3)
        assert api.replicas == {("serving", "p"): 2, ("serving", "d"): 3}
        assert [method for method, _ in api.requests].count("PATCH") == 1
        only = kubernetes(api, account, prefill="")
        assert await only.sizes() == {"decode": 3}
        await only.scale("prefill", 9)
        assert api.replicas["serving", "p"] == 2
        with pytest.raises(ExecutorFailed, match="404"):
            await kubernetes(api, account, prefill="", decode="statefulsets/s").sizes()
        assert api.requests[-1] == ("GET", "/apis/apps/v1/namespaces/serving/statefulsets/s/scale")


async def test_where_something_else_scales_sizes_are_only_read(account: Path) -> None:
    with ScaleApi("a-token", p=2, d=1) as api:
        config = {"api_server": api.url, "account_dir": account, "prefill": "p", "decode": "d", "read_only": True}
        executor = KubernetesExecutor(KubernetesConfig.parse(config))
        assert await executor.sizes() == {"prefill": 2, "decode": 1}
        await executor.scale("decode", 3)
        assert {method for method, _ in api.requests} == {"GET"}
        assert api.replicas["serving", "d"] == 1


async def test_what_kubernetes_refuses_is_said_and_a_renewed_token_is_read(account: Path) -> None:
    with ScaleApi("a-token", p=1) as api:
        with pytest.raises(ExecutorFailed, match="404"):
            await kubernetes(api, account).sizes()
        executor = kubernetes(api, account, decode="")
        api.token = "another"
        with pytest.raises(ExecutorFailed, match=r"401.*Unauthorized"):
            await executor.scale("prefill", 2)
        (account / "token").write_text("another")
        await executor.scale("prefill", 2)
        api.failing = 1
        with pytest.raises(ExecutorFailed, match="etcd is away"):
            await executor.sizes()
        assert await executor.sizes() == {"prefill": 2}
    with pytest.raises(ExecutorFailed, match="refused"):
        await executor.sizes()


def test_where_kubernetes_is_must_be_known(account: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    with pytest.raises(StartError, match=r"kubernetes\.api_server"):
        KubernetesExecutor(KubernetesConfig.parse({"decode": "d", "account_dir": account}))
    with pytest.raises(StartError, match=r"kubernetes\.decode"):
        KubernetesExecutor(KubernetesConfig.parse({"api_server": "http://x:1", "account_dir": account}))
    (account / "namespace").unlink()
    with pytest.raises(StartError, match=r"kubernetes\.namespace"):
        KubernetesExecutor(KubernetesConfig.parse({"decode": "d", "api_server": "http://x:1", "account_dir": account}))
    for settings, field in (
        ({}, "routers"),
        ({"routers": ["x:1"], "kubernetes": {"decode": "d"}, "switch": True}, "switch"),
        ({"kubernetes": {"decode": "pods/d"}}, r"kubernetes\.decode"),
        ({"kubernetes": {"prefill": "deployments/"}}, r"kubernetes\.prefill"),
    ):
        with pytest.raises(StartError, match=field):
            PlannerConfig.parse(settings).check()


async def test_pools_on_kubernetes_grow_under_load_though_calls_fail(model, cluster_of, account) -> None:  # type: ignore[no-untyped-def]
    """Two routers, of which one goes: the planner watches both, and goes on with what answers."""
    with ScaleApi("a-token", p=1, d=1) as api:
        async with running(cluster_of(model, prefill=1, decode=1, routers=2, **NARROW)) as (cluster, client):
            config = PlannerConfig.parse(
                QUICK
                | {"routers": [router.joined_at for router in cluster.routers]}
                | {"decode": {"max_workers": 3}, "metrics_port": 0}
                | {"kubernetes": {"api_server": api.url, "account_dir": account, "prefill": "p", "decode": "d"}}
            )
            planner = await start_planner(config)
            try:
                api.failing = 4
                streams = [Stream(client, prompt_of(n, 40), 5000) for n in range(8)]

                await until(lambda: api.replicas["serving", "d"] == 3, "the decode pool is to have three workers")
                assert api.replicas["serving", "p"] == 1
                said = await metrics_of(planner.addresses.metrics)
                assert said['tandem_planner_wanted_workers{model_name="",role="decode"}'] == 3
                assert said['tandem_planner_serving_workers{model_name="",role="decode"}'] == 1
                assert said['tandem_planner_failures_total{what="observe"}'] >= 2
                await asyncio.gather(*(stream.cancel() for stream in streams))

                await until(lambda: api.replicas["serving", "d"] == 1, "it has shrunk again")
                await stop_process(cluster.routers[1].process)
                before = said['tandem_planner_failures_total{what="observe"}']
                (one,) = await finished([Stream(client, prompt_of(99, 40), 100)])
                assert one.finish is not None
                after = await metrics_of(planner.addresses.metrics)
                assert after['tandem_planner_failures_total{what="observe"}'] == before
            finally:
                await planner.stop()


async def test_a_pool_of_none_comes_back_with_the_next_request(model, cluster_of, account) -> None:  # type: ignore[no-untyped-def]
    """Kubernetes is played here: what the planner wants is stopped and started. Routers stay ready meanwhile, or nobody
    would be led to them."""
    router = {"ready_without_workers": True, "no_worker_grace_s": 60.0, "http_port": 0}
    with ScaleApi("a-token", d=1) as api:
        async with running(cluster_of(model, prefill=0, decode=1, router=router, **NARROW)) as (cluster, client):
            config = PlannerConfig.parse(
                QUICK
                | {"routers": [cluster.router.joined_at], "decode": {"min_workers": 0}}
                | {"kubernetes": {"api_server": api.url, "account_dir": account, "decode": "d"}}
            )
            planner = await start_planner(config)
            try:

                async def wants(count: int) -> bool:
                    return api.replicas["serving", "d"] == count

                await until(lambda: wants(0), "nobody asks, and nobody is needed")
                (worker,) = cluster.decode
                await stop_process(worker.process)
                await workers_joined(client, 0, 0)
                assert await says(cluster.address, READINESS)
                said = json.loads(await got(f"http://{cluster.router.http_address}/ready"))
                assert said == {"status": "ready", "decode_workers": {model.name: 0}}
                stream = Stream(client, prompt_of(1, 40), 20)
                await until(lambda: wants(1), "somebody asks")
                assert not stream.task.done()
                again = await cluster.add_worker("decode_worker", cluster.topology.decode[0])
                cluster.engines.append(engine_of(again))
                await finished([stream])
            finally:
                await planner.stop()


async def test_roles_follow_the_load_where_no_worker_comes_or_goes(model, cluster_of, audit) -> None:  # type: ignore[no-untyped-def]
    """Three prefill workers and one decode worker, and nothing but long answers."""
    async with running(cluster_of(model, prefill=3, decode=1, **NARROW)) as (cluster, client):
        config = tuned(
            PlannerConfig,
            QUICK
            | {"routers": (cluster.router.joined_at,), "switch": True, "switch_s": 1.0}
            | {"decode": {"max_workers": 3}},
        )
        planner = await start_planner(config)
        try:
            streams = [Stream(client, prompt_of(n, 40), 5000) for n in range(8)]

            async def switched() -> bool:
                (served,) = (await client.cluster_status()).models
                return sum(worker.role == "decode" for worker in served.workers) == 3

            await until(switched, "two prefill workers decode")

            await until(lambda: sum(len(stream.token_ids) > 0 for stream in streams) >= 3, "each of them has a request")
            await asyncio.gather(*(stream.cancel() for stream in streams))
            late = await finished([Stream(client, prompt_of(100 + n, 40), 20) for n in range(8)])
            assert len({stream.receipt.placement.decode_worker for stream in late}) > 1
        finally:
            await planner.stop()
        await audit([worker.address for worker in cluster.workers])


async def test_the_process_says_what_it_wishes(model, cluster_of) -> None:  # type: ignore[no-untyped-def]
    """`python -m planner`, with nobody to carry anything out; and a router that comes later than it."""
    async with running(cluster_of(model, prefill=1, decode=2, **SIM)) as (cluster, _):
        config = PlannerConfig.parse(
            {"routers": [cluster.router.joined_at], "metrics_port": 0, "model": cluster_model(model)}
        )
        role = await start_role("planner", "planner", config)
        try:

            async def wished() -> bool:
                wanted = f'tandem_planner_wanted_workers{{model_name="{config.model}",role="decode"}}'
                return (await metrics_of(role.metrics_address)).get(wanted) == 2

            await until(wished, "it wants what there is")
        finally:
            await stop_process(role.process)
        assert role.process.returncode == 0


def cluster_model(path: Path) -> str:
    return path.name


async def got(url: str) -> str:
    def get() -> str:
        with urllib.request.urlopen(url, timeout=5) as answer:
            return str(answer.read().decode())

    return await asyncio.to_thread(get)


async def metrics_of(address: str) -> dict[str, float]:
    lines = (await got(f"http://{address}/metrics")).splitlines()
    return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines if not line.startswith("#")}
