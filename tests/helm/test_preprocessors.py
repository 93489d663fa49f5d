"""Preprocessors in the chart: their settings, and who finds them under which names."""

from typing import Any

from preprocessor.config import PreprocessorConfig
from support.chart import check_all, config_of, needs_helm, pod_specs, render, template

pytestmark = needs_helm


def values(**preprocessor: Any) -> dict[str, Any]:
    model = {"name": "a.b", "source": {"hub": {"repository": "org/a"}}, "decode": {"replicas": 1}}
    return {"models": [model | {"preprocessor": {"replicas": 2} | preprocessor}]}


def test_pods_are_found_by_their_names() -> None:
    manifests = render(values(config={"allowed_hosts": ["images.example.org"]}), release="x")
    check_all(manifests)
    config = PreprocessorConfig.parse(config_of(manifests, "x-a-b-preprocessor", "preprocessor"))
    assert list(config.paths) == ["a.b"]
    assert config.allowed_hosts == ("images.example.org",)
    assert config.drain_s == 60
    (entry,) = config_of(manifests, "x-router", "router")["models"]
    names = [f"x-a-b-preprocessor-{number}.x-a-b-preprocessors" for number in range(2)]
    assert entry["preprocessor"] == ",".join(f"{name}:50061" for name in names)
    (container,) = dict(pod_specs(manifests))["x-a-b-preprocessor"]["containers"]
    assert "advertise_host=$(POD_NAME).x-a-b-preprocessors" in container["args"]
    assert container["image"] == "tandem-worker:0.1.0"
    (service,) = [m for m in manifests if m["kind"] == "Service" and m["metadata"]["name"] == "x-a-b-preprocessors"]
    assert service["spec"]["clusterIP"] == "None"


def test_members_certificates_are_theirs_too() -> None:
    manifests = render(values() | {"tls": {"memberSecret": "member"}}, release="x")
    config = config_of(manifests, "x-a-b-preprocessor", "preprocessor")
    assert config["tls_ca"] == "/etc/tandem-tls/member/ca.crt"
    assert config["tls_server_name"] == "tandem.internal"


def test_only_members_reach_them() -> None:
    policies = {m["metadata"]["name"]: m for m in render(values(), release="x") if m["kind"] == "NetworkPolicy"}
    members, scrapers = policies["x-preprocessors"]["spec"]["ingress"]
    assert [port["port"] for port in members["ports"]] == [50061]
    assert all("namespaceSelector" not in each for each in members["from"])
    assert [port["port"] for port in scrapers["ports"]] == [9400]


def test_a_model_without_one_has_none() -> None:
    manifests = render(values(replicas=0), release="x")
    assert not [m for m in manifests if "preprocessor" in m["metadata"]["name"]]
    assert "preprocessor" not in config_of(manifests, "x-router", "router")["models"][0]


def test_settings_of_the_chart_and_unknown_ones_are_refused() -> None:
    assert "preprocessor.config.port: is set by the chart" in template(values(config={"port": 5})).stderr
    assert "max_itmes" in template(values(config={"max_itmes": 5})).stderr
    assert "ports" in template(values() | {"preprocessor": {"ports": 5}}).stderr
    refused = template(values() | {"preprocessor": {"grpcPort": 9400}}).stderr
    assert "a pod has each port once" in refused
