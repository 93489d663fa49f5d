"""Steps of engines that `make test-slow` slows."""

import os
import subprocess
import sys
from pathlib import Path

import support

PROGRAM = """
import threading, time
now = [0.0]
def pass_s(seconds):
    now[0] += seconds
time.monotonic, time.sleep = lambda: now[0], pass_s
from engine.process.engine_process import ComputeThread
over = threading.Event()
ComputeThread(lambda: None, over.set).submit("step", lambda: pass_s(2.0))
over.wait()
print(now[0])
"""


def test_a_step_takes_three_times_as_long() -> None:
    folder = Path(support.__path__[0]) / "slow_steps"
    took = {}
    for path in (str(folder), ""):
        environment = os.environ | {"PYTHONPATH": path}
        took[path] = subprocess.run([sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True)
    assert [answer.stdout for answer in took.values()] == ["6.0\n", "2.0\n"], took
