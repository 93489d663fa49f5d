"""Any schedule of faults over stock vLLM schedulers with TandemConnector, see `support/connector_trials.py`.

TANDEM_TRIALS=n runs n seeds instead of a few.
"""

import json
import os
import subprocess
from collections import Counter

import pytest

from support.vllm_engines import PYTHON, ROOT, need_vllm

pytestmark = need_vllm
TRIALS = int(os.environ.get("TANDEM_TRIALS", "80"))
REACHED = ("answers", "borrowed", "mismatched", "failed loans", "cut", "kill", "cancel", "reset", "damage", "silence")
"""What must happen at all for the trials to mean anything."""
ENVIRONMENT = os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}", "VLLM_LOGGING_LEVEL": "ERROR"}


@pytest.mark.timeout(0 if "TANDEM_TRIALS" in os.environ else 900)
def test_any_schedule_of_faults() -> None:
    num_cores = len(os.sched_getaffinity(0))
    share = -(-TRIALS // num_cores)
    running = [
        subprocess.Popen(
            [str(PYTHON), "-m", "support.connector_trials", str(first), str(min(share, TRIALS - first))],
            env=ENVIRONMENT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for first in range(0, TRIALS, share)
    ]
    seen: Counter[str] = Counter()
    for process in running:
        output, errors = process.communicate()
        assert process.returncode == 0, errors[-3000:]
        seen.update(json.loads(output.splitlines()[-1]))
    assert not [what for what in REACHED if not seen[what]]


def test_exact_orders_of_steps() -> None:
    """Found blocks get names after the step that fills them; fingerprints that a loan's end overtakes are dropped."""
    done = subprocess.run(
        [str(PYTHON), "-m", "support.connector_steps"], env=ENVIRONMENT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    named = {"in flight": 0, "ended": 3}
    assert json.loads(done.stdout.splitlines()[-1]) == {
        "found blocks": {"both run": named, "the second is cancelled": named},
        "fingerprints": {"the loan goes on": 3, "the loan is over": 0},
    }
