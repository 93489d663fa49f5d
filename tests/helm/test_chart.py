"""The chart as the real helm renders it: valid for Kubernetes, and by our own rules."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from cluster.roles import ROLES
from engine.worker.config import WorkerConfig
from planner.runtime import PlannerConfig
from router.config import RouterConfig
from support.chart import CHART, EXAMPLES, ROOT, helm, needs_helm, pod_specs, render, template

pytestmark = needs_helm
KUBERNETES = ("1.31", "1.34", "1.37")
ALL = [None, *EXAMPLES]
HPA: dict[str, Any] = {"enabled": True, "minReplicas": 2, "maxReplicas": 9, "target": "0.8"}
AUTOSCALED = {"name": "a", "source": {"configMap": {}}, "decode": {"replicas": 1, "autoscaling": HPA}}

OPERATORS = {"ServiceMonitor", "PrometheusRule"}
"""Kinds of others, of which Kubernetes has no schema."""


def keeping(available: int, **pool: Any) -> dict[str, Any]:
    """A model with a PodDisruptionBudget."""
    return {"name": "a", "source": {"configMap": {}}, "decode": {"minAvailable": available, **pool}}


WRONG = {"config": {"kv_memory_mb": 1}}
MISSPELT: list[tuple[dict[str, Any], str]] = [
    *(({part: WRONG}, f"'/{part}/config") for part in ("router", "worker", "planner")),
    ({"models": [keeping(0, **WRONG)]}, "'/models/0/decode/config"),
    ({"models": [keeping(0) | {"prefill": WRONG}]}, "'/models/0/prefill/config"),
    ({"models": [keeping(0, canary={"replicas": 1, **WRONG})]}, "'/models/0/decode/canary/config"),
    ({"models": [keeping(0) | {"prefill": {"canary": {"replicas": 1, **WRONG}}}]}, "'/models/0/prefill/canary/config"),
    ({"models": [keeping(0) | {"serving": WRONG["config"]}]}, "'/models/0/serving"),
]
"""And where helm finds it."""
WITH_PASSWORD = (
    "redis://:sesame@redis:6379/0",
    "rediss://user:sesame@redis",
    "redis://:open/sesame@redis",
    "redis://redis:6379/0?password=sesame",
)


def name_of(values: Path | None) -> str:
    return values.stem if values else "defaults"


@pytest.fixture(params=ALL, ids=name_of)
def example(request: pytest.FixtureRequest) -> Path | None:
    values: Path | None = request.param
    return values


def test_lint(example: Path | None) -> None:
    answer = helm("lint", "--strict", str(CHART), *(["-f", str(example)] if example else []))
    assert answer.returncode == 0, answer.stdout


@pytest.mark.parametrize("version", KUBERNETES)
def test_manifests_are_what_kubernetes_takes(example: Path | None, version: str) -> None:
    for manifest in render(example):
        if manifest["kind"] not in OPERATORS:
            kubernetes_validate.validate(manifest, version, strict=True)


def check_rules(manifests: list[dict[str, Any]]) -> None:
    """Of every pod and its containers."""
    names = [(manifest["kind"], manifest["metadata"]["name"]) for manifest in manifests]
    assert len(names) == len(set(names)), "two of one name"
    for name, spec in pod_specs(manifests):
        assert spec["automountServiceAccountToken"] is False, name
        assert spec["securityContext"]["runAsNonRoot"] is True, name
        for container in [*spec.get("initContainers", []), *spec["containers"]]:
            tag = container["image"].rpartition(":")[2]
            assert tag
            assert tag != "latest"
            security = container["securityContext"]
            assert security["readOnlyRootFilesystem"] is True
            assert security["allowPrivilegeEscalation"] is False
            assert security["capabilities"]["drop"] == ["ALL"]
            assert {"cpu", "memory"} <= set(container["resources"]["limits"]), name
            said = json.dumps([container.get("command"), container.get("args")])
            assert not re.search("password|secret|token=", said.replace("REDIS_PASSWORD", ""), re.I), said
        if name.endswith("-test"):
            continue
        for container in spec["containers"]:
            assert {"startupProbe", "readinessProbe", "livenessProbe"} <= set(container), name


def least_pods(manifests: list[dict[str, Any]], selector: dict[str, str]) -> int:
    """That there may be of those with these labels, whoever sizes their pool."""
    named = {(manifest["kind"], manifest["metadata"]["name"]): manifest for manifest in manifests}
    least = {
        key: manifest["spec"].get("replicas")
        for key, manifest in named.items()
        if key[0] in ("Deployment", "StatefulSet")
        and selector.items() <= manifest["spec"]["template"]["metadata"]["labels"].items()
    }
    for key, manifest in named.items():
        if key[0] == "HorizontalPodAutoscaler":
            target = manifest["spec"]["scaleTargetRef"]
            if (target["kind"], target["name"]) in least:
                least[target["kind"], target["name"]] = manifest["spec"]["minReplicas"]
        elif key[0] == "ConfigMap" and "planner.yaml" in manifest["data"]:
            config = PlannerConfig.parse(config_of(manifests, key[1], "planner"))
            for role in ROLES:
                if (pool := ("Deployment", getattr(config.kubernetes, role))) in least:
                    least[pool] = config.pool(role).min_workers
    counts = [count for count in least.values() if count is not None]
    assert len(counts) == len(least), "nobody says how many there are"
    return sum(counts)


def check_budgets(manifests: list[dict[str, Any]]) -> None:
    """Nodes can be drained: of what a PodDisruptionBudget selects at least one pod may always go."""
    for manifest in manifests:
        if manifest["kind"] == "PodDisruptionBudget":
            spec = manifest["spec"]
            assert 0 < spec["minAvailable"] < least_pods(manifests, spec["selector"]["matchLabels"]), manifest


def test_every_pod_keeps_the_rules(example: Path | None) -> None:
    check_rules(render(example))
    check_budgets(render(example))


def test_a_canary_has_no_budget_of_its_own() -> None:
    pool = {"replicas": 4, "minAvailable": 3, "canary": {"replicas": 1}}
    manifests = render({"models": [{"name": "a", "source": {"configMap": {}}, "decode": pool}]}, release="x")
    (budget,) = [manifest for manifest in manifests if manifest["kind"] == "PodDisruptionBudget"]
    assert budget["metadata"]["name"] == "x-a-decode"
    assert least_pods(manifests, budget["spec"]["selector"]["matchLabels"]) == 4, "not the canary's, too"


def test_a_share_is_the_canarys_and_not_the_pools() -> None:
    manifests = render({"models": [keeping(0, replicas=3, canary={"replicas": 1, "share": 0.05})]}, release="x")
    pools = [config_of(manifests, f"x-a-{pool}", "worker") for pool in ("decode", "decode-canary")]
    assert [config.get("traffic_share") for config in pools] == [None, 0.05]
    assert WorkerConfig.parse(pools[1]).traffic_share == 0.05


def test_a_decode_pool_that_may_be_of_zero_can_come_back() -> None:
    def routers(**config: Any) -> dict[str, Any]:
        return {"planner": {"enabled": True, "config": {"decode": {"min_workers": 0}}}, "router": {"config": config}}

    config = RouterConfig.parse(config_of(render(routers()), "demo-router", "router"))
    assert config.ready_without_workers
    assert config.no_worker_grace_s == 90, "longer than a worker takes to start"
    usual = RouterConfig.parse(config_of(render({"planner": {"enabled": True}}), "demo-router", "router"))
    assert not usual.ready_without_workers
    refused = template(routers(no_worker_grace_s=60))
    assert refused.returncode != 0
    assert "router.config.no_worker_grace_s: 60 s, in which no worker can start" in refused.stderr


def test_alive_and_ready_are_different_questions(example: Path | None) -> None:
    for name, spec in pod_specs(render(example)):
        for container in spec["containers"]:
            if container["name"] not in ("router", "worker"):
                continue
            assert container["readinessProbe"]["grpc"]["service"] == "readiness"
            assert container["livenessProbe"]["grpc"]["service"] == "liveness"
            config = config_of(render(example), name, container["name"])
            assert spec["terminationGracePeriodSeconds"] >= waits_before_stopping(container) + config["drain_s"] + 15
            assert config["drain_s"] > 0


def waits_before_stopping(container: dict[str, Any]) -> int:
    """Seconds of its preStop hook, which runs `sleep`: the images have it, since they are Debian's and Ubuntu's."""
    if (hook := container.get("lifecycle", {}).get("preStop")) is None:
        return 0
    command, seconds = hook["exec"]["command"]
    assert command == "sleep"
    return int(seconds)


def test_routers_serve_on_until_nobody_is_sent_to_them(example: Path | None) -> None:
    """Neither by the Service nor by a connection that a client has: gRPC's last up to a tenth longer than they may."""
    manifests = render(example)
    specs = pod_specs(manifests)
    ((name, router),) = [(n, c) for n, spec in specs for c in spec["containers"] if c["name"] == "router"]
    oldest_s = 1.1 * config_of(manifests, name, "router")["max_connection_s"]
    assert waits_before_stopping(router) == 25 > oldest_s + 1
    workers = [container for _, spec in specs for container in spec["containers"] if container["name"] == "worker"]
    assert all(waits_before_stopping(worker) == 0 for worker in workers), "no client comes to them through a Service"


def test_how_long_a_router_serves_on_is_a_value() -> None:
    for seconds, grace in ((12, 87), (0, 75)):
        manifests = render({"router": {"preStopSeconds": seconds}})
        ((name, spec),) = [(name, spec) for name, spec in pod_specs(manifests) if "router" in name]
        config = RouterConfig.parse(config_of(manifests, name, "router"))
        assert config.max_connection_s == (pytest.approx(0.8 * seconds) if seconds else None)
        assert waits_before_stopping(spec["containers"][0]) == seconds
        assert spec["terminationGracePeriodSeconds"] == grace
        assert seconds or "lifecycle" not in spec["containers"][0]


def config_of(manifests: list[dict[str, Any]], name: str, container: str) -> dict[str, Any]:
    (found,) = [m for m in manifests if m["kind"] == "ConfigMap" and m["metadata"]["name"] == name]
    config: dict[str, Any] = yaml.safe_load(found["data"][f"{container}.yaml"])
    return config


def test_the_rendered_settings_are_settings(example: Path | None) -> None:
    manifests = render(example)
    for name, spec in pod_specs(manifests):
        (container,) = spec["containers"]
        if container["name"] == "router":
            RouterConfig.parse(config_of(manifests, name, "router"))
        elif container["name"] == "worker":
            WorkerConfig.parse(config_of(manifests, name, "worker"))
        elif container["name"] == "planner":
            PlannerConfig.parse(config_of(manifests, name, "planner")).check()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"router": {"replica": 3}}, "'replica' not allowed"),
        ({"router": {"replicas": "three"}}, "/router/replicas"),
        ({"worker": {"gpu": 1}}, "'gpu' not allowed"),
        ({"models": []}, "/models"),
        ({"models": [{"name": "A b", "source": {"pvc": {"claimName": "x"}}, "decode": {}}]}, "/models/0/name"),
        ({"models": [{"name": "a", "source": {}, "decode": {}}]}, "/models/0/source"),
        ({"image": {"tag": "latest"}}, "/image/tag"),
        ({"router": {"config": {"port": 1}}}, "router.config.port: is set by the chart"),
        ({"worker": {"config": {"model": "x"}}}, "config.model of a worker: is set by the chart"),
        ({"redis": {"enabled": True, "url": "redis://x"}}, "redis: either enabled or url"),
        ({"router": {"autoscaling": {"enabled": True}}}, "router.autoscaling: needs redis"),
        ({"tls": {"metricsCaSecret": "x"}}, "tls.metricsCaSecret: means nothing without tls.memberSecret"),
        ({"tls": {"secret": "x"}}, "'secret' not allowed"),
        ({"worker": {"config": {"tls_key": "x"}}}, "config.tls_key of a worker: is set by the chart"),
        ({"router": {"config": {"api_keys": []}}}, "router.config.api_keys: is set by the chart"),
        ({"planner": {"enabled": True, "config": {"routers": []}}}, "planner.config.routers: is set by the chart"),
        ({"planner": {"enabled": True}, "models": [AUTOSCALED]}, "planner.enabled: a.decode has autoscaling too"),
        *((change, f"{at}': additional properties 'kv_memory_mb' not allowed") for change, at in MISSPELT),
        ({"worker": {"config": {"kv_memory_mib": "much"}}}, "'/worker/config/kv_memory_mib': got string, want integer"),
        ({"worker": {"config": {"device": "gpu"}}}, "'/worker/config/device': value must be one of"),
        ({"router": {"config": {"model_rules": [{"task": []}]}}}, "'/router/config/model_rules/0'"),
        (
            {"models": [{"name": "a", "source": {"configMap": {}}, "serving": {"path": "/x"}, "decode": {}}]},
            "'path' not",
        ),
        ({"worker": {"config": {"transport": "ucxx"}}}, "config.transport of a worker: ucxx listens on"),
        (
            {"models": [keeping(0, replicas=1, canary={"replicas": 1, "config": {"transport": "ucxx"}})]},
            "config.transport of a worker: ucxx listens on",
        ),
        ({"router": {"minAvailable": 1}}, "router.minAvailable: 1 is not below replicas, 1"),
        (
            {
                "router": {"replicas": 9, "minAvailable": 2, "autoscaling": {"enabled": True}},
                "redis": {"enabled": True},
            },
            "router.minAvailable: 2 is not below autoscaling.minReplicas, 2",
        ),
        ({"models": [keeping(2, replicas=2)]}, "models: a.decode.minAvailable: 2 is not below replicas, 2"),
        (
            {"models": [keeping(2, replicas=4, autoscaling=HPA)]},
            "models: a.decode.minAvailable: 2 is not below autoscaling.minReplicas, 2",
        ),
        (
            {"models": [keeping(1, replicas=4)], "planner": {"enabled": True}},
            "models: a.decode.minAvailable: 1 is not below planner.config.decode.min_workers, 1",
        ),
        (
            {
                "models": [keeping(2, replicas=4)],
                "planner": {"enabled": True, "config": {"decode": {"min_workers": 2}}},
            },
            "models: a.decode.minAvailable: 2 is not below planner.config.decode.min_workers, 2",
        ),
    ],
)
def test_wrong_values_are_refused_by_name(change: dict[str, Any], said: str) -> None:
    answer = template(change)
    assert answer.returncode != 0
    assert said in answer.stderr


def test_two_models_of_one_name_are_refused() -> None:
    model = {"source": {"configMap": {}}, "decode": {"replicas": 1}}
    answer = template({"models": [model | {"name": "a.b"}, model | {"name": "a-b"}]})
    assert "models: two are called" in answer.stderr


def test_workers_know_every_router_by_its_own_name() -> None:
    manifests = render({"router": {"replicas": 3}}, release="x")
    routers = [f"x-router-{number}.x-routers:50052" for number in range(3)]
    assert config_of(manifests, "x-storyteller-decode", "worker")["routers"] == routers
    with_redis = render({"router": {"replicas": 3}, "redis": {"enabled": True}}, release="x")
    config = config_of(with_redis, "x-storyteller-decode", "worker")
    assert config["redis_url"] == "redis://x-redis:6379/0"
    assert "routers" not in config


def test_services_select_what_they_are_for(example: Path | None) -> None:
    manifests = render(example)
    pods = [m["spec"]["template"] for m in manifests if m["kind"] in ("Deployment", "StatefulSet")]
    services = [m for m in manifests if m["kind"] == "Service"]
    for service in services:
        chosen = [p for p in pods if service["spec"]["selector"].items() <= p["metadata"]["labels"].items()]
        assert len(chosen) == 1, service["metadata"]["name"]
        ports = {port["name"] for container in chosen[0]["spec"]["containers"] for port in container["ports"]}
        assert {port["targetPort"] for port in service["spec"]["ports"]} <= ports
    assert any(service["spec"].get("clusterIP") == "None" for service in services)


def test_gpus_rdma_and_a_canary() -> None:
    manifests = render(ROOT / "helm" / "examples" / "gpu-rdma.yaml")
    specs = dict(pod_specs(manifests))
    decode, canary = specs["demo-llama-3-1-70b-decode"], specs["demo-llama-3-1-70b-decode-canary"]
    assert decode["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] == 1
    assert decode["containers"][0]["resources"]["limits"]["rdma/hca"] == 1
    assert [spec["containers"][0]["image"] for spec in (decode, canary)] == [
        "tandem-worker:0.1.0",
        "tandem-worker:0.1.1",
    ]
    labels = [m["spec"]["selector"]["matchLabels"] for m in manifests if m["kind"] == "Deployment"]
    assert len({json.dumps(each, sort_keys=True) for each in labels}) == len(labels), "each pod has one owner"
    policy = next(m for m in manifests if m["kind"] == "NetworkPolicy" and m["metadata"]["name"] == "demo-workers")
    ports = policy["spec"]["ingress"][0]["ports"]
    assert {"port": 20000, "endPort": 20999, "protocol": "TCP"} in ports
    (env,) = [e for e in decode["containers"][0]["env"] if e["name"] == "UCX_TCP_PORT_RANGE"]
    assert env["value"] == "20000-20999"


def is_guaranteed(spec: dict[str, Any]) -> bool:
    """Whether it is of the class that kubelet aligns devices and cores for."""
    resources = [container["resources"] for container in [*spec.get("initContainers", []), *spec["containers"]]]
    kinds = ("cpu", "memory")
    return all(
        each["requests"].get(kind) == each["limits"].get(kind) is not None for each in resources for kind in kinds
    )


def test_kubelet_may_align_gpus_nics_and_cores() -> None:
    specs = dict(pod_specs(render(ROOT / "helm" / "examples" / "gpu-rdma.yaml")))
    assert not is_guaranteed(specs["demo-router"])
    with_gpus = [
        spec for spec in specs.values() if "nvidia.com/gpu" in spec["containers"][0].get("resources", {})["limits"]
    ]
    assert len(with_gpus) == 3
    for spec in with_gpus:
        assert is_guaranteed(spec)
        assert float(spec["containers"][0]["resources"]["limits"]["cpu"]).is_integer()


def test_a_capability_where_it_is_asked_for() -> None:
    for asked, added in ((True, ["IPC_LOCK"]), (False, None)):
        specs = dict(pod_specs(render({"worker": {"ipcLock": asked}})))
        capabilities = specs["demo-storyteller-decode"]["containers"][0]["securityContext"]["capabilities"]
        assert (capabilities.get("add"), capabilities["drop"]) == (added, ["ALL"])


def test_a_planner_may_size_the_pools_of_its_model_and_nothing_else() -> None:
    policy = {"decode": {"max_workers": 16}, "ttft_s": 1.5}
    models = [
        {"name": name, "source": {"configMap": {}}, "prefill": {"replicas": prefill}, "decode": {"replicas": 2}}
        for name, prefill in (("a.1", 1), ("b", 0))
    ]
    manifests = render({"planner": {"enabled": True, "config": policy}, "models": models}, release="x")
    check_rules(manifests)
    for manifest in manifests:
        kubernetes_validate.validate(manifest, KUBERNETES[-1], strict=True)
    config = PlannerConfig.parse(config_of(manifests, "x-a-1-planner", "planner"))
    config.check()
    assert (config.model, config.executor, config.decode.max_workers) == ("a.1", "kubernetes", 16)
    assert config.routers == ("x-router-0.x-routers:50052",)
    deployments = {m["metadata"]["name"]: m for m in manifests if m["kind"] == "Deployment"}
    pools = {"x-a-1-planner": ["x-a-1-decode", "x-a-1-prefill"], "x-b-planner": ["x-b-decode"]}
    for role in (m for m in manifests if m["kind"] == "Role"):
        (rule,) = role["rules"]
        names = pools[role["metadata"]["name"]]
        assert (rule["resources"], rule["resourceNames"], rule["verbs"]) == (
            ["deployments/scale"],
            names,
            ["get", "patch"],
        )
        named = config_of(manifests, role["metadata"]["name"], "planner")["kubernetes"]
        assert sorted(named.values()) == names
        assert all("replicas" not in deployments[name]["spec"] for name in names), "an upgrade would undo its work"
    assert not any(m["kind"] == "Role" for m in render())


def test_a_changed_setting_restarts_whom_it_concerns() -> None:
    before, after = render(), render({"worker": {"config": {"block_tokens": 32}}})

    def checksums(manifests: list[dict[str, Any]]) -> dict[str, str]:
        return {
            m["metadata"]["name"]: m["spec"]["template"]["metadata"]["annotations"]["checksum/config"]
            for m in manifests
            if m["kind"] in ("Deployment", "StatefulSet")
        }

    old, new = checksums(before), checksums(after)
    assert {name for name in old if old[name] != new[name]} == {
        "demo-storyteller-prefill",
        "demo-storyteller-decode",
    }


words = st.text("abcdefghijklmnopqrstuvwxyz", min_size=1, max_size=12)
pools = st.fixed_dictionaries(
    {"replicas": st.integers(0, 9)},
    optional={
        "gpus": st.integers(0, 8),
        "minAvailable": st.integers(0, 3),
        "tag": words,
        "spreadOver": st.sampled_from(["", "topology.kubernetes.io/zone"]),
        "config": st.just({"block_tokens": 32}),
        "canary": st.fixed_dictionaries(
            {"replicas": st.integers(1, 3)}, optional={"tag": words, "share": st.sampled_from([0.01, 0.5])}
        ),
        "autoscaling": st.just(HPA),
        "nodeSelector": st.dictionaries(words, words, max_size=2),
        "env": st.just([{"name": "UCX_LOG_LEVEL", "value": "warn"}]),
    },
)
sources = st.sampled_from(
    [
        {"pvc": {"claimName": "models", "path": "a/b"}},
        {"pvc": {"claimName": "models"}},
        {"hostPath": {"path": "/srv"}},
        {"image": {"reference": "registry/model:1"}},
        {"download": {"image": "curl:1", "command": ["sh", "-c", "true"], "size": "1Gi", "secret": "s"}},
        {"configMap": {}},
    ]
)
values_of_all_kinds = st.fixed_dictionaries(
    {
        "models": st.lists(
            st.fixed_dictionaries({"name": words, "source": sources, "decode": pools}, optional={"prefill": pools}),
            min_size=1,
            max_size=3,
            unique_by=lambda model: model["name"],
        )
    },
    optional={
        "router": st.fixed_dictionaries({"replicas": st.integers(1, 4)}, optional={"minAvailable": st.integers(0, 2)}),
        "worker": st.fixed_dictionaries(
            {},
            optional={
                "ipcLock": st.booleans(),
                "ucxTransports": words,
                "extraResources": st.just({"rdma/hca": 2}),
                "runtimeClassName": words,
            },
        ),
        "planner": st.just({"enabled": True, "config": {"prefill": {"min_workers": 2}, "decode": {"min_workers": 2}}}),
        "redis": st.sampled_from([{"enabled": True}, {"url": "redis://x:1/0", "passwordSecret": "s"}, {}]),
        "networkPolicy": st.fixed_dictionaries({"enabled": st.booleans()}),
        "tls": st.fixed_dictionaries(
            {"memberSecret": st.just("m")},
            optional={
                "serverName": words,
                "publicSecret": st.just("p"),
                "publicCa": st.booleans(),
                "clientCaSecret": st.just("c"),
                "metricsCaSecret": st.just("s"),
            },
        ),
        "apiKeys": st.sampled_from([{}, {"secret": "k"}, {"secret": "k", "testSecret": "t"}]),
        "monitoring": st.fixed_dictionaries({"serviceMonitor": st.booleans(), "dashboard": st.booleans()}),
    },
)


@settings(max_examples=12, deadline=None, phases=[Phase.explicit, Phase.reuse, Phase.generate])
@given(values_of_all_kinds, words)
def test_valid_values_render_to_valid_manifests(values: dict[str, Any], release: str) -> None:
    for pool in (model[role] for model in values["models"] for role in ROLES if role in model):
        if "planner" in values:  # it does what autoscaling would
            pool.pop("autoscaling", None)
        least = 2 if "planner" in values else HPA["minReplicas"] if "autoscaling" in pool else pool["replicas"]
        if "minAvailable" in pool:
            pool["minAvailable"] = min(pool["minAvailable"], max(least - 1, 0))
    if (router := values.get("router", {})).get("minAvailable"):
        router["minAvailable"] = min(router["minAvailable"], router["replicas"] - 1)
    manifests = render(values, release=release)
    for manifest in manifests:
        if manifest["kind"] not in OPERATORS:
            for version in KUBERNETES:
                kubernetes_validate.validate(manifest, version, strict=True)
    check_rules(manifests)
    check_budgets(manifests)


@pytest.mark.parametrize("name", ["render_readme.py", "render_schema.py"])
def test_what_is_made_of_values_and_settings_is_up_to_date(name: str) -> None:
    command, env = [sys.executable, str(ROOT / "helm" / name), "--check"], os.environ | {"PYTHONPATH": str(ROOT)}
    answer = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60, env=env)
    assert answer.returncode == 0, answer.stderr


def test_what_pods_would_take_is_not_refused() -> None:
    """YAML reads `off` as false, and the worker takes it so."""
    worker = {"speculation": False, "threads": 2, "lora": "/models/adapter", "cores": [0, 1], "peer_silence_s": 5}
    tenants = {"a": {"max_running": 2}}
    rules = [{"name": "drafts", "tasks": ["draft"], "models": ["storyteller"], "max_ttft_ms": 0.5}]
    manifests = render({"worker": {"config": worker}, "router": {"config": {"tenants": tenants, "model_rules": rules}}})
    taken = WorkerConfig.parse(config_of(manifests, "demo-storyteller-decode", "worker"))
    assert (taken.speculation, taken.threads, taken.cores) == ("off", 2, (0, 1))
    assert RouterConfig.parse(config_of(manifests, "demo-router", "router")).tenants["a"].max_running == 2


@pytest.mark.parametrize("url", WITH_PASSWORD)
def test_a_password_in_a_url_is_refused_and_not_repeated(url: str) -> None:
    answer = template({"redis": {"url": url}})
    assert answer.returncode != 0
    assert "with the key `password`, which redis.passwordSecret names" in answer.stderr
    assert "sesame" not in answer.stderr


def test_a_user_of_redis_is_no_secret() -> None:
    manifests = render({"redis": {"url": "rediss://tandem@redis:6379/0", "passwordSecret": "s"}})
    assert config_of(manifests, "demo-router", "router")["redis_url"] == "rediss://tandem@redis:6379/0"


def test_a_transport_on_any_port_goes_without_a_network_policy() -> None:
    manifests = render({"worker": {"config": {"transport": "ucxx"}}, "networkPolicy": {"enabled": False}})
    assert config_of(manifests, "demo-storyteller-decode", "worker")["transport"] == "ucxx"


def documented(values: Any, path: tuple[str, ...] = ()) -> Iterator[str]:
    """Every value that is no mapping, or one that is free-form."""
    for name, value in values.items():
        if isinstance(value, dict) and value and name not in ("resources", "podSecurityContext"):
            yield from documented(value, (*path, name))
        else:
            yield ".".join((*path, name))


def test_every_value_is_documented() -> None:
    readme = (CHART / "README.md").read_text()
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    for name in documented(values):
        assert f"| `{name}` |" in readme, name


def test_alerts_dashboard_and_autoscalers_ask_for_metrics_that_exist() -> None:
    manual = (ROOT / "docs" / "metrics.md").read_text()
    known = {name.removesuffix("_total") for name in re.findall(r"`(tandem_[a-z0-9_]+)`", manual)}
    asked = {
        name: set(re.findall(r"tandem_[a-z0-9_]+", (CHART / "files" / name).read_text()))
        for name in ("alerts.yaml", "dashboard.json")
    }
    pool = {"replicas": 2, "autoscaling": HPA}
    model = {"name": "a", "source": {"configMap": {}}, "prefill": pool, "decode": pool}
    scalers = [m for m in render({"models": [model]}) if m["kind"] == "HorizontalPodAutoscaler"]
    assert len(scalers) == 2
    for scaler in scalers:
        (metric,) = scaler["spec"]["metrics"]
        asked[scaler["metadata"]["name"]] = {metric["pods"]["metric"]["name"]}
    for name, metrics in asked.items():
        assert metrics
        for metric in metrics:
            assert re.sub("_(total|bucket|sum|count)$", "", metric) in known, f"{name}: {metric}"
