"""What TandemConnector refuses at start, by the name of the option."""

import json
import os
import subprocess
from pathlib import Path

from support.vllm_engines import PYTHON, ROOT, need_vllm

pytestmark = need_vllm
BEGINNINGS = {
    "unknown key": "kv_connector_extra_config.lender: unknown key; did you mean lenders?",
    "open without a guard": "kv_connector_extra_config.loan_host: 0.0.0.0 is not loopback",
    "lends only, with lenders": "kv_role: kv_producer borrows nothing",
    "prefix caching off": "enable_prefix_caching: must be on",
    "sleep mode": "enable_sleep_mode: must be off",
    "ray": "distributed_executor_backend: ray is not supported by TandemConnector: take uni or mp",
    "several nodes": "nnodes: 2 is not supported by TandemConnector",
    "context parallel": "decode_context_parallel_size: 2 is not supported by TandemConnector",
    "within another connector": "kv_connector: TandemConnector runs alone, not within MultiConnector",
}


def test_each_refusal_names_the_option(tmp_path: Path) -> None:
    results = tmp_path / "results.json"
    done = subprocess.run(
        [str(PYTHON), "-m", "support.connector_refusals", str(results)],
        env=os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}", "VLLM_LOGGING_LEVEL": "ERROR"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    refusals = json.loads(results.read_text())
    assert refusals.pop("nothing") is None
    assert set(refusals) == set(BEGINNINGS)
    for name, beginning in BEGINNINGS.items():
        assert (refusals[name] or "").startswith(beginning), f"{name}: {refusals[name]}"
