"""Examples as their readers try them: what a small node holds, what each needs and names, what a cluster refuses."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

from support.chart import (
    EXAMPLES,
    HELM,
    HELM_3,
    HPA,
    ROOT,
    check_rules,
    config_of,
    cpu_of,
    helm,
    keeping,
    needs_helm,
    pod_specs,
    render,
    template,
)
from support.kube_api import KubeApi
from tandem.storyteller import STORYTELLER

pytestmark = needs_helm
FOLDER = ROOT / "helm" / "examples"
NODE_MILLI_CPU = 2000
KIND_MILLI_CPU = {
    "coredns": 2 * 100,
    "etcd": 100,
    "kindnet": 100,
    "kube-apiserver": 250,
    "kube-controller-manager": 200,
    "kube-scheduler": 100,
}
"""Requests of the pods that kind runs on its node, in thousandths of a core."""
OPERATORS = {
    "ServiceMonitor": ("monitoring.serviceMonitor", "monitoring.coreos.com/v1", "the Prometheus operator"),
    "PodMonitor": ("monitoring.podMonitor", "monitoring.coreos.com/v1", "the Prometheus operator"),
    "PrometheusRule": ("monitoring.rules", "monitoring.coreos.com/v1", "the Prometheus operator"),
    "ScaledObject": ("planner.keda.enabled", "keda.sh/v1alpha1", "KEDA"),
    "LeaderWorkerSet": (
        "worker.groupKind",
        "leaderworkerset.x-k8s.io/v1",
        "the LeaderWorkerSet controller",
    ),
    "InferencePool": (
        "epp.pool.matchLabels",
        "inference.networking.k8s.io/v1",
        "the Gateway API Inference Extension",
    ),
    "HTTPRoute": ("router.routes.enabled", "gateway.networking.k8s.io/v1", "the Gateway API"),
    "GRPCRoute": ("router.routes.enabled", "gateway.networking.k8s.io/v1", "the Gateway API"),
}
WITH_OPERATORS: dict[str, dict[str, Any]] = {
    "monitoring.serviceMonitor": {"monitoring": {"serviceMonitor": True}},
    "monitoring.podMonitor": {"monitoring": {"podMonitor": True}},
    "monitoring.rules": {"monitoring": {"rules": True}},
    "planner.keda.enabled": {
        "planner": {"enabled": True, "keda": {"enabled": True, "serverAddress": "http://prometheus:9090"}}
    },
    "worker.groupKind": {
        "models": [
            {
                "name": "a",
                "source": {"image": {"reference": "models:1"}},
                "decode": {"replicas": 1, "config": {"engine": "vllm", "tensor_parallel": 2, "nodes": 2}},
            }
        ]
    },
    "router.routes.enabled": {
        "apiKeys": {"secret": "keys"},
        "router": {"routes": {"enabled": True, "parentRefs": [{"name": "gateway"}]}},
    },
    "epp.pool.matchLabels": {
        "models": [],
        "router": {"fleet": {"servers": [{"pods": {"selector": "app=vllm", "port": 8000}}]}},
        "epp": {"enabled": True, "pool": {"matchLabels": {"app": "vllm"}}},
    },
}
"""Values that ask for objects of operators."""


@pytest.mark.parametrize("name", ["sim", "tls", "laptop", "laptop-restricted"])
def test_it_fits_a_node_of_two_cores_with_helm_test_and_while_it_is_upgraded(name: str) -> None:
    total = sum(KIND_MILLI_CPU.values())
    total += sum(map(cpu_of, render(FOLDER / f"{name}.yaml")))
    assert total <= NODE_MILLI_CPU


def test_what_helm_test_requests_is_a_value() -> None:
    resources = {"requests": {"cpu": "10m", "memory": "64Mi"}, "limits": {"cpu": "1", "memory": "1Gi"}}
    specs = dict(pod_specs(render({"helmTest": {"resources": resources}})))
    assert specs["demo-test"]["containers"][0]["resources"] == resources


def needs(manifests: list[dict[str, Any]]) -> set[str]:
    """Return what a cluster must have for these manifests, in the words of the examples."""
    found = {OPERATORS[kind][2] for kind in {manifest["kind"] for manifest in manifests} if kind in OPERATORS}
    for manifest in manifests:
        if manifest["kind"] == "HorizontalPodAutoscaler":
            (metric,) = manifest["spec"]["metrics"]
            found.add({"Pods": "the Prometheus adapter", "Resource": "metrics-server"}[metric["type"]])
    for _, spec in pod_specs(manifests):
        if "runtimeClassName" in spec:
            found.add(f"the RuntimeClass {spec['runtimeClassName']}")
        for container in spec["containers"]:
            limits = container["resources"]["limits"]
            found |= {"NVIDIA's device plugin"} if "nvidia.com/gpu" in limits else set()
            found |= {"an RDMA device plugin"} if any(key.startswith("rdma/") for key in limits) else set()
        for volume in spec["volumes"]:
            if "persistentVolumeClaim" in volume:
                found.add(f"the PersistentVolumeClaim `{volume['persistentVolumeClaim']['claimName']}`")
            if "hostPath" in volume:
                found.add("PodSecurity is `privileged`")
    return found


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_its_first_comment_names_what_the_cluster_must_have(example: Path) -> None:
    first = re.match(r"(?:#.*\n)+", example.read_text())
    comment = " ".join(first[0].replace("#", " ").split())
    required = needs(render(example))
    operators = {"the Prometheus operator", "KEDA", "the Prometheus adapter", "metrics-server", "the Gateway API"}
    for each in required:
        assert each.removeprefix("the ") in comment or each in comment
    for other in operators - required:
        assert other.removeprefix("the ") not in comment
    assert ("It needs no operator" in comment) == (not required - {"PodSecurity is `privileged`"})


def test_the_laptop_without_hostpath_takes_the_model_out_of_the_image(tmp_path: Path) -> None:
    manifests = render(FOLDER / "laptop-restricted.yaml")
    check_rules(manifests)
    commands = []
    for name, spec in pod_specs(manifests):
        assert not any("hostPath" in volume for volume in spec["volumes"])
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        if name != "demo-test":
            (init,) = spec["initContainers"]
            assert init["image"] == "tandem-router:0.1.0"
            commands.append(init["command"])
    assert config_of(manifests, "demo-router", "router")["models"][0]["path"] == "/models/storyteller"
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    subprocess.run(commands[0], check=True, timeout=60, env={"PATH": path, "MODEL_DIR": str(tmp_path)}, cwd=ROOT)
    assert all(command == commands[0] for command in commands)
    assert {each.name for each in tmp_path.iterdir()} == {each.name for each in STORYTELLER.iterdir()}


def test_with_tls_everything_renders_without_an_operator() -> None:
    assert not {manifest["kind"] for manifest in render(FOLDER / "tls.yaml")} & set(OPERATORS)


@pytest.mark.parametrize("value", WITH_OPERATORS)
def test_a_cluster_without_the_operator_is_told_which_value_to_unset(value: str) -> None:
    kinds = [kind for kind, (of, *_) in OPERATORS.items() if of == value]
    refused = template(WITH_OPERATORS[value], "--api-versions", "apps/v1/Deployment")
    assert refused.returncode != 0
    assert f"{value}: the cluster has no " in refused.stderr
    assert f"or unset {value}" in refused.stderr
    versions = [f"--api-versions={OPERATORS[kind][1]}/{kind}" for kind in kinds]
    rendered = {each["kind"] for each in render(WITH_OPERATORS[value], "--api-versions=apps/v1/Deployment", *versions)}
    assert set(kinds) <= rendered
    assert set(kinds) <= {each["kind"] for each in render(WITH_OPERATORS[value])}, "without a cluster nobody was asked"


@pytest.mark.parametrize("binary", [HELM, HELM_3], ids=["helm 4", "helm 3"])
def test_a_real_install_asks_the_cluster(tmp_path: Path, binary: str | None) -> None:
    if binary is None:
        pytest.skip("no helm 3: `make helm` gets it")
    chart = str(ROOT / "helm" / "tandem")
    install = ("install", "demo", chart, "--set", "monitoring.rules=true", "--dry-run=server")
    rules = ("monitoring.coreos.com/v1", "PrometheusRule", "prometheusrules")
    for kinds, missing in (((), True), ((rules,), False)):
        with KubeApi(tmp_path, kinds=kinds) as api:
            answer = helm(*install, *api.options[1:], binary=binary)
        assert ("monitoring.rules: the cluster has no PrometheusRule" in answer.stderr) == missing, answer.stderr
        assert (answer.returncode != 0) == missing, answer.stderr


def notes(tmp_path: Path, *options: str, live: Mapping[str, int] = MappingProxyType({})) -> str:
    """The notes of an installation; where `live` are the sizes of Deployments, of an upgrade."""
    with KubeApi(tmp_path) as api:
        for name, size in live.items():
            annotations = {"tandem/values-replicas": "2"}
            metadata: dict[str, Any] = {"name": name, "annotations": annotations}
            api.apply(
                [{"apiVersion": "apps/v1", "kind": "Deployment", "metadata": metadata, "spec": {"replicas": size}}]
            )
        arguments = ("install", "demo", str(ROOT / "helm" / "tandem"), "--dry-run=server", *api.options[1:], *options)
        answer = helm(*arguments)
    assert answer.returncode == 0, answer.stderr
    return answer.stdout.partition("NOTES:")[2]


def test_notes_tell_what_podsecurity_forbids(tmp_path: Path) -> None:
    assert "PodSecurity" not in notes(tmp_path, "-f", str(FOLDER / "laptop-restricted.yaml"))
    assert "no pod with source.hostPath of storyteller." in notes(tmp_path, "-f", str(FOLDER / "laptop.yaml"))
    assert "no pod with worker.ipcLock." in notes(tmp_path, "--set", "worker.ipcLock=true")
    models = [keeping(0, replicas=1, ipcLock=True)]
    assert "no pod with a.decode.ipcLock." in notes(tmp_path, f"--set-json=models={json.dumps(models)}")


def test_notes_tell_which_sizes_are_not_the_values(tmp_path: Path) -> None:
    pool = {"replicas": 2, "config": {"engine": "sim"}}
    models = [{"name": "a", "source": {"configMap": {}}, "prefill": pool, "decode": pool | {"canary": {"replicas": 1}}}]
    options = (f"--set-json=models={json.dumps(models)}",)
    assert "Sizes:" not in notes(tmp_path, *options)
    assert "Sizes:" not in notes(tmp_path, *options, live={"demo-a-prefill": 2, "demo-a-decode-canary": 1})
    told = notes(tmp_path, *options, live={"demo-a-prefill": 0, "demo-a-decode": 5})
    assert "demo-a-prefill has 2: it had 0, and no planner starts it any more" in told
    assert "demo-a-decode keeps 5; the values have 2" in told
    planned = ("--set-json", 'planner={"enabled": true, "config": {"prefill": {"min_workers": 0}}}')
    told = notes(tmp_path, *options, *planned, live={"demo-a-prefill": 0, "demo-a-decode": 2})
    assert "demo-a-prefill keeps 0; the values have 2" in told
    assert "demo-a-decode " not in told


def test_notes_tell_which_autoscaler_has_no_metrics(tmp_path: Path) -> None:
    models = [keeping(0, replicas=2, autoscaling=HPA)]
    options = (f"--set-json=models={json.dumps(models)}", "--set=router.autoscaling.enabled=true,redis.enabled=true")
    told = notes(tmp_path, *options)
    assert "a.decode.autoscaling changes no size: the cluster has no custom.metrics.k8s.io/v1beta1" in told
    assert "router.autoscaling changes no size: the cluster has no metrics.k8s.io/v1beta1" in told
