"""TandemConnector in vLLM's own environment: what it brings, and what it imports."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from cluster.logs import OURS
from support.vllm_engines import PYTHON, ROOT, need_vllm
from tandem_connector.contract import SOURCES

pytestmark = need_vllm
LACKED = ("grpc", "grpc_status", "grpc_health", "grpc_reflection", "ray", "redis", "rich", "typer")
"""Modules of other extras; vLLM brings some of them, for itself."""
PARTS = (
    "loans.component",
    "loans.peers.socket_network",
    "engine.block_parts.part_service",
    "engine.process.ranks.ranks",
    "engine.backends.vllm.connector",
    "engine.backends.vllm.kv.memory",
    "engine.backends.vllm.kv.block_pool",
    "engine.model.hub",
    "engine.model.model_dir",
    "kvtransfer.registry",
    "kvtransfer.nixl",
)
"""Modules that the connector is made of, besides its own."""
IMPORT_ALL = """
import builtins, json, pkgutil, sys
from importlib import import_module

ours, lacked, parts = json.loads(sys.argv[1])
original = builtins.__import__


def without(name, globals=None, *rest, **named):
    importer = str((globals or {}).get("__name__"))
    if importer.partition(".")[0] in ours and name.partition(".")[0] in lacked:
        raise ModuleNotFoundError(f"{importer} imports {name}")
    return original(name, globals, *rest, **named)


builtins.__import__ = without
connector = import_module("tandem_connector")
names = [each.name for each in pkgutil.walk_packages(connector.__path__, "tandem_connector.")]
for name in [*parts, *names]:
    import_module(name)
print(*(module.__file__ for name, module in sys.modules.items() if name.partition(".")[0] in ours if module.__file__))
"""
"""Imports the connector and its parts, with an import that lacks some modules for the code of this repository, and
prints the files of that code."""


def import_all(*parts: str) -> subprocess.CompletedProcess[str]:
    arguments = json.dumps([[*OURS, "protos"], LACKED, parts])
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [str(PYTHON), "-c", IMPORT_ALL, arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def test_it_imports_no_package_of_other_extras_and_vllm_in_checked_files() -> None:
    done = import_all(*PARTS)
    assert done.returncode == 0, done.stderr
    files = [Path(each) for each in done.stdout.splitlines()[-1].split()]
    users = [each for each in files if re.search(r"^ *from vllm", each.read_text(), re.MULTILINE)]
    assert [each for each in users if not {each, *each.parents} & {*SOURCES}] == []
    refused = import_all("cluster.network.rpc")
    assert "ModuleNotFoundError: cluster.network.rpc imports grpc" in refused.stderr


def test_it_brings_nothing_but_what_vllm_lacks(tmp_path: Path) -> None:
    subprocess.run(
        [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", tmp_path, ROOT], check=True
    )
    (wheel,) = tmp_path.glob("*.whl")
    command = [PYTHON, "-m", "pip", "install", "--quiet", "--dry-run", "--report", "-", f"{wheel}[connector]"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    brought = {each["metadata"]["name"] for each in json.loads(done.stdout)["install"]}
    assert brought <= {"tandem-serving", "nixl-cu12"}


@pytest.mark.parametrize("module", ["engine.backends.vllm.contract", "tandem_connector.contract"])
def test_the_check_of_names_finds_nothing_here(module: str) -> None:
    command = [str(PYTHON), "-m", "cluster.launch", module]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == ""
