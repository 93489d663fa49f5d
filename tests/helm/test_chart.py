"""The chart as the real helm renders it: valid for Kubernetes, and by our own rules."""

import re
from pathlib import Path
from typing import Any

import pytest

from engine.config import WorkerConfig
from planner.runtime import PlannerConfig
from router.config import RouterConfig
from support.chart import (
    CHART,
    EXAMPLES,
    HPA,
    KUBERNETES,
    ROOT,
    check_all,
    check_budgets,
    check_rules,
    check_schema,
    config_of,
    helm,
    keeping,
    least_pods,
    needs_helm,
    pod_specs,
    pod_templates,
    render,
    selects,
    template,
)

pytestmark = needs_helm
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
    pods = [template for m in manifests if m["kind"] != "Job" for template in pod_templates(m)]
    services = [m for m in manifests if m["kind"] == "Service"]
    for service in services:
        chosen = [p for p in pods if service["spec"]["selector"].items() <= p["metadata"]["labels"].items()]
        assert len(chosen) == 1, service["metadata"]["name"]
        ports = {port["name"] for container in chosen[0]["spec"]["containers"] for port in container["ports"]}
        assert {port["targetPort"] for port in service["spec"]["ports"]} <= ports
    assert any(service["spec"].get("clusterIP") == "None" for service in services)


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
        assert (config.engine, config.block_tokens, config.vllm_args) == ("vllm", 32, "--max-model-len 32768")


@pytest.mark.parametrize("flag", ["--tensor-parallel-size 2", "--tensor_parallel_size=2", "-tp 2", "-tp=2"])
def test_ranks_in_vllms_flags_have_a_gpu_each(flag: str) -> None:
    flags = f"""--hf-overrides '{{"a": "b: c"}}'\n{flag} --max-model-len 8192"""
    config = {"engine": "vllm", "vllm_args": flags}
    models = [keeping(0) | {"decode": {"replicas": 1}}]
    rendered = config_of(render({"models": models, "worker": {"gpus": 2, "config": config}}), "demo-a-decode", "worker")
    assert rendered["vllm_args"] == flags
    assert WorkerConfig.parse(rendered).tensor_parallel == 2
    refused = template({"models": models, "worker": {"gpus": 1, "config": config}})
    assert "gpus: 1 is not 2, the ranks of a pod" in refused.stderr


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


@pytest.mark.parametrize("claimed", [True, False])
def test_files_and_batches_are_a_container_beside_the_router(claimed: bool) -> None:
    """Only that container has the volume, and both have the folder of the link between them."""
    folder = "/var/lib/tandem-batches" if claimed else "/tmp/files"
    values = {"batches": {"claimName": "files"}} if claimed else {"config": {"batches_folder": folder}}
    manifests = render({"router": values, "redis": {"enabled": True}}, release="x")
    check_all(manifests)
    config = RouterConfig.parse(config_of(manifests, "x-router", "router"))
    assert str(config.batches_folder) == folder
    spec = dict(pod_specs(manifests))["x-router"]
    router, batches = spec["containers"]
    assert [*batches["command"], *batches["args"]] == ["python", "-m", "batches", str(config.batches_link)]
    assert waits_before_stopping(router) == waits_before_stopping(batches)
    mounts = [
        {each["name"]: each["mountPath"] for each in container["volumeMounts"]} for container in (router, batches)
    ]
    assert all(str(config.batches_link).startswith(f"{each['batches-link']}/") for each in mounts)
    assert [each.get("batches") for each in mounts] == [None, folder if claimed else None]
    assert all(each["tmp"] == "/tmp" for each in mounts)
    both = template({"router": {"batches": {"claimName": "a"}, "config": {"batches_folder": "/b"}}})
    assert "router.batches.claimName" in both.stderr


def test_without_a_folder_there_is_no_process_of_batches() -> None:
    assert [each["name"] for each in dict(pod_specs(render()))["demo-router"]["containers"]] == ["router"]


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


def test_monitors_use_the_same_certificates() -> None:
    tls = "monitoring.tlsConfig.serverName=tandem.internal"
    for monitor, kind, endpoints in (
        ("podMonitor", "PodMonitor", "podMetricsEndpoints"),
        ("serviceMonitor", "ServiceMonitor", "endpoints"),
    ):
        options = ("--set", f"monitoring.{monitor}=true,{tls}")
        manifests = render(ROOT / "helm" / "examples" / "tls.yaml", *options)
        (found,) = [m for m in manifests if m["kind"] == kind]
        (endpoint,) = found["spec"][endpoints]
        assert (endpoint["scheme"], endpoint["tlsConfig"]["serverName"]) == ("https", "tandem.internal")


def test_a_network_policy_is_about_every_pod(example: Path | None) -> None:
    manifests = render(example)
    policies = [m["spec"]["podSelector"] for m in manifests if m["kind"] == "NetworkPolicy"]
    for manifest in manifests:
        pod = manifest if manifest["kind"] == "Pod" else manifest.get("spec", {}).get("template")
        if pod is not None:
            chosen = [policy for policy in policies if selects(policy, pod["metadata"]["labels"])]
            assert len(chosen) == 1, manifest["metadata"]["name"]


WORKERS = {"demo-storyteller-prefill", "demo-storyteller-decode"}


@pytest.mark.parametrize(
    ("changed", "concerned"),
    [
        ({"worker": {"config": {"block_tokens": 32}}}, WORKERS),
        ({"models": [{"source": {"configMap": {"config": {"rope_theta": 5}}}}]}, WORKERS | {"demo-router"}),
    ],
)
def test_a_changed_setting_restarts_whom_it_concerns(changed: dict[str, Any], concerned: set[str]) -> None:
    """Also another revision of a model whose files are in the values."""
    pool = {"replicas": 1}
    model = {"name": "storyteller", "source": {"configMap": {}}, "prefill": pool, "decode": pool}
    values: dict[str, Any] = {"models": [model]}
    changed_values = values | changed | {"models": [model | changed.get("models", [{}])[0]]}
    before, after = render(values), render(changed_values)

    def checksums(manifests: list[dict[str, Any]]) -> dict[str, str]:
        return {
            m["metadata"]["name"]: m["spec"]["template"]["metadata"]["annotations"]["checksum/config"]
            for m in manifests
            if m["kind"] in ("Deployment", "StatefulSet")
        }

    old, new = checksums(before), checksums(after)
    assert {name for name in old if old[name] != new[name]} == concerned


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


@pytest.mark.parametrize(("size", "grown"), [("2Gi", "18432Mi"), ("512Mi", "16896Mi")])
def test_shared_memory_grows_by_the_kv_that_is_kept_there(size: str, grown: str) -> None:
    model = {
        "name": "a",
        "source": {"hostPath": {"path": "/models/a"}},
        "prefill": {"replicas": 1},
        "decode": {"replicas": 1, "config": {"kv_host_memory_mib": 16384}},
    }
    manifests = render({"models": [model], "worker": {"sharedMemory": size}}, release="x")
    sizes = {
        name: volume["emptyDir"]["sizeLimit"]
        for name, spec in pod_specs(manifests)
        for volume in spec["volumes"]
        if volume["name"] == "shm"
    }
    assert sizes == {"x-a-prefill": size, "x-a-decode": grown}
