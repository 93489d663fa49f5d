"""The chart, rendered by the real helm."""

import json
import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
CHART = ROOT / "helm" / "tandem"
EXAMPLES = sorted((ROOT / "helm" / "examples").glob("*.yaml"))


def _find_helm() -> str | None:
    here = ROOT / ".helm" / "helm"
    return os.environ.get("TANDEM_HELM") or (str(here) if here.exists() else shutil.which("helm"))


HELM = _find_helm()
needs_helm = pytest.mark.skipif(HELM is None, reason="no helm: `make helm` gets it")


def helm(*arguments: str) -> subprocess.CompletedProcess[str]:
    assert HELM is not None
    return subprocess.run([HELM, *arguments], capture_output=True, text=True, timeout=60, check=False)


def render(values: dict[str, Any] | Path | None = None, *options: str, release: str = "demo") -> list[dict[str, Any]]:
    """All manifests. Fails with helm's own words."""
    answer = template(values, *options, release=release)
    assert answer.returncode == 0, answer.stderr
    return [manifest for manifest in yaml.safe_load_all(answer.stdout) if manifest]


def template(
    values: dict[str, Any] | Path | None = None, *options: str, release: str = "demo"
) -> subprocess.CompletedProcess[str]:
    if values is None:
        return helm("template", release, str(CHART), *options)
    if isinstance(values, Path):
        return helm("template", release, str(CHART), "-f", str(values), *options)
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
        json.dump(values, file)  # which is YAML in which no word is a boolean
        file.flush()
        return helm("template", release, str(CHART), "-f", file.name, *options)


def pod_specs(manifests: list[dict[str, Any]]) -> list[tuple[str, dict[str, Any]]]:
    """Of all that make pods, by their names."""
    found = []
    for manifest in manifests:
        if manifest["kind"] in ("Deployment", "StatefulSet"):
            found.append((manifest["metadata"]["name"], manifest["spec"]["template"]["spec"]))
        elif manifest["kind"] == "Pod":
            found.append((manifest["metadata"]["name"], manifest["spec"]))
    return found
