"""Pods that are one worker, or one group of workers, together."""

import itertools
from typing import Any

import pytest

from engine.config import WorkerConfig
from support.chart import (
    EXAMPLES,
    HPA,
    check_all,
    config_of,
    needs_helm,
    pod_specs,
    pod_templates,
    render,
    selects,
    template,
)

pytestmark = needs_helm
GROUPS = {path.stem: path for path in EXAMPLES if path.stem in ("deepseek-v3", "llama-405b")}
FORMS = ("LeaderWorkerSet", "StatefulSet")
INDEX = {"LeaderWorkerSet": "$(LWS_WORKER_INDEX)", "StatefulSet": "$(POD_INDEX)"}


def rendered(name: str, kind: str) -> list[dict[str, Any]]:
    return render(GROUPS[name], "--set", f"worker.groupKind={kind}")


def model(config: dict[str, Any], **pool: Any) -> dict[str, Any]:
    """Values with one model, whose decode workers have these settings."""
    decode = {"replicas": 1, "config": config} | pool
    return {"models": [{"name": "a", "source": {"image": {"reference": "models:1"}}, "decode": decode}]}


def settings_of(spec: dict[str, Any]) -> dict[str, str]:
    """What the command line of a pod's worker sets."""
    arguments = spec["containers"][0]["args"]
    pairs = [value for flag, value in itertools.pairwise(arguments) if flag == "--set"]
    return dict(pair.split("=", 1) for pair in pairs)


def names_of(spec: dict[str, Any]) -> set[str]:
    return {entry["name"] for entry in spec["containers"][0]["env"]}


@pytest.mark.parametrize("kind", FORMS)
@pytest.mark.parametrize("name", GROUPS)
def test_both_forms_are_what_kubernetes_takes(name: str, kind: str) -> None:
    manifests = rendered(name, kind)
    check_all(manifests)


def test_a_worker_over_two_nodes_is_a_leader_and_a_node() -> None:
    """The node serves nothing: no Service selects it, and its program knows its number and its leader."""
    manifests = rendered("llama-405b", "LeaderWorkerSet")
    (found,) = [m for m in manifests if m["kind"] == "LeaderWorkerSet" and "decode" in m["metadata"]["name"]]
    assert found["spec"]["replicas"] == 2
    assert found["spec"]["leaderWorkerTemplate"]["size"] == 2
    leader, node = pod_templates(found)
    assert settings_of(leader["spec"]) == settings_of(node["spec"])
    assert {"member_index": INDEX["LeaderWorkerSet"], "master_addr": "$(LWS_LEADER_ADDRESS)"}.items() <= settings_of(
        leader["spec"]
    ).items()
    services = [m for m in manifests if m["kind"] == "Service"]
    selecting = [m["metadata"]["name"] for m in services if selects_pod(m, leader)]
    assert selecting == ["demo-llama-3-1-405b-decode"]
    assert not any(selects_pod(m, node) for m in services)


def selects_pod(service: dict[str, Any], pod: dict[str, Any]) -> bool:
    return selects({"matchLabels": service["spec"]["selector"]}, pod["metadata"]["labels"])


def test_stateful_sets_number_the_pods_of_each_group() -> None:
    manifests = rendered("llama-405b", "StatefulSet")
    sets = {
        m["metadata"]["name"]: m["spec"]
        for m in manifests
        if m["kind"] == "StatefulSet" and "decode" in m["metadata"]["name"]
    }
    shapes = {name: (spec["replicas"], spec["ordinals"]["start"]) for name, spec in sets.items()}
    name = "demo-llama-3-1-405b-decode-g"
    assert shapes == {f"{name}0": (1, 0), f"{name}0-nodes": (1, 1), f"{name}1": (1, 0), f"{name}1-nodes": (1, 1)}
    for number in (0, 1):
        for end in ("", "-nodes"):
            spec = sets[f"{name}{number}{end}"]["template"]["spec"]
            assert settings_of(spec)["master_addr"] == f"{name}{number}-0.{name}"
            assert settings_of(spec)["member_index"] == INDEX["StatefulSet"]
            assert "POD_INDEX" in names_of(spec)
    selectors = [spec["selector"]["matchLabels"] for spec in sets.values()]
    for spec in sets.values():
        labels = spec["template"]["metadata"]["labels"]
        assert sum(selector.items() <= labels.items() for selector in selectors) == 1
    (service,) = [m for m in manifests if m["kind"] == "Service" and m["metadata"]["name"] == name]
    assert service["spec"]["publishNotReadyAddresses"] is True
    assert all(selects_pod(service, spec["template"]) for spec in sets.values())


@pytest.mark.parametrize("kind", FORMS)
def test_the_pods_of_a_group_have_ranks_of_their_own(kind: str) -> None:
    """Two pods of eight workers: what a program makes of the number that its pod is given."""
    manifests = rendered("deepseek-v3", kind)
    name = "demo-deepseek-v3-decode"
    config = config_of(manifests, name, "worker")
    specs = {json_of(spec) for each, spec in pod_specs(manifests) if each.startswith(f"{name}-g")}
    assert len(specs) == 1, "every pod is alike"
    ranks = [WorkerConfig.parse(config | {"member_index": number}).data_parallel_rank for number in range(2)]
    assert ranks == [0, 8]
    (service,) = [m for m in manifests if m["kind"] == "Service" and m["metadata"]["name"] == name]
    ports = {port["name"]: port["port"] for port in service["spec"]["ports"]}
    assert [ports["metrics"], ports["metrics-7"]] == [9400, 9407]


def json_of(spec: dict[str, Any]) -> tuple[str, ...]:
    return tuple(spec["containers"][0]["args"])


def test_all_workers_of_a_pod_are_reached_and_scraped() -> None:
    """The NetworkPolicy of the pool admits their ports, and all ports within the group."""
    manifests = render(GROUPS["deepseek-v3"], "--set", "monitoring.serviceMonitor=true")
    (policy,) = [
        m for m in manifests if m["kind"] == "NetworkPolicy" and m["metadata"]["name"] == "demo-deepseek-v3-decode"
    ]
    within, members, monitoring = policy["spec"]["ingress"]
    assert "ports" not in within
    assert within["from"][0]["podSelector"]["matchLabels"]["tandem/group"] == "demo-deepseek-v3-decode-g"
    assert members["ports"] == [
        {"port": 50061, "endPort": 50067, "protocol": "TCP"},
        {"port": 50161, "endPort": 50167, "protocol": "TCP"},
        {"port": 50261, "endPort": 50267, "protocol": "TCP"},
    ]
    assert monitoring["ports"] == [{"port": 9401, "endPort": 9407, "protocol": "TCP"}]
    (monitor,) = [m for m in manifests if m["kind"] == "ServiceMonitor"]
    assert [each["port"] for each in monitor["spec"]["endpoints"]] == [
        "metrics",
        *(f"metrics-{n}" for n in range(1, 8)),
    ]


def test_a_group_of_one_pod_is_a_deployment() -> None:
    config = {"engine": "vllm", "data_parallel": 2, "data_parallel_local": 2}
    kinds = [m["kind"] for m in render(model(config, gpus=2)) if m["metadata"]["name"] == "demo-a-decode"]
    assert "Deployment" in kinds


def test_flags_of_vllm_count_too() -> None:
    flags = "--pipeline-parallel-size 2 -tp 4 --nnodes=2"
    (found,) = [m for m in render(model({"engine": "vllm", "vllm_args": flags}, gpus=4)) if "Leader" in m["kind"]]
    assert found["spec"]["leaderWorkerTemplate"]["size"] == 2
    flags = "-dp 8 --data-parallel-size-local 4"
    (found,) = [m for m in render(model({"engine": "vllm", "vllm_args": flags}, gpus=4)) if "Leader" in m["kind"]]
    assert found["spec"]["leaderWorkerTemplate"]["size"] == 2


def test_an_autoscaler_scales_groups() -> None:
    manifests = render(model({"engine": "vllm", "tensor_parallel": 2, "nodes": 2}, gpus=1, autoscaling=HPA))
    (scaler,) = [m for m in manifests if m["kind"] == "HorizontalPodAutoscaler"]
    (found,) = [m for m in manifests if m["kind"] == "LeaderWorkerSet"]
    target = scaler["spec"]["scaleTargetRef"]
    assert (target["kind"], target["name"]) == ("LeaderWorkerSet", found["metadata"]["name"])


NODES = {"engine": "vllm", "tensor_parallel": 2, "nodes": 2}


@pytest.mark.parametrize(
    ("values", "said"),
    [
        (model(NODES, gpus=2), "models: a.decode.gpus: 2 is not 1, the ranks of a pod"),
        (model(NODES | {"nodes": 3}, gpus=1), "models: a.decode.config.nodes: 3 does not divide the 2 ranks"),
        (
            model({"engine": "vllm", "data_parallel": 4, "data_parallel_local": 3}, gpus=3),
            "data_parallel_local: 3 does not divide data_parallel, 4",
        ),
        (model(NODES | {"data_parallel": 2}, gpus=1), "a worker of a data-parallel group has one node in this chart"),
        (model(NODES | {"node_rank": 1}, gpus=1), "config.node_rank of a worker: is set by the chart"),
        (model(NODES | {"master_addr": "a"}, gpus=1), "config.master_addr of a worker: is set by the chart"),
        (model(NODES, gpus=1, minAvailable=1, replicas=3), "a group is lost with any of its pods"),
        (model(NODES, gpus=1) | {"planner": {"enabled": True}}, "the planner sizes Deployments"),
        (
            model(NODES, gpus=1, autoscaling=HPA) | {"worker": {"groupKind": "StatefulSet"}},
            "set worker.groupKind to LeaderWorkerSet",
        ),
        (model(NODES, gpus=1) | {"worker": {"groupKind": "Deployment"}}, "/worker/groupKind"),
    ],
)
def test_groups_that_cannot_be(values: dict[str, Any], said: str) -> None:
    refused = template(values)
    assert refused.returncode
    assert said in refused.stderr
