"""The chart's values: which are refused and how, that all others render, and that each is documented."""

import copy
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from decimal import Decimal
from typing import Any

import jsonschema
import pytest
import yaml
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from cluster.roles import ROLES
from engine.config import WorkerConfig
from planner.runtime import PlannerConfig
from router.config import RouterConfig
from support.chart import (
    CHART,
    HPA,
    KUBERNETES,
    ROOT,
    check_all,
    check_budgets,
    check_rules,
    check_schema,
    config_of,
    keeping,
    needs_helm,
    render,
    template,
)

sys.path.insert(0, str(ROOT / "helm"))
from render_schema import BOUNDS, DECIMALS

pytestmark = needs_helm
AUTOSCALED = {"name": "a", "source": {"configMap": {}}, "decode": {"replicas": 1, "autoscaling": HPA}}
KEDA = {"enabled": True, "serverAddress": "http://prometheus:9090"}
WRONG = {"config": {"kv_memory_mb": 1}}
MISSPELT: list[tuple[dict[str, Any], str]] = [
    *(({part: WRONG}, f"'/{part}/config") for part in ("router", "worker", "planner")),
    ({"models": [keeping(0, **WRONG)]}, "'/models/0/decode/config"),
    ({"models": [keeping(0) | {"prefill": WRONG}]}, "'/models/0/prefill/config"),
    ({"models": [keeping(0, canary={"replicas": 1, **WRONG})]}, "'/models/0/decode/canary/config"),
    ({"models": [keeping(0) | {"prefill": {"canary": {"replicas": 1, **WRONG}}}]}, "'/models/0/prefill/canary/config"),
    ({"models": [keeping(0) | {"serving": WRONG["config"]}]}, "'/models/0/serving"),
]
"""And where helm finds it."""
WITH_PASSWORD = (
    "redis://:sesame@redis:6379/0",
    "rediss://user:sesame@redis",
    "redis://:open/sesame@redis",
    "redis://redis:6379/0?password=sesame",
)


TOKEN = {"repository": "org/name", "tokenSecret": {"name": "hugging-face"}}


def of_hub(name: str = "a", **source: Any) -> dict[str, Any]:
    return {"name": name, "source": {"hub": source}, "decode": {"replicas": 1}}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"router": {"replica": 3}}, "'replica' not allowed"),
        ({"router": {"replicas": "three"}}, "/router/replicas"),
        ({"worker": {"gpu": 1}}, "'gpu' not allowed"),
        ({"models": []}, "models: none are served, and router.fleet has no servers"),
        ({"models": [{"name": "A b", "source": {"pvc": {"claimName": "x"}}, "decode": {}}]}, "/models/0/name"),
        ({"models": [{"name": "a", "source": {}, "decode": {}}]}, "/models/0/source"),
        ({"models": [of_hub(repository="name")]}, "/models/0/source/hub/repository"),
        ({"models": [of_hub(repository="org/name", revison="v1")]}, "'revison' not allowed"),
        ({"models": [of_hub(repository="org/name", cache={"size": "1Gi", "claimName": "c"})]}, "source/hub/cache"),
        (
            {"models": [of_hub("a", **TOKEN), of_hub("b", **TOKEN | {"tokenSecret": {"name": "other"}})]},
            "a router fetches all models with one token: name the same secret and key everywhere",
        ),
        ({"image": {"tag": "latest"}}, "/image/tag"),
        ({"router": {"config": {"port": 1}}}, "router.config.port: is set by the chart"),
        ({"worker": {"config": {"model": "x"}}}, "config.model of a worker: is set by the chart"),
        ({"redis": {"enabled": True, "url": "redis://x"}}, "redis: either enabled or url"),
        ({"router": {"autoscaling": {"enabled": True}}}, "router.autoscaling: needs redis"),
        ({"tls": {"metricsCaSecret": "x"}}, "tls.metricsCaSecret: means nothing without tls.memberSecret"),
        ({"tls": {"secret": "x"}}, "'secret' not allowed"),
        ({"worker": {"config": {"tls_key": "x"}}}, "config.tls_key of a worker: is set by the chart"),
        ({"router": {"config": {"api_keys_file": "k"}}}, "router.config.api_keys_file: is set by the chart"),
        ({"planner": {"enabled": True, "config": {"routers": []}}}, "planner.config.routers: is set by the chart"),
        ({"planner": {"enabled": True, "config": {"switch": True}}}, "planner.config.switch: is set by the chart"),
        ({"planner": {"keda": KEDA}}, "planner.keda.enabled: means nothing without planner.enabled"),
        ({"planner": {"enabled": True, "keda": {"enabled": True}}}, "planner.keda.serverAddress: names no Prometheus"),
        ({"planner": {"enabled": True, "keda": KEDA | {"serverAddress": "p:9090"}}}, "/planner/keda/serverAddress"),
        ({"planner": {"enabled": True, "keda": KEDA}, "models": [AUTOSCALED]}, "a.decode has autoscaling too"),
        (
            {"planner": {"enabled": True, "keda": KEDA, "config": {"prefill": {"min_workers": 0, "max_workers": 0}}}},
            "planner.config.prefill.max_workers: KEDA takes no 0",
        ),
        (
            {"monitoring": {"serviceMonitor": True, "podMonitor": True}},
            "monitoring.podMonitor: with serviceMonitor too, each pod would be scraped twice",
        ),
        (
            {"worker": {"rdma": {"resource": "rdma/hca"}, "extraResources": {"rdma/hca": 1}}},
            "extraResources of a worker: rdma/hca is rdma.resource already",
        ),
        ({"worker": {"rdma": {"resource": "hca"}}}, "/worker/rdma/resource"),
        ({"models": [keeping(0, rdma={"counts": 1})]}, "'counts' not allowed"),
        ({"router": {"topologySpreadConstraints": [{"topologyKey": "zone"}]}}, "/router/topologySpreadConstraints/0"),
        ({"planner": {"enabled": True}, "models": [AUTOSCALED]}, "planner.enabled: a.decode has autoscaling too"),
        *((change, f"{at}': additional properties 'kv_memory_mb' not allowed") for change, at in MISSPELT),
        ({"worker": {"config": {"kv_memory_mib": "much"}}}, "'/worker/config/kv_memory_mib': got string, want integer"),
        ({"worker": {"config": {"backend": "cudnn"}}}, "'/worker/config/backend': value must be one of"),
        ({"router": {"config": {"model_rules": [{"task": []}]}}}, "'/router/config/model_rules/0'"),
        (
            {"models": [{"name": "a", "source": {"configMap": {}}, "serving": {"path": "/x"}, "decode": {}}]},
            "'path' not",
        ),
        ({"worker": {"config": {"transport": "ucxx"}}}, "config.transport of a worker: ucxx listens on"),
        (
            {"models": [keeping(0, replicas=1, config={"engine": "vllm"}) | {"source": {"configMap": {}}}]},
            "models: a.source.configMap: has no weights, which the vllm engine of decode reads",
        ),
        (
            {"models": [keeping(0, replicas=1, canary={"replicas": 1, "config": {"transport": "ucxx"}})]},
            "config.transport of a worker: ucxx listens on",
        ),
        (
            {"models": [keeping(0, replicas=1, gpus=1, config={"tensor_parallel": 4})]},
            "models: a.decode.gpus: 1 is not 4, the ranks of a pod: each has one GPU",
        ),
        (
            {"models": [keeping(0, replicas=1, canary={"replicas": 1, "gpus": 2})]},
            "models: a.decode.canary.gpus: 2 is not 1, the ranks of a pod: each has one GPU",
        ),
        ({"fitCheck": {"gpus": "H100"}}, "'gpus' not allowed"),
        ({"models": None}, "missing property 'models'"),
        ({"router": None}, "missing property 'router'"),
        ({"worker": {"resources": None}}, "at '/worker': missing property 'resources'"),
        ({"router": {"httpPort": 50051}}, "router.httpPort: 50051 is router.grpcPort too: a pod has each port once"),
        ({"worker": {"metricsPort": 50060}}, "worker.metricsPort: 50060 is worker.grpcPort too"),
        ({"planner": {"healthPort": 9400}}, "planner.healthPort: 9400 is planner.metricsPort too"),
        ({"worker": {"grpcPort": 20500}}, "worker.grpcPort: 20500 is one of UCX's ports"),
        ({"worker": {"ucxPortFirst": 30000}}, "worker.ucxPortFirst: 30000 is above worker.ucxPortLast, 20999"),
        (
            {"podSecurityContext": {"runAsUser": 0}},
            "podSecurityContext.runAsUser: 0 is root, which podSecurityContext.runAsNonRoot refuses",
        ),
        (
            {"models": [keeping(0, replicas=1, autoscaling=HPA | {"maxReplicas": 1})]},
            "models: a.decode.autoscaling.minReplicas: 2 is more than maxReplicas, 1",
        ),
        (
            {"redis": {"enabled": True}, "router": {"autoscaling": {"enabled": True, "maxReplicas": 1}}},
            "router.autoscaling.minReplicas: 2 is more than maxReplicas, 1",
        ),
        (
            {"planner": {"enabled": True, "config": {"decode": {"min_workers": 9}}}},
            "planner.config.decode.min_workers: 9 is more than max_workers, 8",
        ),
        ({"router": {"service": {"type": "LoadBalancer"}}}, "router.service.type: LoadBalancer lets everybody in"),
        ({"router": {"minAvailable": 1}}, "router.minAvailable: 1 is not below replicas, 1"),
        (
            {
                "router": {"replicas": 9, "minAvailable": 2, "autoscaling": {"enabled": True}},
                "redis": {"enabled": True},
            },
            "router.minAvailable: 2 is not below autoscaling.minReplicas, 2",
        ),
        ({"models": [keeping(2, replicas=2)]}, "models: a.decode.minAvailable: 2 is not below replicas, 2"),
        (
            {"models": [keeping(2, replicas=4, autoscaling=HPA)]},
            "models: a.decode.minAvailable: 2 is not below autoscaling.minReplicas, 2",
        ),
        (
            {"models": [keeping(1, replicas=4)], "planner": {"enabled": True}},
            "models: a.decode.minAvailable: 1 is not below planner.config.decode.min_workers, 1",
        ),
        (
            {
                "models": [keeping(2, replicas=4)],
                "planner": {"enabled": True, "config": {"decode": {"min_workers": 2}}},
            },
            "models: a.decode.minAvailable: 2 is not below planner.config.decode.min_workers, 2",
        ),
    ],
)
def test_wrong_values_are_refused_by_name(change: dict[str, Any], said: str) -> None:
    answer = template(change)
    assert answer.returncode != 0
    assert said in answer.stderr


def set_null(values: dict[str, Any], path: tuple[str, ...]) -> None:
    for key in path[:-1]:
        values = values.setdefault(key, {})
    values[path[-1]] = None


def test_null_takes_away_only_what_is_empty_by_default() -> None:
    """helm removes a value that is `null`; the schema then misses it by its name."""
    defaults = yaml.safe_load((CHART / "values.yaml").read_text())
    validator = jsonschema.Draft7Validator(json.loads((CHART / "values.schema.json").read_text()))
    validator.validate(defaults)
    empty: dict[str, Any] = {}
    for path in paths(defaults):
        values = copy.deepcopy(defaults)
        holder = values
        for key in path[:-1]:
            holder = holder[key]
        if holder.pop(path[-1]) in ("", [], {}):
            set_null(empty, path)
            continue
        (error,) = validator.iter_errors(values)
        assert error.message == f"'{path[-1]}' is a required property"
    everything = {"planner": {"enabled": True}, "redis": {"enabled": True}, "worker": {"doctor": True}}
    for more in ({}, everything):
        manifests = render(merged(empty, more))
        check_schema(manifests, KUBERNETES[-1])
        check_rules(manifests)


def paths(values: dict[str, Any], path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Yield the path of every value that the schema describes."""
    for key, value in values.items():
        yield (*path, key)
        if isinstance(value, dict) and key not in ("requests", "limits", "podSecurityContext"):
            yield from paths(value, (*path, key))


def merged(values: dict[str, Any], more: dict[str, Any]) -> dict[str, Any]:
    return values | {key: {**values.get(key, {}), **inner} for key, inner in more.items()}


def test_decimals_that_helm_makes_strings_are_settings() -> None:
    """`--set` gives numbers for integers only."""
    model = json.dumps([keeping(0, replicas=1, canary={"replicas": 1})])
    manifests = render(
        None,
        f"--set-json=models={model}",
        "--set=planner.enabled=true,planner.config.itl_s=0.012,planner.config.start_s=12.5",
        "--set=planner.config.decode.min_workers=0,planner.keda.tolerance=0,router.config.record_share=0.25",
        "--set=worker.config.sim_step_ms=0.5,models[0].decode.canary.share=0.05",
    )
    planner = PlannerConfig.parse(config_of(manifests, "demo-a-planner", "planner"))
    assert (planner.itl_s, planner.start_s) == (0.012, 12.5)
    router = RouterConfig.parse(config_of(manifests, "demo-router", "router"))
    assert (router.record_share, router.no_worker_grace_s) == (0.25, 42.5)
    canary = WorkerConfig.parse(config_of(manifests, "demo-a-decode-canary", "worker"))
    assert (canary.traffic_share, canary.sim_step_ms) == (0.05, 0.5)


@pytest.mark.parametrize(
    "value", ["planner.config.goal=1.5", "planner.config.itl_s=0.0", "worker.config.sim_step_ms=-0.5"]
)
def test_decimals_out_of_bounds_are_refused_by_name(value: str) -> None:
    answer = template(None, "--set", value)
    assert answer.returncode != 0
    assert f"'/{value.partition('=')[0].replace('.', '/')}'" in answer.stderr


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(sorted(DECIMALS, key=str)), st.decimals(0, 1100, allow_nan=False, places=4))
def test_a_decimal_is_taken_as_a_string_where_it_is_taken_as_a_number(bounds: Any, number: Decimal) -> None:
    schema = {"type": ["number", "string"], "pattern": f"^({DECIMALS[bounds]})$"}
    schema |= {key: bound for key, bound in zip(BOUNDS, bounds, strict=True) if bound is not None}
    validator = jsonschema.Draft7Validator(schema)
    for scale in (1, 1000, 10000):  # to try numbers below one often enough
        text = f"{number / scale:f}"
        assert "." in text
        assert validator.is_valid(text) == validator.is_valid(float(text)), text


def test_two_models_of_one_name_are_refused() -> None:
    model = {"source": {"configMap": {}}, "decode": {"replicas": 1}}
    answer = template({"models": [model | {"name": "a.b"}, model | {"name": "a-b"}]})
    assert "models: two are called" in answer.stderr


@pytest.mark.parametrize("name", ["render_readme.py", "render_schema.py"])
def test_what_is_made_of_values_and_settings_is_up_to_date(name: str) -> None:
    command, env = [sys.executable, str(ROOT / "helm" / name), "--check"], os.environ | {"PYTHONPATH": str(ROOT)}
    answer = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60, env=env)
    assert answer.returncode == 0, answer.stderr


def test_what_pods_would_take_is_not_refused() -> None:
    worker = {"adapters": {"a": "/models/adapter"}, "threads": 2, "cores": [0, 1], "peer_silence_s": 5}
    tenants = {"a": {"max_running": 2}}
    rules = [{"name": "drafts", "tasks": ["draft"], "models": ["storyteller"], "max_ttft_ms": 0.5}]
    manifests = render({"worker": {"config": worker}, "router": {"config": {"tenants": tenants, "model_rules": rules}}})
    taken = WorkerConfig.parse(config_of(manifests, "demo-storyteller-decode", "worker"))
    assert (taken.threads, taken.cores) == (2, (0, 1))
    assert RouterConfig.parse(config_of(manifests, "demo-router", "router")).tenants["a"].max_running == 2


@pytest.mark.parametrize("url", WITH_PASSWORD)
def test_a_password_in_a_url_is_refused_and_not_repeated(url: str) -> None:
    answer = template({"redis": {"url": url}})
    assert answer.returncode != 0
    assert "with the key `password`, which redis.passwordSecret names" in answer.stderr
    assert "sesame" not in answer.stderr


def test_a_user_of_redis_is_no_secret() -> None:
    manifests = render({"redis": {"url": "rediss://tandem@redis:6379/0", "passwordSecret": "s"}})
    assert config_of(manifests, "demo-router", "router")["redis_url"] == "rediss://tandem@redis:6379/0"


def test_a_transport_on_any_port_goes_without_a_network_policy() -> None:
    manifests = render({"worker": {"config": {"transport": "ucxx"}}, "networkPolicy": {"enabled": False}})
    assert config_of(manifests, "demo-storyteller-decode", "worker")["transport"] == "ucxx"


def documented(values: Any, path: tuple[str, ...] = ()) -> Iterator[str]:
    """Every value that is no mapping, or one that is free-form."""
    for name, value in values.items():
        if isinstance(value, dict) and value and name not in ("resources", "podSecurityContext"):
            yield from documented(value, (*path, name))
        else:
            yield ".".join((*path, name))


def test_every_value_is_documented() -> None:
    readme = (CHART / "README.md").read_text()
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    for name in documented(values):
        assert f"| `{name}` |" in readme, name


words = st.text("abcdefghijklmnopqrstuvwxyz", min_size=1, max_size=12)
pools = st.fixed_dictionaries(
    {"replicas": st.integers(0, 9)},
    optional={
        "gpus": st.integers(0, 8),
        "minAvailable": st.integers(0, 3),
        "tag": words,
        "spreadOver": st.sampled_from(["", "topology.kubernetes.io/zone"]),
        "config": st.just({"block_tokens": 32}),
        "rdma": st.fixed_dictionaries({"resource": st.sampled_from(["", "rdma/a"])}, optional={"count": st.just(2)}),
        "rail": st.sampled_from(["", "topology.kubernetes.io/rack"]),
        "doctor": st.booleans(),
        "topologySpreadConstraints": st.just(
            [{"maxSkew": 1, "topologyKey": "z", "whenUnsatisfiable": "DoNotSchedule"}]
        ),
        "canary": st.fixed_dictionaries(
            {"replicas": st.integers(1, 3)}, optional={"tag": words, "share": st.sampled_from([0.01, 0.5])}
        ),
        "autoscaling": st.just(HPA),
        "nodeSelector": st.dictionaries(words, words, max_size=2),
        "env": st.just([{"name": "UCX_LOG_LEVEL", "value": "warn"}]),
    },
)
sources = st.sampled_from(
    [
        {"pvc": {"claimName": "models", "path": "a/b"}},
        {"pvc": {"claimName": "models"}},
        {"hostPath": {"path": "/srv"}},
        {"image": {"reference": "registry/model:1"}},
        {"download": {"image": "curl:1", "command": ["sh", "-c", "true"], "size": "1Gi", "secret": "s"}},
        {"configMap": {}},
        {"hub": {"repository": "org/name"}},
        {"hub": {"repository": "org/name", "revision": "refs/pr/7", "tokenSecret": {"name": "t", "key": "k"}}},
        {"hub": {"repository": "org/name", "cache": {"claimName": "c"}}},
        {"hub": {"repository": "org/name", "cache": {"size": "1Gi"}}},
    ]
)
values_of_all_kinds = st.fixed_dictionaries(
    {
        "models": st.lists(
            st.fixed_dictionaries({"name": words, "source": sources, "decode": pools}, optional={"prefill": pools}),
            min_size=1,
            max_size=3,
            unique_by=lambda model: model["name"],
        )
    },
    optional={
        "router": st.fixed_dictionaries({"replicas": st.integers(1, 4)}, optional={"minAvailable": st.integers(0, 2)}),
        "worker": st.fixed_dictionaries(
            {},
            optional={
                "ipcLock": st.booleans(),
                "ucxTransports": words,
                "extraResources": st.just({"rdma/hca": 2}),
                "runtimeClassName": words,
            },
        ),
        "planner": st.fixed_dictionaries(
            {
                "enabled": st.just(True),
                "config": st.just({"prefill": {"min_workers": 2}, "decode": {"min_workers": 2}}),
            },
            optional={"keda": st.just(KEDA)},
        ),
        "redis": st.sampled_from([{"enabled": True}, {"url": "redis://x:1/0", "passwordSecret": "s"}, {}]),
        "networkPolicy": st.fixed_dictionaries({"enabled": st.booleans()}),
        "tls": st.fixed_dictionaries(
            {"memberSecret": st.just("m")},
            optional={
                "serverName": words,
                "publicSecret": st.just("p"),
                "publicCa": st.booleans(),
                "clientCaSecret": st.just("c"),
                "metricsCaSecret": st.just("s"),
            },
        ),
        "apiKeys": st.sampled_from([{}, {"secret": "k"}, {"secret": "k", "testSecret": "t"}]),
        "fitCheck": st.fixed_dictionaries({"enabled": st.booleans()}, optional={"gpu": st.sampled_from(["", "L4"])}),
        "monitoring": st.fixed_dictionaries({"dashboard": st.booleans()}).flatmap(
            lambda values: st.sampled_from(["serviceMonitor", "podMonitor"]).map(lambda kind: values | {kind: True})
        ),
    },
)


@settings(max_examples=12, deadline=None, phases=[Phase.explicit, Phase.reuse, Phase.generate])
@given(values_of_all_kinds, words)
def test_valid_values_render_to_valid_manifests(values: dict[str, Any], release: str) -> None:
    for model, pool in ((model, model[role]) for model in values["models"] for role in ROLES if role in model):
        if "planner" in values:  # it does what autoscaling would
            pool.pop("autoscaling", None)
        if "configMap" in model["source"]:
            pool.pop("gpus", None)
        if pool.get("gpus"):
            pool["config"] = {**pool.get("config", {}), "engine": "vllm", "tensor_parallel": pool["gpus"]}
        least = 2 if "planner" in values else HPA["minReplicas"] if "autoscaling" in pool else pool["replicas"]
        if "minAvailable" in pool:
            pool["minAvailable"] = min(pool["minAvailable"], max(least - 1, 0))
    if (router := values.get("router", {})).get("minAvailable"):
        router["minAvailable"] = min(router["minAvailable"], router["replicas"] - 1)
    manifests = render(values, release=release)
    check_all(manifests)
    check_budgets(manifests)
