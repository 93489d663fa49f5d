"""Encode workers in the chart: their settings and resources, and the preprocessor that knows them."""

from typing import Any

from encode_worker.config import EncoderConfig
from preprocessor.config import PreprocessorConfig
from support.chart import check_all, config_of, needs_helm, pod_specs, render, template

pytestmark = needs_helm
NAMES = tuple(f"x-a-b-encoder-{number}.x-a-b-encoders:50062" for number in range(2))


def values(preprocessor: dict[str, Any] | None = None, **encoder: Any) -> dict[str, Any]:
    model = {"name": "a.b", "source": {"hub": {"repository": "org/a"}}, "decode": {"replicas": 1}}
    roles = {"preprocessor": {"replicas": 1} | (preprocessor or {}), "encoder": {"replicas": 2} | encoder}
    return {"models": [model | roles]}


def test_the_preprocessor_knows_them_by_their_names() -> None:
    of_all = {"encoder": {"gpus": 1, "runtimeClassName": "nvidia", "nodeSelector": {"gpu": "small"}}}
    manifests = render(values(config={"dtype": "bfloat16"}) | of_all, release="x")
    check_all(manifests)
    config = EncoderConfig.parse(config_of(manifests, "x-a-b-encoder", "encoder"))
    assert (str(config.model), config.dtype, config.port, config.host) == ("org/a", "bfloat16", 50062, "0.0.0.0")
    assert PreprocessorConfig.parse(config_of(manifests, "x-a-b-preprocessor", "preprocessor")).encoders == NAMES
    pod = dict(pod_specs(manifests))["x-a-b-encoder"]
    (container,) = pod["containers"]
    assert container["command"] == ["python", "-m", "encode_worker"]
    assert container["args"] == ["--config", "/etc/tandem/encoder.yaml"]
    assert container["resources"]["limits"]["nvidia.com/gpu"] == 1
    assert container["image"] == "tandem-worker:0.1.0"
    assert (pod["runtimeClassName"], pod["nodeSelector"]) == ("nvidia", {"gpu": "small"})
    (service,) = [m for m in manifests if m["kind"] == "Service" and m["metadata"]["name"] == "x-a-b-encoders"]
    assert service["spec"]["clusterIP"] == "None"


def test_only_members_reach_them() -> None:
    policies = {m["metadata"]["name"]: m for m in render(values(), release="x") if m["kind"] == "NetworkPolicy"}
    members, scrapers = policies["x-encoders"]["spec"]["ingress"]
    assert [port["port"] for port in members["ports"]] == [50062]
    assert all("namespaceSelector" not in each for each in members["from"])
    assert [port["port"] for port in scrapers["ports"]] == [9400]


def test_members_certificates_are_theirs_too() -> None:
    manifests = render(values() | {"tls": {"memberSecret": "member"}}, release="x")
    config = config_of(manifests, "x-a-b-encoder", "encoder")
    assert (config["tls_ca"], config["tls_server_name"]) == ("/etc/tandem-tls/member/ca.crt", "tandem.internal")


def test_a_model_without_one_has_none() -> None:
    manifests = render(values(replicas=0), release="x")
    assert not [m for m in manifests if "encoder" in m["metadata"]["name"]]
    assert "encoders" not in config_of(manifests, "x-a-b-preprocessor", "preprocessor")


def test_what_cannot_be_is_refused() -> None:
    assert "encoder.config.port: is set by the chart" in template(values(config={"port": 5})).stderr
    assert "embeddings_memory" in template(values(config={"embeddings_memory": 5})).stderr
    assert "a pod has each port once" in template(values() | {"encoder": {"grpcPort": 9400}}).stderr
    assert "models: a.b.encoder.replicas: needs preprocessor.replicas" in template(values({"replicas": 0})).stderr
    named = template(values({"config": {"encoders": ["a:1"]}})).stderr
    assert "preprocessor.config.encoders: the chart sets it, since encoder.replicas of a.b is 2" in named
