"""Pools of the chart that a planner sizes, by itself or through KEDA."""

import re
from typing import Any

from prometheus_client import CollectorRegistry

from cluster.roles import ROLES, Role
from planner.config import PolicyConfig, PoolConfig
from planner.estimates import Observation
from planner.policy import decide
from planner.runtime import PlannerConfig, PlannerMetrics
from router.config import RouterConfig
from support.chart import (
    CHART,
    KUBERNETES,
    ROOT,
    check_rules,
    check_schema,
    config_of,
    needs_helm,
    render,
    template,
)

pytestmark = needs_helm
PLANNED = {
    "start_s": PlannerConfig.model_fields["start_s"].default,
    "min_workers": PoolConfig.model_fields["min_workers"].default,
    "max_workers": PoolConfig.model_fields["max_workers"].default,
}


def test_a_decode_pool_that_may_be_of_zero_can_come_back() -> None:
    def routers(**config: Any) -> dict[str, Any]:
        return {"planner": {"enabled": True, "config": {"decode": {"min_workers": 0}}}, "router": {"config": config}}

    config = RouterConfig.parse(config_of(render(routers()), "demo-router", "router"))
    assert config.ready_without_workers
    assert config.no_worker_grace_s == PLANNED["start_s"] + 30, "longer than a worker takes to start"
    usual = RouterConfig.parse(config_of(render({"planner": {"enabled": True}}), "demo-router", "router"))
    assert not usual.ready_without_workers
    refused = template(routers(no_worker_grace_s=PLANNED["start_s"]))
    assert refused.returncode != 0
    assert "router.config.no_worker_grace_s: 60 s, in which no worker can start" in refused.stderr


def test_templates_know_what_a_planner_takes_for_granted() -> None:
    """What they compare others with, where values do not say it."""
    for name, fields in (("router.yaml", {"start_s"}), ("_helpers.tpl", {"min_workers", "max_workers"})):
        text = (CHART / "templates" / name).read_text()
        asked = re.findall(r"(start_s) \| default (\d+)", text) + re.findall(r"(\w+_workers) (\d+) \(hasKey", text)
        assert {field: float(found) for field, found in asked} == {field: PLANNED[field] for field in fields}


def test_a_planner_may_size_the_pools_of_its_model_and_nothing_else() -> None:
    policy = {"decode": {"max_workers": 16}, "ttft_s": 1.5}
    models = [
        {"name": name, "source": {"configMap": {}}, "prefill": {"replicas": prefill}, "decode": {"replicas": 2}}
        for name, prefill in (("a.1", 1), ("b", 0))
    ]
    manifests = render({"planner": {"enabled": True, "config": policy}, "models": models}, release="x")
    check_rules(manifests)
    check_schema(manifests, KUBERNETES[-1])
    config = PlannerConfig.parse(config_of(manifests, "x-a-1-planner", "planner"))
    config.check()
    assert (config.model, config.decode.max_workers) == ("a.1", 16)
    assert config.kubernetes is not None
    assert (config.kubernetes.prefill, config.kubernetes.decode) == ("x-a-1-prefill", "x-a-1-decode")
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
        sizes = {name: deployments[name]["spec"]["replicas"] for name in names}
        assert sizes == {name: 1 if name.endswith("prefill") else 2 for name in names}, "of a first install"
    assert not any(m["kind"] == "Role" for m in render())


def scaled_objects(manifests: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return {m["metadata"]["name"]: m["spec"] for m in manifests if m["kind"] == "ScaledObject"}


def test_keda_scales_each_pool_to_what_the_planner_wishes() -> None:
    manifests = render(ROOT / "helm" / "examples" / "keda.yaml", "--namespace", "serving")
    config = PlannerConfig.parse(config_of(manifests, "demo-simulated-planner", "planner"))
    deployments = {m["metadata"]["name"]: m for m in manifests if m["kind"] == "Deployment"}
    scaled = scaled_objects(manifests)
    assert len(scaled) == 2
    for role in ROLES:
        spec = scaled[f"demo-simulated-{role}"]
        assert spec["scaleTargetRef"] == {"name": f"demo-simulated-{role}"}
        assert deployments[f"demo-simulated-{role}"]["spec"]["replicas"] == (1 if role == "prefill" else 2)
        bounds = (spec["minReplicaCount"], spec["maxReplicaCount"])
        assert bounds == (config.pool(role).min_workers, config.pool(role).max_workers)
        (trigger,) = spec["triggers"]
        assert (trigger["type"], trigger["metricType"]) == ("prometheus", "AverageValue")
        metadata = trigger["metadata"]
        assert all(isinstance(value, str) for value in metadata.values()), "KEDA takes nothing else"
        assert metadata["serverAddress"] == "http://prometheus-operated.monitoring:9090"
        assert (metadata["threshold"], metadata["ignoreNullValues"]) == ("1", "false")
        check_query(metadata["query"], role, "serving", "demo-simulated-planner")
        assert spec["advanced"]["horizontalPodAutoscalerConfig"]["behavior"] == {
            "scaleDown": {"stabilizationWindowSeconds": 0}
        }


def check_query(query: str, role: Role, namespace: str, planner: str) -> None:
    """It finds what a planner's own registry exports, with the labels of a pod that Prometheus adds."""
    registry = CollectorRegistry()
    state, desired = decide(None, Observation(at_s=0), PolicyConfig())
    PlannerMetrics(registry, "simulated").decided(state, desired)
    parts = re.fullmatch(r"max\((\w+)\{(.*)\}\)", query)
    matchers = {name: (kind, value) for name, kind, value in re.findall(r'(\w+)(=~?)"([^"]*)"', parts[2])}
    exported = [each.labels for family in registry.collect() for each in family.samples if each.name == parts[1]]
    (own,) = [labels for labels in exported if labels["role"] == role]
    labels = own | {"namespace": namespace, "pod": f"{planner}-6d4cf56db6-x8zqp"}
    assert set(matchers) == set(labels)
    for name, (kind, value) in matchers.items():
        assert labels[name] == value if kind == "=" else re.fullmatch(value, labels[name]), name


def test_with_keda_a_planner_may_read_sizes_and_change_none() -> None:
    manifests = render(ROOT / "helm" / "examples" / "keda.yaml")
    config = PlannerConfig.parse(config_of(manifests, "demo-simulated-planner", "planner"))
    assert config.kubernetes is not None
    assert config.kubernetes.read_only
    (role,) = [m for m in manifests if m["kind"] == "Role"]
    assert role["rules"][0]["verbs"] == ["get"]
    alone = render({"planner": {"enabled": True}})
    changing = PlannerConfig.parse(config_of(alone, "demo-storyteller-planner", "planner")).kubernetes
    assert changing is not None
    assert not changing.read_only
    assert not scaled_objects(alone)


def test_keda_has_the_bounds_that_a_planner_takes_for_granted() -> None:
    keda = {"enabled": True, "serverAddress": "http://p:9090", "tolerance": "0"}
    pools = {"decode": {"min_workers": 0}, "prefill": {"max_workers": 3}}
    scaled = scaled_objects(render({"planner": {"enabled": True, "keda": keda, "config": pools}}))
    found = {name: (spec["minReplicaCount"], spec["maxReplicaCount"]) for name, spec in scaled.items()}
    assert found == {"demo-storyteller-decode": (0, 8), "demo-storyteller-prefill": (1, 3)}
    behavior = scaled["demo-storyteller-decode"]["advanced"]["horizontalPodAutoscalerConfig"]["behavior"]
    assert [behavior[way]["tolerance"] for way in ("scaleUp", "scaleDown")] == ["0", "0"]
