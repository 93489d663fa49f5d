"""`tandem doctor`."""

import asyncio
import json
import os
from pathlib import Path
from typing import Any

from rich.console import Console

from cluster.errors import StartError
from engine.model_dir import ModelDir
from engine.worker.config import WorkerConfig
from tandem.doctor.checks import check_all
from tandem.doctor.findings import exit_code
from tandem.doctor.machine import read_machine
from tandem.doctor.pairs import judge_pairs, measure_pairs, plan_peers
from tandem.doctor.report import as_json, show

MAX_WORKERS = 16


def run_doctor(console: Console, settings: dict[str, Any], model: Path | None, workers: int, print_json: bool) -> int:
    """`settings` of a worker. Returns the exit code; raises StartError when it cannot even begin."""
    if not 2 <= workers <= MAX_WORKERS:
        raise StartError("workers", f"a pair takes 2, and {MAX_WORKERS} are the most; not {workers}")
    if model is not None:
        ModelDir.open(model)
    config = WorkerConfig.parse({"model": model or Path()} | settings)
    machine = read_machine()
    specs = plan_peers(config, workers, gpu=bool(machine.torch_gpus) and config.device != "cpu")
    findings = check_all(machine, config, workers, os.environ)
    pairs = asyncio.run(measure_pairs(specs))
    findings += judge_pairs(pairs, machine, config)
    if print_json:
        print(json.dumps(as_json(machine, findings, pairs), indent=2))
    else:
        show(console, findings, pairs)
    return exit_code(findings)
