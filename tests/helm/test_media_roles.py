"""Preprocessors and encode workers in the chart: their settings, and who finds them under which names."""

from typing import Any

import pytest

from encode_worker.config import EncoderConfig
from preprocessor.config import PreprocessorConfig
from support.chart import check_all, config_of, needs_helm, pod_specs, render, template

pytestmark = needs_helm
PORTS = {"preprocessor": 50061, "encoder": 50062}
each_role = pytest.mark.parametrize("role", PORTS)


def values(preprocessor: dict[str, Any] | None = None, encoder: dict[str, Any] | None = None) -> dict[str, Any]:
    roles = {"preprocessor": {"replicas": 2} | (preprocessor or {}), "encoder": {"replicas": 2} | (encoder or {})}
    model = {"name": "a.b", "source": {"hub": {"repository": "org/a"}}, "decode": {"replicas": 1}}
    return {"models": [model | roles]}


def names_of(role: str) -> list[str]:
    return [f"x-a-b-{role}-{number}.x-a-b-{role}s:{PORTS[role]}" for number in range(2)]


def test_who_asks_knows_the_names_of_the_pods() -> None:
    settings = {"config": {"allowed_hosts": ["images.example.org"]}}, {"config": {"dtype": "bfloat16"}}
    of_all = {"encoder": {"gpus": 1, "runtimeClassName": "nvidia", "nodeSelector": {"gpu": "small"}}}
    manifests = render(values(*settings) | of_all, release="x")
    check_all(manifests)
    (entry,) = config_of(manifests, "x-router", "router")["models"]
    assert entry["preprocessor"] == ",".join(names_of("preprocessor"))
    config = PreprocessorConfig.parse(config_of(manifests, "x-a-b-preprocessor", "preprocessor"))
    assert list(config.paths) == ["a.b"]
    assert (config.allowed_hosts, config.drain_s) == (("images.example.org",), 60)
    assert config.encoders == tuple(names_of("encoder"))
    encoder = EncoderConfig.parse(config_of(manifests, "x-a-b-encoder", "encoder"))
    assert (str(encoder.model), encoder.dtype, encoder.port, encoder.host) == ("org/a", "bfloat16", 50062, "0.0.0.0")
    pods = dict(pod_specs(manifests))
    for role in PORTS:
        (container,) = pods[f"x-a-b-{role}"]["containers"]
        assert container["image"] == "tandem-worker:0.1.0"
        (service,) = [m for m in manifests if m["kind"] == "Service" and m["metadata"]["name"] == f"x-a-b-{role}s"]
        assert service["spec"]["clusterIP"] == "None"
    (container,) = pods["x-a-b-preprocessor"]["containers"]
    assert "advertise_host=$(POD_NAME).x-a-b-preprocessors" in container["args"]
    pod = pods["x-a-b-encoder"]
    (container,) = pod["containers"]
    assert container["command"] == ["python", "-m", "encode_worker"]
    assert container["args"] == ["--config", "/etc/tandem/encoder.yaml"]
    assert container["resources"]["limits"]["nvidia.com/gpu"] == 1
    assert (pod["runtimeClassName"], pod["nodeSelector"]) == ("nvidia", {"gpu": "small"})


@each_role
def test_members_certificates_are_theirs_too(role: str) -> None:
    config = config_of(render(values() | {"tls": {"memberSecret": "member"}}, release="x"), f"x-a-b-{role}", role)
    assert (config["tls_ca"], config["tls_server_name"]) == ("/etc/tandem-tls/member/ca.crt", "tandem.internal")


@each_role
def test_only_members_reach_them(role: str) -> None:
    policies = {m["metadata"]["name"]: m for m in render(values(), release="x") if m["kind"] == "NetworkPolicy"}
    members, scrapers = policies[f"x-{role}s"]["spec"]["ingress"]
    assert [port["port"] for port in members["ports"]] == [PORTS[role]]
    assert all("namespaceSelector" not in each for each in members["from"])
    assert [port["port"] for port in scrapers["ports"]] == [9400]


def test_a_model_without_them_has_none() -> None:
    manifests = render(values(encoder={"replicas": 0}), release="x")
    assert not [m for m in manifests if "encoder" in m["metadata"]["name"]]
    assert "encoders" not in config_of(manifests, "x-a-b-preprocessor", "preprocessor")
    manifests = render(values({"replicas": 0}, {"replicas": 0}), release="x")
    assert not [m for m in manifests if "preprocessor" in m["metadata"]["name"]]
    assert "preprocessor" not in config_of(manifests, "x-router", "router")["models"][0]


@each_role
def test_settings_of_the_chart_and_unknown_ones_are_refused(role: str) -> None:
    assert f"{role}.config.port: is set by the chart" in template(values(**{role: {"config": {"port": 5}}})).stderr
    assert "max_itmes" in template(values(**{role: {"config": {"max_itmes": 5}}})).stderr
    assert "a pod has each port once" in template(values() | {role: {"grpcPort": 9400}}).stderr
    assert "ports" in template(values() | {role: {"ports": 5}}).stderr


def test_encode_workers_are_those_of_a_preprocessor_and_named_by_the_chart() -> None:
    assert "models: a.b.encoder.replicas: needs preprocessor.replicas" in template(values({"replicas": 0})).stderr
    named = template(values({"config": {"encoders": ["a:1"]}})).stderr
    assert "preprocessor.config.encoders: the chart sets it, since encoder.replicas of a.b is 2" in named
