"""What `helm upgrade` from released charts does to what runs, as `helm/upgrade.py` finds it with the real helm."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from support.chart import CHART, EXAMPLES, ROOT, helm, needs_helm

pytestmark = needs_helm
RELEASED = sorted((ROOT / "helm" / "released").glob("*.tgz"))
VERSION = yaml.safe_load((CHART / "Chart.yaml").read_text())["version"]
SIM = ROOT / "helm" / "examples" / "sim.yaml"
SINCE = {
    ("0.1.0", "tls"): "at '': additional properties",
    ("0.1.0", "gpu-8b"): "additional properties 'fitCheck' not allowed",
    ("0.1.0", "gpt-oss-120b"): "additional properties 'fitCheck' not allowed",
    ("0.1.0", "qwen3.5-35b"): "additional properties 'fitCheck' not allowed",
    ("0.1.0", "deepseek-v3"): "additional properties 'fitCheck' not allowed",
    ("0.1.0", "llama-405b"): "additional properties 'fitCheck' not allowed",
    ("0.1.0", "gpu-rdma"): "at '/worker': additional properties",
    ("0.1.0", "keda"): "at '/monitoring': additional properties 'podMonitor' not allowed",
    ("0.1.0", "fleet"): "additional properties 'fleet' not allowed",
    ("0.1.0", "gateway"): "additional properties 'epp' not allowed",
    ("0.1.0", "hub"): "at '/models/0/source': additional properties 'hub' not allowed",
}
"""Examples of what that version could not do, and so refuses."""
KNOWN = {
    ("0.1.0", "sim"): {"demo-simulated-prefill", "demo-simulated-decode"},
    ("0.1.0", "laptop"): {"demo-storyteller-prefill", "demo-storyteller-decode"},
    ("0.1.0", "laptop-restricted"): {"demo-storyteller-prefill", "demo-storyteller-decode"},
    ("0.1.0", "vllm"): {"demo-llama-3-1-8b-prefill", "demo-llama-3-1-8b-decode"},
    ("0.1.0", "mixed-gpus"): {"demo-llama-3-1-8b-prefill", "demo-llama-3-1-8b-decode"},
}
"""Pools that do not know where routers of later versions are, as docs/kubernetes-upgrades.md says."""


def compared(old: Path, new: Path, values: Path | None = None) -> tuple[str, list[str]]:
    """The diff, and what breaks."""
    command = [sys.executable, str(ROOT / "helm" / "upgrade.py"), str(old), str(new)]
    answer = subprocess.run(
        [*command, *(["-f", str(values)] if values else [])], capture_output=True, text=True, timeout=120, check=False
    )
    assert answer.stderr == ""
    lines = answer.stdout.splitlines(keepends=True)
    breaks = [line.removeprefix("breaks: ").strip() for line in lines if line.startswith("breaks: ")]
    assert answer.returncode == bool(breaks)
    return "".join(line for line in lines if not line.startswith("breaks: ")), breaks


@pytest.mark.parametrize("values", EXAMPLES, ids=lambda path: path.stem)
@pytest.mark.parametrize("old", RELEASED, ids=lambda path: path.stem)
def test_an_upgrade_breaks_only_what_is_told(old: Path, values: Path) -> None:
    version = old.stem.removeprefix("tandem-")
    if (unknown := SINCE.get((version, values.stem))) is not None:
        refused = helm("template", "demo", str(old), "-f", str(values))
        assert refused.returncode != 0
        assert unknown in refused.stderr
        return
    difference, breaks = compared(old, CHART, values)
    assert difference or version == VERSION, "not even the chart's label"
    unknown = "workers that run do not know the routers' addresses"
    assert {each.split(":")[0].removeprefix("ConfigMap/") for each in breaks} == KNOWN.get(
        (version, values.stem), set()
    )
    assert all(unknown in each for each in breaks)


def test_the_chart_is_not_of_a_version_that_was_released_otherwise() -> None:
    if any(path.stem == f"tandem-{VERSION}" for path in RELEASED):
        assert compared(ROOT / "helm" / "released" / f"tandem-{VERSION}.tgz", CHART) == ("", [])


@pytest.mark.parametrize(
    ("file", "was", "becomes", "breaks"),
    [
        (
            "templates/workers.yaml",
            "nindent 6 }}\n      tandem/pool: '{{ $full }}'\n  template",
            "nindent 6 }}\n      tandem/pool: '{{ $full }}'\n      pool: main\n  template",
            "Deployment/demo-simulated-decode: spec.selector cannot be changed",
        ),
        (
            "templates/router.yaml",
            "  podManagementPolicy: Parallel\n",
            "",
            "StatefulSet/demo-router: spec.podManagementPolicy cannot be changed",
        ),
        ("values.yaml", "  httpPort: 8000", "  httpPort: 8001", "Service/demo: port 8000 (http) goes"),
        (
            "templates/networkpolicy.yaml",
            '      tandem/worker: "true"\n  policyTypes',
            '      tandem/worker: "yes"\n  policyTypes',
            "NetworkPolicy/demo-workers: no longer selects the pods of demo-simulated-decode that run",
        ),
        (
            "values.yaml",
            "  internalPort: 50052",
            "  internalPort: 50053",
            "ConfigMap/demo-simulated-decode: workers that run do not know the routers' addresses "
            "demo-router-0.demo-routers:50053",
        ),
        ("values.yaml", "  runAsUser: 10001", "  runAsUser: 10002", f"Chart.yaml: still version {VERSION}, though"),
    ],
)
def test_what_would_break_is_found(tmp_path: Path, file: str, was: str, becomes: str, breaks: str) -> None:
    changed = tmp_path / "tandem"
    shutil.copytree(CHART, changed)
    text = (changed / file).read_text()
    assert was in text
    (changed / file).write_text(text.replace(was, becomes, 1))
    assert any(each.startswith(breaks) for each in compared(CHART, changed, SIM)[1])
