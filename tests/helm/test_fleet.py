"""Stock servers in the chart: a router in front of them, its rights at Kubernetes, endpoint pickers for a Gateway."""

from typing import Any

import pytest
import yaml

from cluster.config import parse_overrides
from router.config import RouterConfig
from router.models.config import FleetConfig
from support.chart import (
    KUBERNETES,
    ROOT,
    check_all,
    check_rules,
    check_schema,
    config_of,
    needs_helm,
    pod_specs,
    render,
    template,
)

pytestmark = needs_helm
EXAMPLES = ROOT / "helm" / "examples"
URL = {"url": "http://10.0.0.5:8000"}
SERVICE = {"service": {"name": "vllm", "port": 8000}, "role": "decode"}
PODS = {"pods": {"selector": "app=vllm,tier in (chat)", "namespace": "else", "port": 9000}}
ACCOUNT = "/var/run/secrets/kubernetes.io/serviceaccount"


def fleet(*servers: dict[str, Any], models: tuple[dict[str, Any], ...] = (), **values: Any) -> dict[str, Any]:
    """Return values for a fleet; further ones are of the router."""
    return {"models": list(models), "router": {"fleet": {"servers": servers}} | values}


def named(manifests: list[dict[str, Any]], kind: str, name: str) -> dict[str, Any]:
    (found,) = [m for m in manifests if (m["kind"], m["metadata"]["name"]) == (kind, name)]
    return found


def picked(*servers: dict[str, Any], **epp: Any) -> dict[str, Any]:
    return fleet(*servers) | {"epp": {"enabled": True} | epp}


def test_a_fleet_is_served_by_routers_alone() -> None:
    manifests = render(fleet(URL, SERVICE), release="x")
    check_all(manifests)
    assert {name for name, _ in pod_specs(manifests)} == {"x-router", "x-test"}
    config = RouterConfig.parse(config_of(manifests, "x-router", "router"))
    assert config.fleet == FleetConfig.parse({"servers": [URL, SERVICE]})
    assert config.models == ()
    (container,) = dict(pod_specs(manifests))["x-router"]["containers"]
    assert {"name": "HF_HOME", "value": "/var/cache/huggingface"} in container["env"]
    assert container["startupProbe"]["failureThreshold"] == 600, "it may wait until the first server has its model"
    assert "--model" not in dict(pod_specs(manifests))["x-test"]["containers"][0]["args"]


def test_routers_may_read_what_lists_the_servers_and_nothing_else() -> None:
    manifests = render(fleet(SERVICE, PODS, PODS | {"role": "prefill"}), "--namespace=mine", release="x")
    check_rules(manifests)
    check_schema(manifests, KUBERNETES[-1])
    roles = {m["metadata"]["namespace"]: m for m in manifests if m["kind"] == "Role"}
    verbs = ["get", "list", "watch"]
    assert {namespace: role["rules"] for namespace, role in roles.items()} == {
        "mine": [{"apiGroups": ["discovery.k8s.io"], "resources": ["endpointslices"], "verbs": verbs}],
        "else": [{"apiGroups": [""], "resources": ["pods"], "verbs": verbs}],
    }
    bindings = {m["metadata"]["namespace"]: m for m in manifests if m["kind"] == "RoleBinding"}
    for namespace, role in roles.items():
        assert bindings[namespace]["roleRef"]["name"] == role["metadata"]["name"]
        assert bindings[namespace]["subjects"] == [{"kind": "ServiceAccount", "name": "x-fleet", "namespace": "mine"}]
    pod = dict(pod_specs(manifests))["x-router"]
    assert pod["serviceAccountName"] == named(manifests, "ServiceAccount", "x-fleet")["metadata"]["name"]
    (volume,) = [each for each in pod["volumes"] if each["name"] == "account"]
    files = [next(iter(source.values())) for source in volume["projected"]["sources"]]
    assert [file.get("path") or file["items"][0]["path"] for file in files] == ["token", "ca.crt", "namespace"]
    assert {"name": "account", "mountPath": ACCOUNT, "readOnly": True} in pod["containers"][0]["volumeMounts"]
    assert dict(pod_specs(manifests))["x-test"]["serviceAccountName"] == "x", "no other pod has these rights"


def test_rights_in_one_namespace_are_one_role() -> None:
    here = PODS | {"pods": PODS["pods"] | {"namespace": "mine"}}
    (role,) = [m for m in render(fleet(here, SERVICE), "--namespace=mine") if m["kind"] == "Role"]
    assert [rule["resources"] for rule in role["rules"]] == [["endpointslices"], ["pods"]]


def test_without_kubernetes_no_pod_has_a_token() -> None:
    manifests = render(fleet(URL, {"dns": "vllm:8000"}), release="x")
    assert not [m for m in manifests if m["kind"] in ("Role", "RoleBinding")]
    pod = dict(pod_specs(manifests))["x-router"]
    assert pod["serviceAccountName"] == "x"
    assert not [volume for volume in pod["volumes"] if "projected" in volume]


def test_keys_and_authorities_of_the_servers_are_secrets() -> None:
    values = picked(URL) | {"router": {"fleetKeySecret": "key", "fleetCaSecret": "ca", "fleet": {"servers": [URL]}}}
    manifests = render(values, release="x")
    check_rules(manifests)
    for settings in (config_of(manifests, "x-router", "router")["fleet"], config_of(manifests, "x-epp", "fleet")):
        config = FleetConfig.parse(settings)
        assert str(config.api_key_file) == "/etc/tandem-tls/fleet-key/key"
        assert str(config.ca_file) == "/etc/tandem-tls/fleet-ca/ca.crt"
    for name in ("x-router", "x-epp"):
        pod = dict(pod_specs(manifests))[name]
        mounts = {each["mountPath"]: each["name"] for each in pod["containers"][0]["volumeMounts"]}
        secrets = {each["name"]: each["secret"]["secretName"] for each in pod["volumes"] if "secret" in each}
        assert secrets[mounts["/etc/tandem-tls/fleet-key"]] == "key"
        assert secrets[mounts["/etc/tandem-tls/fleet-ca"]] == "ca"


def test_a_model_without_workers_is_a_tokenizer() -> None:
    model = {"name": "llama", "source": {"pvc": {"claimName": "models"}}, "decode": {}}
    manifests = render(fleet(SERVICE, models=(model,)) | {"epp": {"enabled": True}}, release="x")
    check_rules(manifests)
    assert {name for name, _ in pod_specs(manifests)} == {"x-router", "x-epp", "x-test"}
    (entry,) = RouterConfig.parse(config_of(manifests, "x-router", "router")).entries
    assert (str(entry.path), entry.name) == ("/models/llama", "llama")
    config = FleetConfig.parse(config_of(manifests, "x-epp", "fleet"))
    assert (str(config.model), config.name) == ("/models/llama", "llama")
    for name in ("x-router", "x-epp"):
        mounts = dict(pod_specs(manifests))[name]["containers"][0]["volumeMounts"]
        assert {"name": "model-llama", "mountPath": "/models/llama", "readOnly": True} in mounts


def test_pickers_are_asked_by_the_pool_that_the_route_leads_to() -> None:
    manifests = render(EXAMPLES / "gateway.yaml", release="x")
    for version in KUBERNETES:
        check_schema(manifests, version)
    pod = dict(pod_specs(manifests))["x-epp"]
    (container,) = pod["containers"]
    assert container["command"] == ["tandem", "epp"]
    options, settings = container["args"][:3], settings_of(container)
    assert options == ["--fleet=/etc/tandem/fleet.yaml", "--host=0.0.0.0", "--port=9002"]
    router = config_of(manifests, "x-router", "router")
    shared = ("port", "internal_port", "health_port", "metrics_port", "drain_s", "max_connection_s")
    assert settings == {key: router[key] for key in shared}
    assert container["readinessProbe"] == {
        "grpc": {"port": 50059, "service": "readiness"},
        "periodSeconds": 2,
        "timeoutSeconds": 2,
        "failureThreshold": 2,
    }
    assert pod["terminationGracePeriodSeconds"] == 25 + settings["drain_s"] + 15
    assert pod["serviceAccountName"] == "x-fleet"
    config = FleetConfig.parse(config_of(manifests, "x-epp", "fleet"))
    assert config == RouterConfig.parse(config_of(manifests, "x-router", "router")).fleet
    port, metrics = named(manifests, "Service", "x-epp")["spec"]["ports"]
    assert metrics["targetPort"] == "metrics"
    pool = named(manifests, "InferencePool", "x")["spec"]
    assert pool["endpointPickerRef"] == {"name": "x-epp", "port": {"number": port["port"]}, "failureMode": "FailOpen"}
    assert pool["selector"] == {"matchLabels": {"app": "vllm"}}
    assert pool["targetPorts"] == [{"number": 8000}]
    route = named(manifests, "HTTPRoute", "x-pool")["spec"]
    (backend,) = route["rules"][0]["backendRefs"]
    assert backend == {"group": "inference.networking.k8s.io", "kind": "InferencePool", "name": "x"}
    assert route["parentRefs"] == [{"name": "inference"}]
    policy = named(manifests, "NetworkPolicy", "x-epp")["spec"]
    assert policy["ingress"][0] == {"ports": [{"port": 9002, "protocol": "TCP"}]}, "from everywhere"


def settings_of(container: dict[str, Any]) -> dict[str, Any]:
    """Return the settings in a picker's arguments, read as it reads them."""
    return parse_overrides([part.removeprefix("--set=") for part in container["args"] if part.startswith("--set=")])


def test_pickers_have_the_settings_and_the_keys_of_routers() -> None:
    tenants = {"a": {"max_priority": 5}, "b-c": {"weight": 2.5}}
    router = {"fleet": {"servers": [URL]}, "config": {"tenants": tenants, "log_level": "info", "max_queued": 7}}
    keys = {"apiKeys": {"secret": "keys"}, "router": router | {"preStopSeconds": 0}}
    manifests = render(picked(URL, failureMode="FailClose") | keys, release="x")
    check_rules(manifests)
    pod = dict(pod_specs(manifests))["x-epp"]
    (container,) = pod["containers"]
    settings = settings_of(container)
    fleet = yaml.safe_load(named(manifests, "ConfigMap", "x-epp")["data"]["fleet.yaml"])
    config = RouterConfig.parse(settings | {"fleet": fleet})
    of_router = RouterConfig.parse(config_of(manifests, "x-router", "router"))
    assert (config.tenants, config.max_queued) == (of_router.tenants, 7)
    assert config.api_keys_file == of_router.api_keys_file
    assert {"name": "keys", "mountPath": "/etc/tandem-keys", "readOnly": True} in container["volumeMounts"]
    assert {"name": "keys", "secret": {"secretName": "keys", "defaultMode": 0o440}} in pod["volumes"]
    assert "max_connection_s" not in settings
    assert "lifecycle" not in container


def test_what_pickers_pools_and_routes_are_is_a_value() -> None:
    pool = {"matchLabels": {"app": "vllm", "tier": ""}, "targetPorts": [8000, 8001]}
    route = {"parentRefs": [{"name": "g", "namespace": "infra", "sectionName": "http"}], "hostnames": ["*.example.com"]}
    gateways = [{"namespaceSelector": {"matchLabels": {"name": "infra"}}}]
    values = picked(PODS, replicas=2, port=9100, failureMode="FailClose", pool=pool, route=route)
    manifests = render(values | {"networkPolicy": {"clients": gateways}}, release="x")
    check_rules(manifests)
    check_schema(manifests, KUBERNETES[-1])
    assert named(manifests, "Deployment", "x-epp")["spec"]["replicas"] == 2
    spec = named(manifests, "InferencePool", "x")["spec"]
    assert spec["targetPorts"] == [{"number": 8000}, {"number": 8001}]
    assert spec["endpointPickerRef"] == {"name": "x-epp", "port": {"number": 9100}, "failureMode": "FailClose"}
    assert named(manifests, "HTTPRoute", "x-pool")["spec"]["hostnames"] == ["*.example.com"]
    assert named(manifests, "NetworkPolicy", "x-epp")["spec"]["ingress"][0]["from"] == gateways
    alone = render(picked(URL), release="x")
    assert not [m for m in alone if m["kind"] in ("InferencePool", "HTTPRoute")]


def test_pickers_start_anew_with_other_servers() -> None:
    def checksum(values: dict[str, Any]) -> str:
        template = named(render(values, release="x"), "Deployment", "x-epp")["spec"]["template"]
        return str(template["metadata"]["annotations"]["checksum/config"])

    assert checksum(picked(URL)) == checksum(picked(URL, replicas=2)) != checksum(picked(URL, SERVICE))


def test_a_fleet_beside_workers_changes_nothing_of_theirs() -> None:
    source = {"hub": {"repository": "org/a"}}
    model = {"name": "a", "source": source, "decode": {"replicas": 1}}
    with_fleet = render(fleet(URL, models=(model,)), release="x")
    without = render({"models": [model]}, release="x")
    changed = {m["metadata"]["name"] for m in with_fleet if m not in without}
    assert changed == {"x-router"}


POOL = {"matchLabels": {"app": "vllm"}}


@pytest.mark.parametrize(
    ("values", "said"),
    [
        (fleet(), "router.fleet.servers: names no server"),
        ({"router": {"fleet": {"name": "a"}}}, "router.fleet.servers: names no server"),
        ({"router": {"fleetKeySecret": "a"}}, "router.fleet.servers: names no server"),
        ({"router": {"fleet": {"servers": [URL]}}}, "models: storyteller has no tokenizer"),
        (fleet({"file": "/servers"}), "router.fleet.servers.0.file: a router's pod has no such file"),
        (fleet({"url": 5}), "/router/fleet/servers/0/url"),
        (fleet({"service": {"name": "vllm"}}), "missing property 'port'"),
        (fleet(URL | {"rol": "both"}), "'rol' not allowed"),
        ({"router": {"fleet": {"server": []}}}, "'server' not allowed"),
        ({"models": [], "router": {"fleet": {"servers": [URL], "ca_file": "x"}}}, "router.fleet.ca_file: is set by"),
        ({"router": {"config": {"fleet": {"servers": [URL]}}}}, "router.config.fleet: is set by the chart"),
        ({"epp": {"enabled": True}}, "epp.enabled: picks servers of router.fleet.servers, which is empty"),
        ({"epp": {"pool": POOL}}, "epp.enabled: is needed by epp.pool"),
        (picked(URL, route={"parentRefs": [{"name": "g"}]}), "epp.route.parentRefs: a route leads to the pool"),
        (picked(URL, failureMode="open"), "/epp/failureMode"),
        (picked(URL) | {"apiKeys": {"secret": "keys"}}, "epp.failureMode: FailOpen lets requests without a key pass"),
        (picked(URL, pool=POOL | {"targetPorts": []}), "/epp/pool/targetPorts"),
        (picked(URL, pool={"matchLabels": {"app": "a b"}}), "/epp/pool/matchLabels/app"),
    ],
)
def test_what_cannot_be_is_refused(values: dict[str, Any], said: str) -> None:
    answer = template(values)
    assert answer.returncode != 0
    assert said in answer.stderr


def test_the_example_is_a_fleet() -> None:
    settings = yaml.safe_load((EXAMPLES / "fleet.yaml").read_text())["router"]["fleet"]
    assert (
        FleetConfig.parse(settings)
        == RouterConfig.parse(config_of(render(EXAMPLES / "fleet.yaml"), "demo-router", "router")).fleet
    )
