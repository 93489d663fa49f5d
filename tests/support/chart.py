"""The chart, rendered by the real helm, and what holds of all that is rendered."""

import functools
import json
import os
import re
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml
from kubernetes_validate import utils

from cluster.roles import ROLES
from planner.runtime import PlannerConfig

ROOT = Path(__file__).parents[2]
CHART = ROOT / "helm" / "tandem"
KUBERNETES = ("1.31", "1.34", "1.37")
HPA: dict[str, Any] = {"enabled": True, "minReplicas": 2, "maxReplicas": 9, "target": "0.8"}
OPERATORS = {"ServiceMonitor", "PodMonitor", "PrometheusRule", "ScaledObject", "GRPCRoute"}
"""Kinds of others, of which Kubernetes has no schema."""
LEADER_WORKER_SET: dict[str, Any] = {
    "required": ["replicas", "leaderWorkerTemplate"],
    "additionalProperties": False,
    "properties": {
        "replicas": {"type": "integer"},
        "startupPolicy": {"enum": ["LeaderCreated", "LeaderReady"]},
        "networkConfig": {
            "additionalProperties": False,
            "properties": {"subdomainPolicy": {"enum": ["Shared", "UniquePerReplica"]}},
        },
        "leaderWorkerTemplate": {
            "required": ["size", "workerTemplate"],
            "additionalProperties": False,
            "properties": {
                "size": {"type": "integer", "minimum": 1},
                "restartPolicy": {"enum": ["None", "RecreateGroupOnPodRestart", "RecreateGroupAfterStart"]},
                "leaderTemplate": {"type": "object"},
                "workerTemplate": {"type": "object"},
            },
        },
    },
}
"""Schema of a LeaderWorkerSet's `spec` (leaderworkerset.x-k8s.io/v1), as far as the chart uses it. Pods' templates are
checked as those of a Deployment."""
PORT = {"type": "integer", "minimum": 1, "maximum": 65535}
NAME = {"type": "string", "minLength": 1, "maxLength": 253}
LABEL = {"type": "string", "maxLength": 63, "pattern": "^(([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9])?$"}
DURATION = {"type": "string", "pattern": "^([0-9]{1,5}(h|m|s|ms)){1,4}$"}
INFERENCE_POOL: dict[str, Any] = {
    "required": ["selector", "targetPorts"],
    "additionalProperties": False,
    "properties": {
        "appProtocol": {"enum": ["http", "kubernetes.io/h2c"]},
        "selector": {
            "required": ["matchLabels"],
            "additionalProperties": False,
            "properties": {
                "matchLabels": {"minProperties": 1, "maxProperties": 64, "additionalProperties": LABEL},
            },
        },
        "targetPorts": {
            "minItems": 1,
            "maxItems": 8,
            "uniqueItems": True,
            "items": {"required": ["number"], "additionalProperties": False, "properties": {"number": PORT}},
        },
        "endpointPickerRef": {
            "required": ["name", "port"],  # the port because the kind is Service
            "additionalProperties": False,
            "properties": {
                "group": {"const": ""},
                "kind": {"const": "Service"},
                "name": NAME,
                "port": {"required": ["number"], "additionalProperties": False, "properties": {"number": PORT}},
                "failureMode": {"enum": ["FailOpen", "FailClose"]},
            },
        },
    },
}
"""Schema of an InferencePool's `spec`: inference.networking.k8s.io/v1 of the Gateway API Inference Extension 1.6.0, as
far as the chart uses it."""
HTTP_ROUTE: dict[str, Any] = {
    "additionalProperties": False,
    "properties": {
        "parentRefs": {
            "maxItems": 32,
            "items": {
                "required": ["name"],
                "additionalProperties": False,
                "properties": {"name": NAME, "group": {}, "kind": {}, "namespace": {}, "port": PORT, "sectionName": {}},
            },
        },
        "hostnames": {
            "maxItems": 16,
            "items": NAME | {"pattern": r"^(\*\.)?[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*$"},
        },
        "rules": {
            "minItems": 1,
            "items": {
                "additionalProperties": False,
                "properties": {
                    "timeouts": {
                        "additionalProperties": False,
                        "properties": {"request": DURATION, "backendRequest": DURATION},
                    },
                    "backendRefs": {
                        "items": {
                            "required": ["name"],
                            "additionalProperties": False,
                            "properties": {"name": NAME, "group": {}, "kind": {}, "namespace": {}, "port": PORT},
                            "anyOf": [{"required": ["kind"]}, {"required": ["port"]}],  # a Service needs a port
                        }
                    },
                },
            },
        },
    },
}
"""Schema of an HTTPRoute's `spec`: gateway.networking.k8s.io/v1 of the Gateway API 1.6.1, as far as the chart uses
it."""
OF_OTHERS = {"LeaderWorkerSet": LEADER_WORKER_SET, "InferencePool": INFERENCE_POOL, "HTTPRoute": HTTP_ROUTE}
utils.schema_contents = functools.cache(utils.schema_contents)  # it reads megabytes for each manifest
EXAMPLES = sorted((ROOT / "helm" / "examples").glob("*.yaml"))


def _find_helm(name: str) -> str | None:
    here = ROOT / ".helm" / name
    return os.environ.get(f"TANDEM_{name.upper()}") or (str(here) if here.exists() else shutil.which(name))


HELM = _find_helm("helm")
HELM_3 = _find_helm("helm3")
needs_helm = pytest.mark.skipif(HELM is None, reason="no helm: `make helm` gets it")


def helm(*arguments: str, binary: str | None = HELM) -> subprocess.CompletedProcess[str]:
    assert binary is not None
    return subprocess.run([binary, *arguments], capture_output=True, text=True, timeout=60, check=False)


def render(
    values: dict[str, Any] | Path | None = None, *options: str, release: str = "demo", binary: str | None = HELM
) -> list[dict[str, Any]]:
    """All manifests. Fails with helm's own words."""
    answer = template(values, *options, release=release, binary=binary)
    assert answer.returncode == 0, answer.stderr
    return [manifest for manifest in yaml.safe_load_all(answer.stdout) if manifest]


def template(
    values: dict[str, Any] | Path | None = None, *options: str, release: str = "demo", binary: str | None = HELM
) -> subprocess.CompletedProcess[str]:
    if values is None:
        return helm("template", release, str(CHART), *options, binary=binary)
    if isinstance(values, Path):
        return helm("template", release, str(CHART), "-f", str(values), *options, binary=binary)
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
        json.dump(values, file)  # which is YAML in which no word is a boolean
        file.flush()
        return helm("template", release, str(CHART), "-f", file.name, *options, binary=binary)


def pod_specs(manifests: list[dict[str, Any]]) -> list[tuple[str, dict[str, Any]]]:
    """Of all that make pods, by their names."""
    found = []
    for manifest in manifests:
        found += [(manifest["metadata"]["name"], template["spec"]) for template in pod_templates(manifest)]
        if manifest["kind"] == "Pod":
            found.append((manifest["metadata"]["name"], manifest["spec"]))
    return found


def pod_templates(manifest: dict[str, Any]) -> list[dict[str, Any]]:
    """Templates of a manifest's pods; of a LeaderWorkerSet, the first pod's and the others'."""
    if manifest["kind"] == "LeaderWorkerSet":
        group = manifest["spec"]["leaderWorkerTemplate"]
        return [group[name] for name in ("leaderTemplate", "workerTemplate") if name in group]
    return [manifest["spec"]["template"]] if manifest["kind"] in ("Deployment", "StatefulSet", "Job") else []


def keeping(available: int, **pool: Any) -> dict[str, Any]:
    """A model with a PodDisruptionBudget."""
    return {"name": "a", "source": {"image": {"reference": "models:1"}}, "decode": {"minAvailable": available, **pool}}


def config_of(manifests: list[dict[str, Any]], name: str, container: str) -> dict[str, Any]:
    names = (name, name.removesuffix("-g"))  # that of a group, and its pool's
    (found,) = [m for m in manifests if m["kind"] == "ConfigMap" and m["metadata"]["name"] in names]
    config: dict[str, Any] = yaml.safe_load(found["data"][f"{container}.yaml"])
    return config


def check_schema(manifests: list[dict[str, Any]], version: str) -> None:
    """They are what that version of Kubernetes takes."""
    for manifest in manifests:
        if manifest["kind"] in OF_OTHERS:
            jsonschema.validate(manifest["spec"], OF_OTHERS[manifest["kind"]])
            for template in pod_templates(manifest):
                labels = {"matchLabels": template["metadata"]["labels"]}
                spec = {"selector": labels, "template": template}
                deployment = {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": "a"}, "spec": spec}
                kubernetes_validate.validate(deployment, version, strict=True)
        elif manifest["kind"] not in OPERATORS:
            kubernetes_validate.validate(manifest, version, strict=True)


def check_all(manifests: list[dict[str, Any]]) -> None:
    """They keep the rules, and every version of Kubernetes takes them."""
    check_rules(manifests)
    for version in KUBERNETES:
        check_schema(manifests, version)


def check_rules(manifests: list[dict[str, Any]]) -> None:
    """Of every pod and its containers."""
    names = [(each["kind"], each["metadata"].get("namespace"), each["metadata"]["name"]) for each in manifests]
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
        if name.endswith(("-test", "-fit-check")):
            continue
        for container in spec["containers"]:
            probes = {"startupProbe", "livenessProbe"}
            if container["name"] != "batches":  # without it a router still serves all else
                probes.add("readinessProbe")
            assert probes <= set(container), name


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


def selects(selector: dict[str, Any], labels: dict[str, str]) -> bool:
    """Return whether a label selector selects labels."""
    expressions = selector.get("matchExpressions", [])
    assert all(each["operator"] == "In" for each in expressions)
    return selector.get("matchLabels", {}).items() <= labels.items() and all(
        labels.get(each["key"]) in each["values"] for each in expressions
    )


def cpu_of(manifest: dict[str, Any]) -> int:
    """Return the thousandths of a core that a manifest's pods request, with the surge of an upgrade."""
    if manifest["kind"] == "Pod":
        return _requested(manifest["spec"])
    if manifest["kind"] not in ("Deployment", "StatefulSet"):
        return 0
    spec = manifest["spec"]
    surge: int = spec.get("strategy", {}).get("rollingUpdate", {}).get("maxSurge", 0)
    return (int(spec["replicas"]) + surge) * _requested(spec["template"]["spec"])


def _requested(spec: dict[str, Any]) -> int:
    """Return the CPU that the scheduler reserves for a pod: its containers, or the largest init container."""

    def of(containers: list[dict[str, Any]]) -> list[int]:
        return [_milli_cpu(container["resources"]["requests"]["cpu"]) for container in containers]

    return max([sum(of(spec["containers"])), *of(spec.get("initContainers", []))])


def _milli_cpu(quantity: Any) -> int:
    text = str(quantity)
    return int(text.removesuffix("m")) if text.endswith("m") else round(float(text) * 1000)
