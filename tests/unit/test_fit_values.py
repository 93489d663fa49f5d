"""Values of a chart as `tandem plan --values` reads them: pools, devices, what is unknown, and the command."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from cluster.errors import StartError
from sizing.fit.memory import Device
from sizing.fit.verdict import gpu_of_product, pools_of, quantity, verdicts
from sizing.models.known_models import known_shape
from sizing.models.model_shape import DEFAULT_CONFIG
from tandem.cli.common import console
from tandem.cli.main import app
from workloads.request import BadSetup

H100 = Device("H100", 80e9)
VLLM = {"engine": "vllm", "vllm_options": {"max_model_len": 8192}}
LLAMA_8B = known_shape("llama-3.1-8b")
assert LLAMA_8B is not None


@pytest.mark.parametrize(
    ("product", "device"),
    [
        ("NVIDIA-H100-80GB-HBM3", H100),
        ("NVIDIA-H100-NVL", H100),
        ("h100", H100),
        ("NVIDIA-A100-SXM4-40GB", Device("A100", 40e9)),
        ("NVIDIA-H100-80GB-HBM3-MIG-1g.10gb", Device("H100", 10e9)),
        ("NVIDIA-L40S", Device("L40S", 48e9)),
        ("NVIDIA-L40", None),
        ("NVIDIA-A10G", None),
        ("NVIDIA-L4-SHARED", None),
        ("", None),
    ],
)
def test_products(product: str, device: Device | None) -> None:
    assert gpu_of_product(product) == device


@pytest.mark.parametrize(
    ("text", "size"),
    [("64Gi", 64 << 30), ("512Mi", 512 << 20), ("2G", 2e9), ("1.5Gi", 1.5 * (1 << 30)), (1024, 1024), ("7k", 7000)],
)
def test_quantities(text: object, size: float) -> None:
    assert quantity("memory", text) == size


@pytest.mark.parametrize("text", ["", "64GB", "much", "-1Gi", None, True, "1e400", ["1Gi"]])
def test_what_is_no_quantity(text: object) -> None:
    with pytest.raises(BadSetup, match=r"memory: .* is not a number of bytes"):
        quantity("memory", text)


MODEL = {"name": "llama-3.1-8b", "source": {"pvc": {"claimName": "m"}}, "decode": {"replicas": 1}}


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({}, "models: the values have no list of models"),
        ({"models": {}}, "models: the values have no list"),
        ({"models": ["a"]}, "models.0: 'a' is not a mapping"),
        ({"models": [{"name": 1}]}, "models.0.name: 1 is not a name"),
        ({"models": [MODEL | {"decode": []}]}, "llama-3.1-8b.decode: \\[\\] is not a mapping"),
        ({"models": [MODEL | {"decode": {"replicas": "two"}}]}, "llama-3.1-8b.decode.replicas: 'two' is not a number"),
        ({"models": [MODEL], "worker": {"gpus": 0.5}}, "llama-3.1-8b.decode.gpus: 0.5 is not a number"),
        ({"models": [MODEL], "worker": {"resources": {"limits": {"memory": "x"}}}}, "resources.limits.memory: 'x'"),
        ({"models": [MODEL], "worker": {"config": {1: 2}}}, "worker.config: .* is not a mapping of names"),
    ],
)
def test_values_that_are_no_values(values: dict[str, Any], said: str) -> None:
    with pytest.raises(BadSetup, match=said):
        verdicts(values, {})


def test_pools_are_merged_as_the_chart_does_it() -> None:
    values = {
        "worker": {"gpus": 1, "config": {"kv_memory_mib": 1, "dtype": "float32"}, "nodeSelector": {"a": "b"}},
        "models": [
            MODEL
            | {
                "prefill": {"replicas": 0, "canary": {"replicas": 1}},
                "decode": {
                    "replicas": 2,
                    "config": {"kv_memory_mib": 2},
                    "nodeSelector": {"nvidia.com/gpu.product": "NVIDIA-L4"},
                    "canary": {"replicas": 1.0, "gpus": 2.0, "config": {"tensor_parallel": 2}},
                },
            }
        ],
    }
    pool, canary = pools_of(values)
    assert (pool.name, canary.name) == ("llama-3.1-8b.decode", "llama-3.1-8b.decode.canary")
    assert (pool.replicas, pool.gpus, canary.replicas, canary.gpus) == (2, 1, 1, 2)
    common = {"model": "/models/llama-3.1-8b", "kv_memory_mib": 2, "dtype": "float32"}
    assert pool.settings == common
    assert canary.settings == common | {"tensor_parallel": 2}
    assert pool.product == canary.product == "NVIDIA-L4"


def test_what_is_unknown_is_named() -> None:
    worker = {"gpus": 1, "config": VLLM | {"kv_memory_mib": 1024}}
    values = {"worker": worker, "models": [MODEL, MODEL | {"name": "mine"}]}
    known, unknown = verdicts(values, {}, gpu="L4")
    assert known.said == "fits"
    assert unknown.reasons()[0].startswith("unchecked: shape: unknown model 'mine'; known are llama-3.1-8b, ")
    (without, _) = verdicts(values, {})
    assert without.reasons() == ["unchecked: nodeSelector.nvidia.com/gpu.product: names no GPU, and --gpu is not set"]
    (refused, _) = verdicts(values, {"llama-3.1-8b": BadSetup("model", "latent attention")}, gpu="L4")
    assert refused.reasons() == ["unchecked: shape: latent attention"]
    with pytest.raises(BadSetup, match="shape: the values have no model 'other'"):
        verdicts(values, {"other": LLAMA_8B})


# ------------------------------------------------------------------ the command


def planned(monkeypatch: pytest.MonkeyPatch, folder: Path, values: object, *options: str) -> tuple[int, str]:
    """Exit code and output of `tandem plan --values`; with an error of ours, its words."""
    monkeypatch.setattr(console, "width", 180)
    path = folder / "values.yaml"
    path.write_text(values if isinstance(values, str) else yaml.safe_dump(values))
    done = CliRunner().invoke(app, ["plan", "--values", str(path), *options])
    if isinstance(done.exception, StartError):
        return 2, str(done.exception)
    return done.exit_code, done.output


ON_GPUS = {"worker": {"gpus": 1, "config": {"engine": "vllm", "kv_memory_mib": 30000}}, "models": [MODEL]}


def test_the_table_and_the_figures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    figures = tmp_path / "fit.json"
    code, said = planned(monkeypatch, tmp_path, ON_GPUS, "--gpu", "h100", "--json", str(figures))
    assert code == 0, said
    words = "llama-3.1-8b.decode fits 1 1 x H100, 80.0 GB 16.1 GB 31.5 GB 2.5 GB 2.0 GB 28.0 GB"
    assert words in [" ".join(line.split()) for line in said.splitlines()]
    (pool,) = json.loads(figures.read_text())
    assert (pool["weights"], pool["kv"], pool["verdict"]) == (16_059_990_016, 30000 << 20, "fits")
    assert pool["left"] == 80e9 - 16_059_990_016 - (30000 << 20) - pool["step"] - 2e9


def test_a_pool_that_does_not_fit_is_the_exit_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code, said = planned(monkeypatch, tmp_path, ON_GPUS, "--gpu", "L4")
    assert code == 1
    assert "llama-3.1-8b.decode: weights 16.1 GB + KV 31.5 GB + step 2.5 GB + reserve 2.0 GB = 52.0 GB" in said
    assert "llama-3.1-8b.decode: fits with tensor_parallel: 4, gpus: 4 (weights 4.0 GB" in said


def test_later_files_come_over_earlier_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    over = tmp_path / "over.yaml"
    over.write_text("worker: {config: {kv_memory_mib: 1024, vllm_options: {max_model_len: 4096}}}")
    code, said = planned(monkeypatch, tmp_path, ON_GPUS, "--gpu", "L4", "--values", str(over))
    assert code == 0, said
    assert "1.1 GB" in said


def test_shapes_of_ones_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "config.json").write_text(json.dumps(DEFAULT_CONFIG | {"num_hidden_layers": 64}))
    values = ON_GPUS | {"models": [MODEL | {"name": "mine"}]}
    code, said = planned(monkeypatch, tmp_path, values, "--gpu", "H100")
    assert code == 0, "what is unknown is no refusal"
    assert "mine.decode: unchecked: shape: unknown model 'mine'; known are" in said
    code, said = planned(monkeypatch, tmp_path, values, "--gpu", "H100", "--shape", f"mine={tmp_path / 'mine'}")
    assert code == 0
    assert "30.0 GB" in said
    code, said = planned(monkeypatch, tmp_path, values, "--gpu", "H100", "--shape", "mine=llama-3.1-70b")
    assert code == 1
    assert "141.1 GB" in said
    (tmp_path / "mine" / "config.json").write_text(json.dumps(DEFAULT_CONFIG | {"kv_lora_rank": 512}))
    code, said = planned(monkeypatch, tmp_path, values, "--gpu", "H100", "--shape", f"mine={tmp_path / 'mine'}")
    assert code == 0
    assert "unchecked: shape: config.json: kv_lora_rank" in said


@pytest.mark.parametrize(
    ("values", "options", "said"),
    [
        ("a: [", [], "values: .* is not YAML"),
        ("- a", [], "values: .* must hold a mapping"),
        (ON_GPUS, ["--values", "/nowhere"], "values: cannot read /nowhere: No such file"),
        (ON_GPUS, ["--gpu", "TPU"], "gpu: 'TPU' is not known"),
        (ON_GPUS, ["--shape", "8b"], "shape: '8b' is not NAME=SHAPE"),
        (ON_GPUS, ["--shape", "8b=llama-3.1-8b"], "shape: the values have no model '8b'"),
        (ON_GPUS, ["--shape", "llama-3.1-8b=/nowhere"], "model: no directory '/nowhere'"),
        (ON_GPUS, ["--rate", "1"], "rate: describes a load and cannot be combined with --values"),
    ],
)
def test_options_that_are_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, values: object, options: list[str], said: str
) -> None:
    code, words = planned(monkeypatch, tmp_path, values, *options)
    assert code == 2
    assert re.match(said, words), words


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ([], "rate: is missing: describe a load with --rate"),
        (["--rate", "1", "--prompt", "9"], "output: is missing: describe a load with --output"),
    ],
)
def test_without_values_a_load_is_needed(options: list[str], said: str) -> None:
    done = CliRunner().invoke(app, ["plan", *options])
    assert isinstance(done.exception, StartError)
    assert str(done.exception).startswith(said)
