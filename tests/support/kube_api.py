"""A small API server of Kubernetes: enough of discovery and GET for helm's `lookup` and `.Capabilities`."""

import copy
import re
from collections.abc import Iterable
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import yaml

from support.json_server import JsonServer

KINDS = {
    ("v1", "ConfigMap"): "configmaps",
    ("v1", "PersistentVolumeClaim"): "persistentvolumeclaims",
    ("v1", "Pod"): "pods",
    ("v1", "Service"): "services",
    ("v1", "ServiceAccount"): "serviceaccounts",
    ("apps/v1", "Deployment"): "deployments",
    ("apps/v1", "StatefulSet"): "statefulsets",
    ("autoscaling/v2", "HorizontalPodAutoscaler"): "horizontalpodautoscalers",
    ("batch/v1", "Job"): "jobs",
    ("networking.k8s.io/v1", "Ingress"): "ingresses",
    ("networking.k8s.io/v1", "NetworkPolicy"): "networkpolicies",
    ("policy/v1", "PodDisruptionBudget"): "poddisruptionbudgets",
    ("rbac.authorization.k8s.io/v1", "Role"): "roles",
    ("rbac.authorization.k8s.io/v1", "RoleBinding"): "rolebindings",
}
"""Plural names of the served kinds, by (apiVersion, kind)."""
OBJECT = re.compile(r"^/(?:api/(?P<core>v1)|apis/(?P<group>[^/]+/[^/]+))/namespaces/([^/]+)/([^/]+)/([^/]+)$")


class KubeApi(JsonServer):
    """A context manager: an API server that holds objects, and a kubeconfig that names it."""

    def __init__(self, folder: Path, namespace: str = "default", kinds: Iterable[tuple[str, str, str]] = ()) -> None:
        """Create the server; `kinds` are (apiVersion, kind, plural) of operators that the cluster has."""
        self._kinds = KINDS | {(version, kind): plural for version, kind, plural in kinds}
        self._namespace = namespace
        self._objects: dict[tuple[str, str, str], dict[str, Any]] = {}
        super().__init__()
        self.kubeconfig = folder / "kubeconfig"
        cluster = {"server": self.url}
        self.kubeconfig.write_text(
            yaml.safe_dump(
                {
                    "apiVersion": "v1",
                    "kind": "Config",
                    "current-context": "here",
                    "clusters": [{"name": "here", "cluster": cluster}],
                    "users": [{"name": "me", "user": {}}],
                    "contexts": [{"name": "here", "context": {"cluster": "here", "user": "me"}}],
                }
            )
        )

    @property
    def options(self) -> tuple[str, ...]:
        """Options that let `helm template` ask this server."""
        return "--dry-run=server", "--disable-openapi-validation", "--kubeconfig", str(self.kubeconfig)

    def apply(self, manifests: Iterable[dict[str, Any]], release: str = "demo") -> None:
        """Make the manifests of served kinds the live objects, marked as helm marks those of a release."""
        owner = {"meta.helm.sh/release-name": release, "meta.helm.sh/release-namespace": self._namespace}
        for manifest in manifests:
            if (plural := self._kinds.get((manifest["apiVersion"], manifest["kind"]))) is not None:
                live = copy.deepcopy(manifest)
                live["metadata"].setdefault("annotations", {}).update(owner)
                live["metadata"].setdefault("labels", {})["app.kubernetes.io/managed-by"] = "Helm"
                self._objects[manifest["apiVersion"], plural, manifest["metadata"]["name"]] = live

    def clear(self) -> None:
        """Forget all objects."""
        self._objects.clear()

    def scale(self, plural: str, name: str, replicas: int) -> None:
        """Set the size of a Deployment or StatefulSet, as `kubectl scale` and planners do."""
        self._objects["apps/v1", plural, name]["spec"]["replicas"] = replicas

    def size_of(self, plural: str, name: str) -> int:
        size: int = self._objects["apps/v1", plural, name]["spec"]["replicas"]
        return size

    def answer(self, request: BaseHTTPRequestHandler) -> tuple[int, dict[str, Any]]:
        path = request.path.partition("?")[0]
        versions = {version for version, _ in self._kinds}
        groups = {version for version in versions if "/" in version}
        if path == "/version":
            return 200, {"major": "1", "minor": "36", "gitVersion": "v1.36.2"}
        if path == "/api":
            return 200, {"kind": "APIVersions", "versions": ["v1"]}
        if path == "/apis":
            listed = [_group(version) for version in sorted(groups)]
            return 200, {"kind": "APIGroupList", "apiVersion": "v1", "groups": listed}
        version = path.removeprefix("/apis/").removeprefix("/api/")
        if version in versions:
            resources = [
                {"name": plural, "singularName": "", "namespaced": True, "kind": kind, "verbs": ["get"]}
                for (of, kind), plural in self._kinds.items()
                if of == version
            ]
            return 200, {"kind": "APIResourceList", "apiVersion": "v1", "groupVersion": version, "resources": resources}
        asked = OBJECT.match(path)
        if asked is not None and asked[3] == self._namespace:
            key = (asked["core"] or asked["group"], asked[4], asked[5])
            if key in self._objects:
                return 200, self._objects[key]
        status = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "reason": "NotFound", "code": 404}
        return 404, status | {"message": f"{path} not found"}


def _group(version: str) -> dict[str, Any]:
    named = {"groupVersion": version, "version": version.rpartition("/")[2]}
    return {"name": version.partition("/")[0], "versions": [named], "preferredVersion": named}
