"""Pods of the chart on their nodes: GPUs, NICs, rails, spread, and the check before a worker starts."""

import json
from pathlib import Path
from typing import Any

from engine.config import WorkerConfig
from support.chart import (
    KUBERNETES,
    ROOT,
    check_schema,
    config_of,
    needs_helm,
    pod_specs,
    render,
    selects,
)

pytestmark = needs_helm


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
    of_members, of_workers = policy["spec"]["ingress"][:2]
    assert [port["port"] for port in of_members["ports"]] == [50060, 50160]
    assert of_workers["ports"] == [
        {"port": 50260, "protocol": "TCP"},
        {"port": 20000, "endPort": 20999, "protocol": "TCP"},
    ]
    assert of_workers["from"][0]["podSelector"]["matchLabels"]["tandem/worker"] == "true"
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
