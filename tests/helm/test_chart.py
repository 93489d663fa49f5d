"""The chart as the real helm renders it: valid for Kubernetes, and by our own rules."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from cluster.roles import ROLES, Role
from engine.config import WorkerConfig
from planner.config import PolicyConfig, PoolConfig
from planner.observation import Observation
from planner.policy import decide
from planner.runtime import PlannerConfig, PlannerMetrics
from router.config import RouterConfig
from support.chart import (
    CHART,
    EXAMPLES,
    HPA,
    KUBERNETES,
    ROOT,
    check_budgets,
    check_rules,
    check_schema,
    config_of,
    helm,
    keeping,
    least_pods,
    needs_helm,
    pod_specs,
    render,
    template,
)

pytestmark = needs_helm
PLANNED = {
    "start_s": PlannerConfig.model_fields["start_s"].default,
    "min_workers": PoolConfig.model_fields["min_workers"].default,
    "max_workers": PoolConfig.model_fields["max_workers"].default,
}
ALL = [None, *EXAMPLES]


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
    check_schema(render(example), version)


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
    assert config.no_worker_grace_s == PLANNED["start_s"] + 30, "longer than a worker takes to start"
    usual = RouterConfig.parse(config_of(render({"planner": {"enabled": True}}), "demo-router", "router"))
    assert not usual.ready_without_workers
    refused = template(routers(no_worker_grace_s=PLANNED["start_s"]))
    assert refused.returncode != 0
    assert "router.config.no_worker_grace_s: 60 s, in which no worker can start" in refused.stderr


def test_templates_know_what_a_planner_takes_for_granted() -> None:
    """What they compare others with, where values do not say it."""
    for name, fields in (
        ("router", {"start_s"}),
        ("workers", {"min_workers"}),
        ("planner", {"min_workers", "max_workers"}),
    ):
        text = (CHART / "templates" / f"{name}.yaml").read_text()
        asked = re.findall(r"(start_s) \| default (\d+)", text) + re.findall(r"(\w+_workers) (\d+) \(hasKey", text)
        assert {field: float(found) for field, found in asked} == {field: PLANNED[field] for field in fields}


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
    name = "demo-llama-3-1-70b-fp8-decode"
    decode, canary = specs[name], specs[f"{name}-canary"]
    ranks = WorkerConfig.parse(config_of(manifests, name, "worker")).tensor_parallel
    assert decode["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] == ranks == 4
    assert decode["containers"][0]["resources"]["limits"]["rdma/hca"] == 4
    assert [spec["containers"][0]["image"] for spec in (decode, canary)] == [
        "tandem-worker-vllm:0.1.0",
        "tandem-worker-vllm:0.1.1",
    ]
    labels = [m["spec"]["selector"]["matchLabels"] for m in manifests if m["kind"] == "Deployment"]
    assert len({json.dumps(each, sort_keys=True) for each in labels}) == len(labels), "each pod has one owner"
    policy = next(m for m in manifests if m["kind"] == "NetworkPolicy" and m["metadata"]["name"] == "demo-workers")
    ports = policy["spec"]["ingress"][0]["ports"]
    assert {"port": 20000, "endPort": 20999, "protocol": "TCP"} in ports
    (env,) = [e for e in decode["containers"][0]["env"] if e["name"] == "UCX_TCP_PORT_RANGE"]
    assert env["value"] == "20000-20999"


def test_metrics_are_for_the_releases_namespace_unless_others_are_named() -> None:
    def scrapers(values: dict[str, Any]) -> list[Any]:
        policies = [m for m in render(values) if m["kind"] == "NetworkPolicy"]
        rules = [rule for policy in policies for rule in policy["spec"]["ingress"]]
        return [rule["from"] for rule in rules if any(port["port"] == 9400 for port in rule["ports"])]

    assert scrapers({}) == [[{"podSelector": {}}]] * 2
    assert scrapers({"planner": {"enabled": True}}) == [[{"podSelector": {}}]] * 3
    everybody = [{"namespaceSelector": {}}]
    assert scrapers({"networkPolicy": {"monitoring": everybody}}) == [everybody] * 2


def test_vllm_workers_have_their_image_and_settings() -> None:
    manifests = render(ROOT / "helm" / "examples" / "vllm.yaml")
    specs = dict(pod_specs(manifests))
    images = {name: spec["containers"][0]["image"] for name, spec in specs.items()}
    assert images["demo-llama-3-1-8b-decode"] == images["demo-llama-3-1-8b-prefill"] == "tandem-worker-vllm:0.1.0"
    assert images["demo-router"] == "tandem-router:0.1.0"
    for role in ("prefill", "decode"):
        config = WorkerConfig.parse(config_of(manifests, f"demo-llama-3-1-8b-{role}", "worker"))
        assert (config.engine, config.block_tokens, config.vllm_options) == ("vllm", 32, {"max_model_len": 32768})


def test_models_of_the_hub_are_fetched_into_a_cache_with_a_token() -> None:
    kept = {"repository": "org/kept", "revision": "v1", "cache": {"claimName": "models"}}
    token = {"tokenSecret": {"name": "hugging-face"}}
    models = [
        {"name": "a", "source": {"hub": {"repository": "org/a", **token}}, "decode": {"replicas": 1}},
        {"name": "kept", "source": {"hub": kept}, "decode": {"replicas": 1}},
        {"name": "local", "source": {"configMap": {}}, "decode": {"replicas": 1}},
    ]
    manifests = render({"models": models}, release="x")
    check_rules(manifests)
    check_schema(manifests, KUBERNETES[-1])
    router = RouterConfig.parse(config_of(manifests, "x-router", "router"))
    assert [(str(entry.path), entry.name) for entry in router.entries] == [
        ("org/a", "a"),
        ("org/kept@v1", "kept"),
        ("/models/local", "local"),
    ]
    assert str(WorkerConfig.parse(config_of(manifests, "x-kept-decode", "worker")).model) == "org/kept@v1"
    reference = {"secretKeyRef": {"name": "hugging-face", "key": "token"}}
    found = {}
    for name, spec in pod_specs(manifests):
        (container,) = spec["containers"]
        env = {each["name"]: each.get("value", each.get("valueFrom")) for each in container.get("env", [])}
        (cache,) = [each for each in spec["volumes"] if each["name"] == "hub-cache"] or [None]
        mounted = [each["mountPath"] for each in container["volumeMounts"] if each["name"] == "hub-cache"]
        assert mounted == ([env["HF_HOME"]] if cache else [])
        found[name] = env.get("HF_TOKEN"), cache and {key: cache[key] for key in cache if key != "name"}
    assert found == {
        "x-router": (reference, {"emptyDir": {"sizeLimit": "1Gi"}}),
        "x-a-decode": (reference, {"emptyDir": {"sizeLimit": "100Gi"}}),
        "x-kept-decode": (None, {"persistentVolumeClaim": {"claimName": "models"}}),
        "x-local-decode": (None, None),
        "x-test": (None, None),
    }


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
    check_schema(manifests, KUBERNETES[-1])
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
        assert "replicas" not in deployments[f"demo-simulated-{role}"]["spec"]
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
    assert parts is not None
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
    assert (config.executor, config.kubernetes.read_only) == ("kubernetes", True)
    (role,) = [m for m in manifests if m["kind"] == "Role"]
    assert role["rules"][0]["verbs"] == ["get"]
    alone = render({"planner": {"enabled": True}})
    assert not PlannerConfig.parse(config_of(alone, "demo-storyteller-planner", "planner")).kubernetes.read_only
    assert not scaled_objects(alone)


def test_keda_has_the_bounds_that_a_planner_takes_for_granted() -> None:
    keda = {"enabled": True, "serverAddress": "http://p:9090", "tolerance": "0"}
    pools = {"decode": {"min_workers": 0}, "prefill": {"max_workers": 3}}
    scaled = scaled_objects(render({"planner": {"enabled": True, "keda": keda, "config": pools}}))
    found = {name: (spec["minReplicaCount"], spec["maxReplicaCount"]) for name, spec in scaled.items()}
    assert found == {"demo-storyteller-decode": (0, 8), "demo-storyteller-prefill": (1, 3)}
    behavior = scaled["demo-storyteller-decode"]["advanced"]["horizontalPodAutoscalerConfig"]["behavior"]
    assert [behavior[way]["tolerance"] for way in ("scaleUp", "scaleDown")] == ["0", "0"]


def test_a_pod_monitor_finds_all_pods_that_have_metrics() -> None:
    values = {"planner": {"enabled": True}, "redis": {"enabled": True}}
    manifests = render(values | {"monitoring": {"podMonitor": True, "interval": "30s", "labels": {"release": "p"}}})
    (monitor,) = [m for m in manifests if m["kind"] in ("PodMonitor", "ServiceMonitor")]
    assert monitor["metadata"]["labels"]["release"] == "p"
    selector, found = monitor["spec"]["selector"], []
    for manifest in manifests:
        if manifest["kind"] in ("Deployment", "StatefulSet"):
            pod = manifest["spec"]["template"]
            with_metrics = any(port["name"] == "metrics" for port in pod["spec"]["containers"][0]["ports"])
            assert selects(selector, pod["metadata"]["labels"]) == with_metrics, manifest["metadata"]["name"]
            found += [manifest["metadata"]["name"]] * with_metrics
    assert len(found) == 4
    assert monitor["spec"]["podMetricsEndpoints"] == [{"port": "metrics", "interval": "30s"}]


def selects(selector: dict[str, Any], labels: dict[str, str]) -> bool:
    expressions = selector.get("matchExpressions", [])
    assert all(each["operator"] == "In" for each in expressions)
    return selector.get("matchLabels", {}).items() <= labels.items() and all(
        labels.get(each["key"]) in each["values"] for each in expressions
    )


def test_a_pod_monitor_uses_the_same_certificates() -> None:
    options = ("--set", "monitoring.serviceMonitor=false,monitoring.podMonitor=true")
    manifests = render(ROOT / "helm" / "examples" / "tls.yaml", *options)
    (monitor,) = [m for m in manifests if m["kind"] == "PodMonitor"]
    (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
    assert (endpoint["scheme"], endpoint["tlsConfig"]["serverName"]) == ("https", "tandem.internal")


def test_a_network_policy_is_about_every_pod(example: Path | None) -> None:
    manifests = render(example)
    policies = [m["spec"]["podSelector"] for m in manifests if m["kind"] == "NetworkPolicy"]
    for manifest in manifests:
        pod = manifest if manifest["kind"] == "Pod" else manifest.get("spec", {}).get("template")
        if pod is not None:
            chosen = [policy for policy in policies if selects(policy, pod["metadata"]["labels"])]
            assert len(chosen) == 1, manifest["metadata"]["name"]


RDMA = {"resource": "rdma/hca_shared_devices_a", "count": 2, "networks": "rdma-a,rdma-b", "devices": "mlx5_0:1"}


def test_nics_by_values() -> None:
    manifests = render({"worker": {"rdma": RDMA, "annotations": {"team": "a"}, "doctor": True}})
    check_schema(manifests, KUBERNETES[-1])
    (pod,) = [
        m["spec"]["template"]
        for m in manifests
        if (m["kind"], m["metadata"]["name"]) == ("Deployment", "demo-storyteller-decode")
    ]
    annotations = pod["metadata"]["annotations"]
    assert (annotations["k8s.v1.cni.cncf.io/networks"], annotations["team"]) == ("rdma-a,rdma-b", "a")
    for container in (*pod["spec"]["initContainers"], *pod["spec"]["containers"]):
        assert container["resources"]["limits"]["rdma/hca_shared_devices_a"] == 2
        assert {"name": "UCX_NET_DEVICES", "value": "mlx5_0:1"} in container["env"]
    plain = dict(pod_specs(render()))["demo-storyteller-decode"]
    assert set(plain["containers"][0]["resources"]["limits"]) == {"cpu", "memory"}
    assert "UCX_NET_DEVICES" not in {each["name"] for each in plain["containers"][0]["env"]}


def test_a_pool_may_have_other_nics_than_the_rest() -> None:
    model = {"name": "a", "source": {"configMap": {}}, "decode": {"replicas": 1, "rdma": {"count": 4}}}
    model["prefill"] = {"replicas": 1, "doctor": False}
    specs = dict(pod_specs(render({"models": [model], "worker": {"rdma": RDMA, "doctor": True}})))
    limits = {name: spec["containers"][0].get("resources", {})["limits"] for name, spec in specs.items()}
    counts = [limits[f"demo-a-{role}"]["rdma/hca_shared_devices_a"] for role in ("decode", "prefill")]
    assert counts == [4, 2]
    assert ["initContainers" in specs[f"demo-a-{role}"] for role in ("decode", "prefill")] == [True, False]


def test_workers_of_a_model_keep_to_a_rail_beside_what_else_is_preferred() -> None:
    other = {"weight": 1, "podAffinityTerm": {"topologyKey": "zone", "labelSelector": {"matchLabels": {"a": "b"}}}}
    required = {"requiredDuringSchedulingIgnoredDuringExecution": [other["podAffinityTerm"]]}
    own = {
        "podAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": [other], **required},
        "nodeAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": []},
    }
    models = [
        {"name": name, "source": {"configMap": {}}, "prefill": {"replicas": 1}, "decode": {"replicas": 1}}
        for name in ("a.1", "b")
    ]
    manifests = render({"worker": {"rail": "example.com/leaf", "affinity": own}, "models": models})
    check_schema(manifests, KUBERNETES[-1])
    pods = {
        m["metadata"]["name"]: m["spec"]["template"] for m in manifests if m["kind"] in ("Deployment", "StatefulSet")
    }
    for model in ("a-1", "b"):
        affinity = pods[f"demo-{model}-decode"]["spec"]["affinity"]
        assert affinity["nodeAffinity"] == own["nodeAffinity"]
        assert affinity["podAffinity"].items() >= required.items()
        first, near = affinity["podAffinity"]["preferredDuringSchedulingIgnoredDuringExecution"]
        assert (first, near["weight"], near["podAffinityTerm"]["topologyKey"]) == (other, 100, "example.com/leaf")
        near_to = {
            name
            for name, pod in pods.items()
            if selects(near["podAffinityTerm"]["labelSelector"], pod["metadata"]["labels"])
        }
        assert near_to == {f"demo-{model}-prefill", f"demo-{model}-decode"}
    assert "affinity" not in dict(pod_specs(render()))["demo-storyteller-decode"]


def test_pods_are_spread_over_hosts_and_over_what_else_is_named() -> None:
    zone = {"maxSkew": 2, "topologyKey": "topology.kubernetes.io/zone", "whenUnsatisfiable": "DoNotSchedule"}
    chosen = zone | {"labelSelector": {"matchLabels": {"of": "mine"}}}
    values = {"topologySpreadConstraints": [zone, chosen]}
    for given, names in (({}, ["kubernetes.io/hostname"]), ({"router": values, "worker": values}, None)):
        manifests = render(given)
        check_schema(manifests, KUBERNETES[-1])
        for name in ("demo-router", "demo-storyteller-decode"):
            (pod,) = [
                m["spec"]["template"]
                for m in manifests
                if m["metadata"]["name"] == name and m["kind"] in ("Deployment", "StatefulSet")
            ]
            constraints = pod["spec"]["topologySpreadConstraints"]
            if names is None:  # a pool's are added to `spreadOver`, a router's replace the default
                constraints, last = constraints[:-1], constraints[-1]
                assert last == chosen
                hosts = ["kubernetes.io/hostname"] * (name != "demo-router")
                assert [each["topologyKey"] for each in constraints] == [*hosts, zone["topologyKey"]]
                assert constraints[-1].items() >= zone.items()
            else:
                assert [each["topologyKey"] for each in constraints] == names
            for each in constraints:
                selected = [
                    m
                    for m in manifests
                    if m["kind"] in ("Deployment", "StatefulSet")
                    and selects(each["labelSelector"], m["spec"]["template"]["metadata"]["labels"])
                ]
                assert [m["metadata"]["name"] for m in selected] == [name], "its own pods and no others"


def test_the_doctor_has_what_the_worker_will_have() -> None:
    for values in (ROOT / "helm" / "examples" / "gpu-rdma.yaml", {"worker": {"doctor": True, "ipcLock": True}}):
        manifests = render(values)
        doctors = 0
        for _, spec in pod_specs(manifests):
            for doctor in spec.get("initContainers", []):
                (worker,) = spec["containers"]
                assert doctor["name"] == "doctor"
                doctors += 1
                same = ("image", "env", "resources", "securityContext", "volumeMounts")
                assert [doctor[key] for key in same] == [worker[key] for key in same]
        assert doctors == (3 if isinstance(values, Path) else 2)
    assert not any("initContainers" in spec for _, spec in pod_specs(render()))


def test_the_doctor_comes_after_the_model() -> None:
    source = {"download": {"image": "curl:1", "command": ["true"], "size": "1Gi"}}
    model = {"name": "a", "source": source, "decode": {"replicas": 1, "doctor": True}}
    spec = dict(pod_specs(render({"models": [model]})))["demo-a-decode"]
    assert [each["name"] for each in spec["initContainers"]] == ["download-a", "doctor"]


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


ROUTED: dict[str, Any] = {
    "apiKeys": {"secret": "keys"},
    "router": {
        "routes": {"enabled": True, "parentRefs": [{"name": "gateway"}], "grpcHostnames": ["grpc.example.com"]},
        "ingress": {"enabled": True, "className": "nginx", "host": "llm.example.com", "tlsSecret": "certificate"},
    },
}


def test_ways_into_the_cluster() -> None:
    manifests = render(ROUTED)
    for version in KUBERNETES:
        check_schema(manifests, version)
    by_kind = {manifest["kind"]: manifest for manifest in manifests}
    for kind, port in (("HTTPRoute", 8000), ("GRPCRoute", 50051)):
        spec = by_kind[kind]["spec"]
        assert spec["parentRefs"] == [{"name": "gateway"}]
        assert spec["rules"][0]["backendRefs"] == [{"name": "demo", "port": port}]
    assert by_kind["GRPCRoute"]["spec"]["hostnames"] == ["grpc.example.com"]
    assert "hostnames" not in by_kind["HTTPRoute"]["spec"]
    spec = by_kind["Ingress"]["spec"]
    assert (spec["ingressClassName"], spec["tls"][0]["hosts"]) == ("nginx", ["llm.example.com"])
    assert spec["rules"][0]["http"]["paths"][0]["backend"]["service"] == {"name": "demo", "port": {"name": "http"}}
    assert not {"HTTPRoute", "GRPCRoute", "Ingress"} & {manifest["kind"] for manifest in render()}


@pytest.mark.parametrize("way", ["routes", "ingress"])
def test_a_way_in_for_everybody_is_refused(way: str) -> None:
    answer = template({"router": {way: ROUTED["router"][way]}})
    assert f"router.{way}.enabled: it lets everybody in" in answer.stderr


def test_routes_without_a_gateway_are_refused() -> None:
    answer = template({"apiKeys": {"secret": "keys"}, "router": {"routes": {"enabled": True}}})
    assert "router.routes.parentRefs: names no Gateway" in answer.stderr


def test_workers_share_a_volume_or_a_bucket_for_kv_blocks() -> None:
    values = {"worker": {"kvStore": {"claimName": "kv", "credentialsSecret": "aws", "signingSecret": "sign"}}}
    manifests = render(values)
    for name in ("demo-storyteller-decode", "demo-storyteller-prefill"):
        config = WorkerConfig.parse(config_of(manifests, name, "worker"))
        assert (config.kv_store, str(config.kv_store_secret_file)) == ("/kv-store", "/etc/tandem-kv-store/key")
        spec = dict(pod_specs(manifests))[name]
        mounts = {mount["name"]: mount["mountPath"] for mount in spec["containers"][0]["volumeMounts"]}
        volumes = {volume["name"]: volume for volume in spec["volumes"]}
        assert (mounts["kv-store"], mounts["kv-store-secret"]) == ("/kv-store", "/etc/tandem-kv-store")
        assert volumes["kv-store"]["persistentVolumeClaim"]["claimName"] == "kv"
        assert volumes["kv-store-secret"]["secret"]["secretName"] == "sign"
        assert spec["containers"][0]["envFrom"] == [{"secretRef": {"name": "aws"}}]
