"""Trials of engines over vLLM's scheduler with windows and states, see `support/vllm_trials.py`.

TANDEM_TRIALS=n runs n seeds instead of a few.
"""

import os
import subprocess

import pytest

from support.vllm_engines import PYTHON, ROOT, need_vllm

pytestmark = need_vllm
TRIALS = int(os.environ.get("TANDEM_TRIALS", "80"))


@pytest.mark.timeout(0 if "TANDEM_TRIALS" in os.environ else 900)
def test_any_schedule_of_faults_with_several_kv_groups() -> None:
    num_cores = len(os.sched_getaffinity(0))
    share = -(-TRIALS // num_cores)
    environment = os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}", "VLLM_LOGGING_LEVEL": "ERROR"}
    commands = [
        [str(PYTHON), "-m", "support.vllm_trials", str(first), str(min(share, TRIALS - first))]
        for first in range(0, TRIALS, share)
    ]
    running = [
        subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for command in commands
    ]
    told = [process.communicate() for process in running]
    for process, (_, errors) in zip(running, told, strict=True):
        assert process.returncode == 0, errors[-3000:]
    for seen in ("'moved'", "'mismatched'", "'killed'", "'cut'", "'cancelled'", "'states and a window'"):
        assert any(seen in output for output, _ in told)
