"""Every example fits, by code that reads values as helm does; and the job that the chart runs before an install."""

import asyncio
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from engine.config import WorkerConfig
from sizing.fit.verdict import DEFAULTS, MEMORY_LIMIT, PRODUCT, ValuesPool, Verdict, pools_of, verdicts
from sizing.models.known_models import known_shape
from sizing.models.model_shape import DEFAULT_CONFIG
from support.chart import (
    CHART,
    EXAMPLES,
    KUBERNETES,
    ROOT,
    check_rules,
    check_schema,
    config_of,
    needs_helm,
    pod_specs,
    pod_templates,
    render,
    template,
)
from support.chart_pods import BIN, LoopbackPods, Pod
from support.kube_api import KubeApi

LLAMA = known_shape("llama-3.1-8b")
assert LLAMA is not None
GIVEN: dict[str, dict[str, Any]] = {"several-models": {"shapes": {"large": LLAMA}, "gpu": "H100"}}
"""What the values of an example leave to its reader, such as the model behind a URL."""
STORYTELLER = {"storyteller.prefill", "storyteller.decode"}
UNKNOWN = {"laptop": STORYTELLER, "laptop-restricted": STORYTELLER, "several-models": {"small.decode"}}
"""Pools without GPUs of models that nobody knows."""
VLLM = {"engine": "vllm"}
OLD_RDMA: dict[str, Any] = {
    "models": [
        {
            "name": "llama-3.1-70b",
            "source": {"pvc": {"claimName": "models", "path": "llama-3.1-70b"}},
            "prefill": {"replicas": 4},
            "decode": {"replicas": 4, "canary": {"replicas": 1, "tag": "0.1.1"}},
        }
    ],
    "worker": {
        "gpus": 1,
        "config": {"engine": "vllm", "strict_lanes": ["rdma"], "kv_memory_mib": 40960},
        "nodeSelector": {PRODUCT: "NVIDIA-H100-80GB-HBM3"},
    },
}
"""What helm/examples/gpu-rdma.yaml was: 141 GB of weights on a GPU of 80 GB."""
HELM_TIMEOUT_S = 300
"""Seconds that helm waits for a hook by default."""
RDMA_REFUSED = [
    "weights 141.1 GB + KV 42.9 GB + step 3.6 GB + reserve 2.0 GB = 189.6 GB, 109.6 GB more than the 80.0 GB of H100",
    "fits with tensor_parallel: 4, gpus: 4"
    " (weights 35.3 GB + KV 10.7 GB + step 2.3 GB + reserve 2.0 GB = 50.3 GB of 80.0 GB)",
]


def verdicts_on(example: Path) -> list[Verdict]:
    return verdicts(yaml.safe_load(example.read_text()), **({"shapes": {}} | GIVEN.get(example.stem, {})))


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_every_example_fits(example: Path) -> None:
    found = verdicts_on(example)
    assert found or yaml.safe_load(example.read_text())["models"] == []
    assert {each.pool.name for each in found if each.said == "unchecked"} == UNKNOWN.get(example.stem, set())
    for each in found:
        assert each.said != "does not fit", each.reasons()
        assert each.said == "fits" or not each.pool.gpus


def test_what_the_example_for_rdma_was_is_refused() -> None:
    found = verdicts(OLD_RDMA, {})
    assert [each.pool.name.partition("70b.")[2] for each in found] == ["prefill", "decode", "decode.canary"]
    for each in found:
        assert each.reasons() == RDMA_REFUSED
    parallel = OLD_RDMA["worker"] | {"gpus": 4, "config": OLD_RDMA["worker"]["config"] | {"tensor_parallel": 4}}
    assert verdicts(OLD_RDMA | {"worker": parallel}, {})[0].said == "fits"


def test_defaults_are_the_charts() -> None:
    worker = yaml.safe_load((CHART / "values.yaml").read_text())["worker"]
    assert worker["gpus"] == DEFAULTS["gpus"]
    assert worker["resources"]["limits"]["memory"] == DEFAULTS["resources"]["limits"]["memory"]


SET_BY_CHART = {
    "model",
    "routers",
    "redis_url",
    "host",
    "port",
    "stream_port",
    "loan_port",
    "model_name",
    "metrics_port",
    "health_port",
    "drain_s",
} | {name for name in WorkerConfig.model_fields if name.startswith(("tls_", "cluster_", "traffic_"))}


@needs_helm
@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_pools_are_read_as_helm_renders_them(example: Path) -> None:
    manifests = render(example)
    pools = pools_of(yaml.safe_load(example.read_text()))
    kinds = ("Deployment", "LeaderWorkerSet")
    rendered = {m["metadata"]["labels"].get("tandem/pool", ""): m for m in manifests if m["kind"] in kinds}
    assert {pool_of(pool) for pool in pools} == rendered.keys() - {""}
    for pool in pools:
        name = pool_of(pool)
        (template, *_) = pod_templates(rendered[name])
        spec = template["spec"]
        limits = spec["containers"][0]["resources"]["limits"]
        config = config_of(manifests, name, "worker")
        assert {k: v for k, v in config.items() if k not in SET_BY_CHART} == {
            k: v for k, v in pool.settings.items() if k != "model"
        }
        assert limits.get("nvidia.com/gpu", 0) == pool.gpus
        assert limits["memory"] == pool.memory_limit
        assert spec.get("nodeSelector", {}).get(PRODUCT, "") == pool.product
        assert rendered[name]["spec"].get("replicas", pool.replicas) == pool.replicas


def pool_of(pool: ValuesPool) -> str:
    return f"demo-{pool.name.replace('.', '-')}"


# ------------------------------------------------------------------ the job


def checking(values: dict[str, Any] | Path, *options: str) -> list[dict[str, Any]]:
    return render(values, "--set", "fitCheck.enabled=true", *options)


def hooks_of(manifests: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [m for m in manifests if "fit-check" in m["metadata"]["name"]]


@needs_helm
@pytest.mark.parametrize("version", KUBERNETES)
@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_the_job_comes_before_all_else_and_keeps_the_rules(example: Path, version: str) -> None:
    manifests = checking(example)
    check_schema(manifests, version)
    check_rules(manifests)
    (job,) = hooks_of(manifests)
    assert job["kind"] == "Job", "nothing else that would outlive a failed check"
    annotations = job["metadata"]["annotations"]
    assert annotations["helm.sh/hook"] == "pre-install,pre-upgrade"
    assert annotations["helm.sh/hook-output-log-policy"] == "hook-failed"
    assert set(annotations["helm.sh/hook-delete-policy"].split(",")) == {"before-hook-creation", "hook-succeeded"}
    assert job["spec"]["ttlSecondsAfterFinished"] == 600
    assert job["spec"]["activeDeadlineSeconds"] < HELM_TIMEOUT_S
    spec = dict(pod_specs(manifests))["demo-fit-check"]
    assert "serviceAccountName" not in spec, "the release's own is made after the hooks"
    mounted = {volume["name"] for volume in spec["volumes"]}
    assert {mount["name"] for mount in spec["containers"][0]["volumeMounts"]} == mounted
    assert job["spec"]["backoffLimit"] == 0


@needs_helm
def test_there_is_no_job_unless_asked_for() -> None:
    assert hooks_of(render(OLD_RDMA)) == []


@needs_helm
def test_environments_are_not_told() -> None:
    (values,) = hooks_of(checking({"worker": {"env": [{"name": "TOKEN", "value": "sesame"}]}}))
    assert "sesame" not in json.dumps(values)


@needs_helm
def test_a_missing_claim_is_named_before_anything_waits_for_it(tmp_path: Path) -> None:
    account = {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": "default"}}
    claim = {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": {"name": "models"}}
    example = ROOT / "helm" / "examples" / "gpu-8b.yaml"
    with KubeApi(tmp_path) as api:
        assert hooks_of(checking(example, *api.options)), "helm makes the namespace, and who knows what it will have"
        api.apply([account])
        refused = template(example, *api.options)
        assert refused.returncode != 0
        assert "llama-3.1-8b: source.pvc.claimName: namespace default has no PersistentVolumeClaim" in refused.stderr
        api.apply([claim])
        assert hooks_of(checking(example, *api.options))


async def run_job(manifests: list[dict[str, Any]], folder: Path, configs: dict[str, dict[str, Any]]) -> tuple[int, str]:
    """Run what the job runs, with `config.json` of the models that it finds mounted; return its exit code and words."""
    spec = dict(pod_specs(manifests))["demo-fit-check"]
    (job,) = hooks_of(manifests)
    pod = Pod("demo-fit-check", "127.0.0.1", {}, spec, job["spec"]["template"]["metadata"]["annotations"])
    node = LoopbackPods(manifests, folder, {})
    place = node.mounts(pod)
    for name, config in configs.items():
        (Path(place(f"/models/{name}")) / "config.json").write_text(json.dumps(config))
    command, *arguments = [place(part) for part in (*pod.container["command"], *pod.container["args"])]
    process = await asyncio.create_subprocess_exec(
        *(str(BIN / command), *arguments),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        env=os.environ | node.environment(pod.container, {}),
    )
    output, _ = await process.communicate()
    assert process.returncode is not None
    return process.returncode, output.decode()


LLAMA_CONFIG = DEFAULT_CONFIG | {"max_position_embeddings": 131072}
LLAMA_70B_CONFIG = LLAMA_CONFIG | {
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
}


@needs_helm
async def test_the_job_lets_pass_what_fits(tmp_path: Path) -> None:
    example = ROOT / "helm" / "examples" / "gpu-8b.yaml"
    code, said = await run_job(checking(example), tmp_path, {"llama-3.1-8b": LLAMA_CONFIG})
    assert code == 0, said
    assert "llama-3.1-8b.decode" in said
    assert "1 x H100, 80.0 GB" in said


@needs_helm
async def test_the_job_stops_what_does_not_fit(tmp_path: Path) -> None:
    code, said = await run_job(checking(OLD_RDMA), tmp_path, {"llama-3.1-70b": LLAMA_70B_CONFIG})
    assert code == 1, said
    for reason in RDMA_REFUSED:
        assert f"llama-3.1-70b.prefill: {reason}\n" in said


@needs_helm
async def test_the_job_reads_the_models_it_has_and_not_their_names(tmp_path: Path) -> None:
    """A volume with 70B at the name of 8B; and one without any model, whose install would fail later."""
    manifests = checking(ROOT / "helm" / "examples" / "gpu-8b.yaml")
    code, said = await run_job(manifests, tmp_path / "a", {"llama-3.1-8b": LLAMA_70B_CONFIG})
    assert code == 1
    assert "weights 141.1 GB" in said
    code, said = await run_job(manifests, tmp_path / "b", {})
    assert code == 2
    assert "has no config.json" in said


@needs_helm
async def test_the_job_takes_the_gpu_that_values_name(tmp_path: Path) -> None:
    values = {
        "models": [{"name": "qwen3-8b", "source": {"hub": {"repository": "Qwen/Qwen3-8B"}}, "decode": {"replicas": 1}}]
    }
    manifests = checking(values | {"worker": {"gpus": 1, "config": VLLM}}, "--set", "fitCheck.gpu=L40S")
    code, said = await run_job(manifests, tmp_path, {})
    assert code == 0, said
    assert "1 x L40S, 48.0 GB" in said
    shutil.rmtree(tmp_path / "demo-fit-check")
    manifests = checking(values | {"worker": {"resources": {"requests": {}, "limits": {"cpu": "1", "memory": "8Gi"}}}})
    code, said = await run_job(manifests, tmp_path, {})
    assert code == 1
    assert f"8.6 GB of {MEMORY_LIMIT}" in said
