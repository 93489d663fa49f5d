"""Where an engine process computes. In children: what they change cannot be taken back."""

import json
import os
import subprocess
import sys

import pytest

from engine.errors import EngineStartError
from engine.worker.cores import AUTOGROUP, stay_on

REPORT = """
import json, os, sys
from engine.worker.cores import AUTOGROUP, stay_on, step_back
step_back(int(sys.argv[1]))
stay_on([int(sys.argv[2])])
group = AUTOGROUP.read_text() if AUTOGROUP.exists() else ""
print(json.dumps([os.nice(0), sorted(os.sched_getaffinity(0)), os.getsid(0) == os.getpid(), group]))
"""


def child(niceness: int, core: int) -> tuple[int, list[int], bool, str]:
    command = [sys.executable, "-c", REPORT, str(niceness), str(core)]
    nice, cores, leads, group = json.loads(subprocess.run(command, capture_output=True, check=True).stdout)
    return nice, cores, leads, group


def test_an_engine_stays_on_its_cores_and_steps_back_as_a_session_of_its_own() -> None:
    core = max(os.sched_getaffinity(0))
    nice, cores, leads, group = child(4, core)
    assert (nice, cores, leads) == (os.nice(0) + 4, [core], True)
    if AUTOGROUP.exists():
        assert group.split()[-1] == "4"


def test_without_niceness_nothing_changes() -> None:
    nice, _, leads, _ = child(0, max(os.sched_getaffinity(0)))
    assert (nice, leads) == (os.nice(0), False)


def test_a_core_that_is_not_there_is_named() -> None:
    with pytest.raises(EngineStartError, match=r"cores: .*4095"):
        stay_on([4095])
