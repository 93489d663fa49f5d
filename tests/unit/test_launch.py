"""Programs are started by `cluster.launch`."""

import gc
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from cluster.launch import launch

PROGRAM = """
import gc, os, sys
collecting = gc.isenabled()
def main():
    print(collecting, gc.isenabled(), os.environ["OPENBLAS_NUM_THREADS"], sys.argv[1:])
    return 3
"""


def test_a_program_is_imported_without_collections_and_runs_with_them(tmp_path: Path) -> None:
    (tmp_path / "a_program.py").write_text(PROGRAM)
    environment = {name: value for name, value in os.environ.items() if name != "OPENBLAS_NUM_THREADS"}
    done = subprocess.run(
        [sys.executable, "-m", "cluster.launch", "a_program", "7", "--set"],
        env=environment | {"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout.strip()) == (3, "False True 1 ['7', '--set']"), done.stderr


def test_one_that_cannot_be_imported_leaves_collections_as_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENBLAS_NUM_THREADS", "4")
    with pytest.raises(ModuleNotFoundError):
        launch("no_such_program")
    assert gc.isenabled()
    assert os.environ["OPENBLAS_NUM_THREADS"] == "4"  # the user's choice


def test_a_program_that_says_nothing_went_well(monkeypatch: pytest.MonkeyPatch) -> None:
    program = ModuleType("a_quiet_program")
    monkeypatch.setattr(program, "main", lambda: None, raising=False)
    monkeypatch.setitem(sys.modules, "a_quiet_program", program)
    assert launch("a_quiet_program") == 0


@pytest.mark.parametrize("role", ["router", "prefill_worker", "decode_worker", "planner"])
def test_roles_are_programs(role: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", role, "--set", "model=m", "--set", "no_such=1"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, "no_such" in done.stderr) == (2, True), done.stderr
