"""A rolling upgrade from the version before to this one, and back: processes of both in one cluster, under load."""

import subprocess
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from support.long_runs import mostly_long
from support.processes import LENDER_ALWAYS, until
from support.rollouts import Load, Outcome, Revision, Rollout, answers, judged
from support.sim_directories import write_sim_model, write_tokenizer
from tandem.client import Client

BEFORE = "adb67bf400df050ae0db4a7b33512fea9922d9f9"
"""Commit of the version before, whose fronts lend over gRPC."""
VOCAB = 600
LENGTHS = range(20, 200)
PROMPTS = [" ".join(f"word{seed * 7 + number}" for number in range(60 + seed)) for seed in range(8)]
WORKER: dict[str, Any] = {"engine": "sim", "sim_step_ms": 8.0, "kv_memory_mib": 2, "drain_s": 5.0}


@pytest.fixture(scope="module")
def before(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tree = tmp_path_factory.mktemp("before")
    archive = subprocess.run(["git", "archive", BEFORE], capture_output=True, check=False)
    if archive.returncode:
        pytest.skip(f"needs commit {BEFORE[:8]} in this clone's history")
    subprocess.run(["tar", "-x", "-C", tree], input=archive.stdout, check=True)
    return tree


@pytest.mark.parametrize("direction", mostly_long(["to this version", "to the version before"], "to this version"))
async def test_versions_run_in_one_cluster_while_one_replaces_the_other(
    direction: str, before: Path, tmp_path: Path
) -> None:
    """No stream is lost or wrong. A router of this version lets engines of one version lend each other only; one of the
    version before pairs all, and the loans between versions fail."""
    model = write_sim_model(tmp_path / "story", VOCAB)
    write_tokenizer(model, VOCAB)
    (model / "model.safetensors").write_bytes(b"weights")
    versions = Revision(model, {}, before), Revision(model, {})
    old, new = versions if direction == "to this version" else versions[::-1]
    async with Rollout(WORKER, {"drain_s": 20.0, **LENDER_ALWAYS}) as rollout, Client(*rollout.addresses) as client:
        await rollout.start(old, num_workers=2)
        known = [await answers(client, "story", PROMPTS, LENGTHS.stop)]
        load = Load(client, "story", PROMPTS, LENGTHS)
        await rollout.to(new)
        await load.end()
        lent_before = _lent(load.outcomes)
        assert judged(load.outcomes, known) == Counter({"whole": len(load.outcomes)})
        assert len(load.outcomes) > 20
        after = Load(client, "story", [f"after {prompt}" for prompt in PROMPTS], LENGTHS)
        await until(lambda: _has(after, 30), "streams of one version have ended")
        await after.end()
        assert all(outcome.error is None for outcome in after.outcomes)
    assert lent_before["lent"] > 0, "they lent each other in between"
    assert _lent(after.outcomes)["lent"] > 0, "and do so afterwards"


async def _has(load: Load, count: int) -> bool:
    return len(load.outcomes) >= count


def _lent(outcomes: list[Outcome]) -> Counter[str]:
    """Count streams that borrowed blocks, and those that did not."""
    receipts = [outcome.receipt for outcome in outcomes if outcome.receipt is not None]
    return Counter("lent" if receipt.kv.moved_blocks else "not" for receipt in receipts)
