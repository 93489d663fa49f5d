"""Dockerfiles, as far as they can be checked without a container engine."""

import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

from support.chart import ROOT

DOCKERFILES = sorted((ROOT / "docker").glob("*.Dockerfile"))
PACKAGES = set(
    tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
)


@pytest.fixture(params=DOCKERFILES, ids=lambda path: path.name)
def dockerfile(request: pytest.FixtureRequest) -> Path:
    path: Path = request.param
    return path


def copied(dockerfile: Path) -> set[str]:
    """From the build context."""
    lines = re.findall(r"^COPY (?!--from)(.*) \S+$", dockerfile.read_text(), re.M)
    return {name for line in lines for name in line.split()}


def test_hadolint(dockerfile: Path) -> None:
    linter = Path(sys.executable).parent / "hadolint"
    answer = subprocess.run([linter, dockerfile], capture_output=True, text=True, check=False, timeout=60)
    assert answer.returncode == 0, answer.stdout


def test_it_is_pinned_and_runs_as_nobody_special(dockerfile: Path) -> None:
    text = dockerfile.read_text()
    bases = re.findall(r"^(?:FROM|ARG BASE=)\s*(\S+)", text, re.M)
    for base in bases:  # with coreutils: the chart's preStop hook runs `sleep`
        ours = re.fullmatch(r"[a-z/]*python:\d+\.\d+\.\d+-slim-bookworm", base)
        assert base == "${BASE}" or ours or re.fullmatch(r"vllm/vllm-openai:v0\.32\.\d+", base), base
    assert re.search(r"^USER 10001:10001$", text, re.M)
    assert "-c constraints.txt" in text


def test_it_keeps_the_bytecode_that_pip_compiles(dockerfile: Path) -> None:
    """Containers have a read-only root: without it each start compiles all that it imports."""
    text = dockerfile.read_text()
    assert "PIP_NO_COMPILE" not in text
    assert "--no-compile" not in text
    assert text.index("pip install") < text.index("PYTHONDONTWRITEBYTECODE=1")


def test_it_is_given_all_that_is_installed(dockerfile: Path) -> None:
    assert copied(dockerfile) >= PACKAGES
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    assert {f"!{name}" for name in copied(dockerfile)} <= set(ignored)


def test_what_it_is_given_can_be_built(dockerfile: Path, tmp_path: Path) -> None:
    """A wheel of the build context alone, as pip makes one in the image."""
    source = tmp_path / "src"
    source.mkdir()
    for name in copied(dockerfile):
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / name, source / name)
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", tmp_path, source]
    answer = subprocess.run(command, capture_output=True, text=True, check=False, timeout=240)
    assert answer.returncode == 0, answer.stderr
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as built:
        names = built.namelist()
    for package in PACKAGES:
        assert f"{package}/__init__.py" in names or any(name.startswith(f"{package}/") for name in names)
    assert "kvtransfer/native/fingerprint.cpp" in names
    assert "engine/backends/torch/native/linear.cpp" in names
    assert "engine/backends/torch/native/microkernel.h" in names
