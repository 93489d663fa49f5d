"""Check of `helm upgrade` between two charts: what would change, and what would break.

`upgrade.py OLD NEW [-f VALUES]...` takes charts as folders or packages (`helm/released`). It prints a unified diff of
each manifest, then a line `breaks: ...` for each of these, and exits with 1 if there is one:

- a changed field that Kubernetes does not allow to change
- a removed claim or Service, or a removed Service port that clients use
- a Service or NetworkPolicy that no longer selects the pods that run when the upgrade begins
- routers whose addresses old workers do not know: until a pool is rolled, it must reach routers of both versions
- a template that changed while the chart's version did not
"""

import argparse
import difflib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

Manifest = dict[str, Any]
Key = tuple[str, str]
HERE = Path(__file__).parents[1] / ".helm" / "helm"
CHANGEABLE = {
    "StatefulSet": {
        "minReadySeconds", "ordinals", "persistentVolumeClaimRetentionPolicy", "replicas", "revisionHistoryLimit",
        "template", "updateStrategy",
    },
    "PersistentVolumeClaim": {"resources"},
}  # fmt: skip
"""Fields of a `spec` that may change; all others are fixed at creation."""
FIXED = {"Deployment": ("selector",), "Service": ("clusterIP",), "Job": ("template", "selector")}
KEPT = ("PersistentVolumeClaim", "Service")


def main() -> None:
    arguments = argparse.ArgumentParser(description="what `helm upgrade` changes and breaks")
    arguments.add_argument("old", type=Path)
    arguments.add_argument("new", type=Path)
    arguments.add_argument("-f", "--values", type=Path, action="append", default=[])
    given = arguments.parse_args()
    old, new = (rendered(chart, given.values) for chart in (given.old, given.new))
    sys.stdout.writelines(differences(old, new))
    found = list(breaks(old, new))
    if old != new and version_of(given.old) == version_of(given.new):
        found.append(f"Chart.yaml: still version {version_of(given.new)}, though manifests differ")
    for each in found:
        print("breaks:", each)
    sys.exit(1 if found else 0)


def rendered(chart: Path, values: list[Path]) -> dict[Key, Manifest]:
    """Return a release's manifests without hooks, which live only as long as their jobs."""
    files = [word for path in values for word in ("-f", str(path))]
    text = _helm("template", "demo", str(chart), *files)
    manifests = [manifest for manifest in yaml.safe_load_all(text) if manifest]
    return {
        (manifest["kind"], manifest["metadata"]["name"]): manifest
        for manifest in manifests
        if "helm.sh/hook" not in manifest["metadata"].get("annotations", {})
    }


def version_of(chart: Path) -> str:
    version: str = yaml.safe_load(_helm("show", "chart", str(chart)))["version"]
    return version


def differences(old: dict[Key, Manifest], new: dict[Key, Manifest]) -> Iterator[str]:
    """Yield the lines of a unified diff, manifest by manifest."""
    for key in sorted({*old, *new}):
        before, after = ("" if key not in of else yaml.safe_dump(of[key]) for of in (old, new))
        yield from difflib.unified_diff(
            before.splitlines(True), after.splitlines(True), f"old {'/'.join(key)}", f"new {'/'.join(key)}", n=2
        )


def breaks(old: dict[Key, Manifest], new: dict[Key, Manifest]) -> Iterator[str]:
    """Yield a sentence that names the manifest, for each break."""
    for key, before in old.items():
        name = "/".join(key)
        if key in new:
            yield from (f"{name}: {field} cannot be changed" for field in changed_fixed(before, new[key]))
        elif key[0] in KEPT:
            yield f"{name}: goes"
    yield from ports_gone(old, new)
    yield from pods_left_behind(old, new)
    yield from routers_out_of_reach(old, new)


def changed_fixed(before: Manifest, after: Manifest) -> Iterator[str]:
    """Yield the paths of fixed fields that differ."""
    kind, was, now = before["kind"], before.get("spec", {}), after.get("spec", {})
    changeable = CHANGEABLE.get(kind)
    fixed = FIXED.get(kind, ()) if changeable is None else sorted({*was, *now} - changeable)
    yield from (f"spec.{field}" for field in fixed if was.get(field) != now.get(field))
    if before.get("roleRef") != after.get("roleRef"):
        yield "roleRef"


def ports_gone(old: dict[Key, Manifest], new: dict[Key, Manifest]) -> Iterator[str]:
    """Yield removed ports of Services with an address of their own, which are those that clients know."""
    for key, before in old.items():
        if key[0] == "Service" and key in new and before["spec"].get("clusterIP") != "None":
            there = {port["port"] for port in new[key]["spec"]["ports"]}
            gone = [port for port in before["spec"]["ports"] if port["port"] not in there]
            yield from (f"Service/{key[1]}: port {port['port']} ({port['name']}) goes" for port in gone)


def pods_left_behind(old: dict[Key, Manifest], new: dict[Key, Manifest]) -> Iterator[str]:
    """Yield pods that no selector matches: old and new pods run side by side, and both must be found and allowed."""
    pods = {
        key[1]: manifest["spec"]["template"]["metadata"]["labels"]
        for key, manifest in old.items()
        if key[0] in ("Deployment", "StatefulSet")
    }
    for key, before in old.items():
        if key in new and key[0] in ("Service", "NetworkPolicy"):
            was, now = _selector(before), _selector(new[key])
            left = [pod for pod, labels in pods.items() if _selects(was, labels) and not _selects(now, labels)]
            yield from (f"{'/'.join(key)}: no longer selects the pods of {pod} that run" for pod in left)


def routers_out_of_reach(old: dict[Key, Manifest], new: dict[Key, Manifest]) -> Iterator[str]:
    """Yield routers that old workers cannot reach, by the settings in the workers' ConfigMaps."""
    for key, before in old.items():
        known = _routers(before) if key[0] == "ConfigMap" and key in new else set()
        if known and (unknown := sorted(_routers(new[key]) - known)):
            yield f"ConfigMap/{key[1]}: workers that run do not know the routers' addresses {', '.join(unknown)}"


def _routers(config_map: Manifest) -> set[str]:
    said: set[str] = set()
    for text in config_map.get("data", {}).values():
        settings = yaml.safe_load(text) if "routers" in text else None
        if isinstance(settings, dict) and isinstance(settings.get("routers"), list):
            said.update(settings["routers"])
    return said


def _selector(manifest: Manifest) -> dict[str, str]:
    spec = manifest["spec"]
    selector: dict[str, str] = spec["selector"] if manifest["kind"] == "Service" else spec["podSelector"]["matchLabels"]
    return selector


def _selects(selector: dict[str, str], labels: dict[str, str]) -> bool:
    return selector.items() <= labels.items()


def _helm(*arguments: str) -> str:
    helm = os.environ.get("TANDEM_HELM") or (str(HERE) if HERE.exists() else shutil.which("helm"))
    if helm is None:
        sys.exit("no helm: `make helm` gets it")
    answer = subprocess.run([helm, *arguments], capture_output=True, text=True, timeout=60, check=False)
    if answer.returncode:
        sys.exit(f"helm {json.dumps(arguments)}: {answer.stderr.strip()}")
    return answer.stdout


if __name__ == "__main__":
    main()
