"""Sizes of pools and routers over installs and upgrades, with helm's `lookup` answered by an API server."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support.chart import HELM, HELM_3, HPA, config_of, render
from support.kube_api import KubeApi
from support.long_runs import long

DECODE, ROUTER = ("deployments", "demo-a-decode"), ("statefulsets", "demo-router")
PLANNER: dict[str, Any] = {"planner": {"enabled": True}}
ROUTER_SCALER: dict[str, Any] = {"enabled": True, "minReplicas": 2, "maxReplicas": 3}


BINARIES = {"helm 4": HELM, "helm 3": HELM_3}


@pytest.fixture(params=["helm 4", pytest.param("helm 3", marks=long)])
def binary(request: pytest.FixtureRequest) -> str:
    if (path := BINARIES[request.param]) is None:
        pytest.skip(f"no {request.param}: `make helm` gets it")
    return str(path)


class Release:
    """A release on an API server that starts empty."""

    def __init__(self, api: KubeApi, binary: str) -> None:
        self.api = api
        self._binary = binary

    def upgrade(self, values: dict[str, Any], decode: dict[str, Any], router: dict[str, Any] | None = None) -> None:
        """Install or upgrade: render with lookups, and make the result the live state."""
        model = {"name": "a", "source": {"configMap": {}}, "decode": decode}
        values = values | {"models": [model], "router": router or {}}
        self.manifests = render(values, *self.api.options, binary=self._binary)
        self.api.apply(self.manifests)


@pytest.fixture
def release(tmp_path: Path, binary: str) -> Iterator[Release]:
    with KubeApi(tmp_path) as api:
        yield Release(api, binary)


def test_sizes_set_by_hand_stay_until_the_values_change(release: Release) -> None:
    release.upgrade({}, {"replicas": 2}, {"replicas": 2})
    assert (release.api.size_of(*DECODE), release.api.size_of(*ROUTER)) == (2, 2)
    release.api.scale(*DECODE, 5)
    release.api.scale(*ROUTER, 3)
    release.upgrade({}, {"replicas": 2, "tag": "0.1.1"}, {"replicas": 2})
    assert (release.api.size_of(*DECODE), release.api.size_of(*ROUTER)) == (5, 3)
    routers = config_of(release.manifests, "demo-a-decode", "worker")["routers"]
    assert [router.partition(".")[0] for router in routers] == [f"demo-router-{number}" for number in range(3)]
    release.upgrade({}, {"replicas": 4}, {"replicas": 1})
    assert (release.api.size_of(*DECODE), release.api.size_of(*ROUTER)) == (4, 1)


def test_planner_on_then_off_then_an_autoscaler_keep_the_live_size(release: Release) -> None:
    release.upgrade({}, {"replicas": 2})
    release.api.scale(*DECODE, 3)
    for values, decode in (
        (PLANNER, {"replicas": 2}),
        ({}, {"replicas": 2}),
        ({}, {"replicas": 2, "autoscaling": HPA}),
        (PLANNER, {"replicas": 6}),
        ({}, {"replicas": 6}),
    ):
        release.upgrade(values, decode)
        assert release.api.size_of(*DECODE) == 3


def test_a_pool_that_its_planner_emptied_stays_empty(release: Release) -> None:
    values = {"planner": {"enabled": True, "config": {"decode": {"min_workers": 0}}}}
    release.upgrade(values, {"replicas": 2})
    assert release.api.size_of(*DECODE) == 2
    release.api.scale(*DECODE, 0)
    release.upgrade(values, {"replicas": 2})
    assert release.api.size_of(*DECODE) == 0


@pytest.mark.parametrize("decode", [{"replicas": 2}, {"replicas": 2, "autoscaling": HPA}])
def test_no_pool_stays_empty_without_its_planner(release: Release, decode: dict[str, Any]) -> None:
    """Nothing would start it again: no client reaches a pool of 0, and an autoscaler leaves it alone."""
    values = {"planner": {"enabled": True, "config": {"decode": {"min_workers": 0}}}}
    release.upgrade(values, {"replicas": 2})
    release.api.scale(*DECODE, 0)
    release.upgrade({}, decode)
    assert release.api.size_of(*DECODE) == 2
    release.api.scale(*DECODE, 0)
    release.upgrade({}, decode)
    assert release.api.size_of(*DECODE) == 2


def test_a_first_install_with_a_scaler_starts_with_the_values_within_its_bounds(release: Release) -> None:
    bounds = {"min_workers": 3, "max_workers": 5}
    planned = {"planner": {"enabled": True, "config": {"decode": bounds}}}
    for values, decode, size in (
        (PLANNER, {"replicas": 4}, 4),
        (planned, {"replicas": 1}, 3),
        (planned, {"replicas": 9}, 5),
        ({}, {"replicas": 1, "autoscaling": HPA}, HPA["minReplicas"]),
        ({}, {"replicas": 20, "autoscaling": HPA}, HPA["maxReplicas"]),
    ):
        release.api.clear()
        release.upgrade(values, decode)
        assert release.api.size_of(*DECODE) == size


def test_routers_with_an_autoscaler_keep_their_live_size(release: Release) -> None:
    redis: dict[str, Any] = {"redis": {"enabled": True}}
    release.upgrade(redis, {"replicas": 1}, {"replicas": 1, "autoscaling": ROUTER_SCALER})
    assert release.api.size_of(*ROUTER) == 2
    release.api.scale(*ROUTER, 3)
    release.upgrade(redis, {"replicas": 1}, {"replicas": 2, "autoscaling": ROUTER_SCALER})
    assert release.api.size_of(*ROUTER) == 3


def test_a_canary_keeps_the_size_set_by_hand(release: Release) -> None:
    canary = ("deployments", "demo-a-decode-canary")
    for values in ({}, PLANNER):
        release.upgrade(values, {"replicas": 2, "canary": {"replicas": 1}})
        release.api.scale(*canary, 2)
    assert release.api.size_of(*canary) == 2


def test_a_release_from_before_the_annotation_takes_the_values_unless_a_scaler_owns_it(release: Release) -> None:
    for values, size in (({}, 2), (PLANNER, 3)):
        release.api.clear()
        old = {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": DECODE[1]}, "spec": {"replicas": 3}}
        release.api.apply([old])
        release.upgrade(values, {"replicas": 2})
        assert release.api.size_of(*DECODE) == size


def test_without_a_cluster_the_values_are_rendered(binary: str) -> None:
    for values in ({}, PLANNER):
        model = {"name": "a", "source": {"configMap": {}}, "decode": {"replicas": 4}}
        manifests = render(values | {"models": [model]}, binary=binary)
        (pool,) = [each for each in manifests if each["metadata"]["name"] == DECODE[1] and each["kind"] == "Deployment"]
        assert pool["spec"]["replicas"] == 4
        assert pool["metadata"]["annotations"]["tandem/values-replicas"] == "4"
