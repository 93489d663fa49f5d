"""Any schedule of faults over vLLM's scheduler, with every kind of KV groups, see `support/vllm_trials.py`.

TANDEM_TRIALS=n runs n seeds instead of a few.
"""

import json
import os
import subprocess
from collections import Counter

import pytest

from support.trial_cells import Cell, table
from support.vllm_engines import PYTHON, ROOT, need_vllm

pytestmark = need_vllm
TRIALS = int(os.environ.get("TANDEM_TRIALS", "80"))
MANY = 5000
"""So many trials print what they met."""
ONCE_WRONG = (99, 816, 5684)
"""Seeds of what was once wrong.

A block was named before the step that fills it had ended; a last token waited for names that never came; and a loan
waited for more blocks than its pool has.
"""
REACHED = (
    *("moved", "mismatched", "killed", "stopped", "broken", "cancelled", "expired", "parted", "pinned", "accepted"),
    *("from the store", "restored", "store damaged", "local store damaged", "quarantined", "states and a window"),
)
"""What must happen at all for the trials to mean anything."""


@pytest.mark.timeout(0 if "TANDEM_TRIALS" in os.environ else 900)
def test_any_schedule_of_faults(capsys: pytest.CaptureFixture[str]) -> None:
    num_cores = len(os.sched_getaffinity(0))
    share = -(-TRIALS // num_cores)
    environment = os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}", "VLLM_LOGGING_LEVEL": "ERROR"}
    commands = [
        [str(PYTHON), "-m", "support.vllm_trials", str(first), str(min(share, TRIALS - first))]
        for first in range(0, TRIALS, share)
    ]
    commands[0] += map(str, ONCE_WRONG)
    running = [
        subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for command in commands
    ]
    told = [process.communicate() for process in running]
    seen: Counter[str] = Counter()
    cells: Counter[Cell] = Counter()
    for process, (output, errors) in zip(running, told, strict=True):
        assert process.returncode == 0, errors[-3000:]
        counts, met = json.loads(output.splitlines()[-1])
        seen.update(counts)
        for fault, side, state, number in met:
            cells[fault, side, state] += number
    assert not [what for what in REACHED if not seen[what]]
    if TRIALS >= MANY:
        with capsys.disabled():
            print(f"\n{TRIALS} trials\n{table(cells)}\n{dict(sorted(seen.items()))}")
