"""A new revision of a model under its name: rollouts of whole clusters under load, as Kubernetes makes them.

A sim engine's tokens are hashes of the KV that it read, and of its model's files. So a stream of two revisions has
tokens of neither.
"""

import itertools
from collections import Counter
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from support.adapters import LLAMA, adapter_weights, write_adapter
from support.fault_rounds import ROUNDS
from support.long_runs import mostly_long
from support.redis_server import RedisServer
from support.rollouts import Load, Revision, Rollout, answers, judged
from support.sim_directories import write_sim_model, write_tokenizer
from tandem.client import Client

VOCAB = 600
STEP_MS = 8.0
LENGTHS = range(20, 400)
PROMPTS = [" ".join(f"word{seed * 7 + number}" for number in range(30 + seed)) for seed in range(8)]
KINDS = ("weights", "config", "tokenizer", "adapter")


def revisions_of(kind: str, folder: Path) -> tuple[Revision, Revision]:
    """Return two revisions of one name that differ in nothing else."""
    made = []
    for number, name in enumerate(("old", "new")):
        (folder / name).mkdir()
        changed = number and kind
        model = write_sim_model(folder / name / "story", VOCAB, **({"rope_theta": 5} if changed == "config" else {}))
        write_tokenizer(model, VOCAB, pad="!" if changed == "tokenizer" else "")
        (model / "model.safetensors").write_bytes(b"w" * (20 if changed == "weights" else 10))
        seed = 1 if changed == "adapter" else 0
        adapters = {"legal": write_adapter(folder / name / "legal", adapter_weights(LLAMA, seed))}
        made.append(Revision(model, adapters))
    return made[0], made[1]


@pytest.mark.parametrize(
    ("kind", "found_by"), mostly_long(itertools.product(KINDS, ("settings", "redis")), ("tokenizer", "redis"))
)
async def test_a_rollout_of_another_revision_is_an_ordinary_upgrade(kind: str, found_by: str, tmp_path: Path) -> None:
    """No stream is lost or of two models, and no process ends by itself.

    The longest time without a new answer is printed.
    """
    worker: dict[str, Any] = {"engine": "sim", "sim_step_ms": STEP_MS, "kv_memory_mib": 8, "drain_s": 1.0}
    router: dict[str, Any] = {"drain_s": 20.0}
    served = "legal" if kind == "adapter" else "story"
    counts: Counter[str] = Counter()
    gaps = []
    async with AsyncExitStack() as held:
        if found_by == "redis":
            url = (await held.enter_async_context(RedisServer(tmp_path))).url
            worker["redis_url"] = router["redis_url"] = url
        rollout = await held.enter_async_context(Rollout(worker, router))
        client = await held.enter_async_context(Client(*rollout.addresses))
        revisions = revisions_of(kind, tmp_path)
        await rollout.start(revisions[0])
        known: list[dict[str, list[int]]] = [await answers(client, served, PROMPTS, LENGTHS.stop)]
        for number in range(1, ROUNDS + 1):
            load = Load(client, served, PROMPTS, LENGTHS)
            await rollout.to(revisions[number % 2])
            await load.end()
            gaps.append(load.longest_gap_s)
            if number == 1:
                known.append(await answers(client, served, PROMPTS, LENGTHS.stop))
                assert not any(known[0][prompt] == known[1][prompt] for prompt in PROMPTS)
            counts += judged(load.outcomes, known)
            assert counts["whole"] > 20
            assert set(counts) <= {"whole", "revision gone"}, counts
    print(f"\n{kind}, routers found by {found_by}: {ROUNDS} rollouts, {dict(counts)}, longest gap {max(gaps):.2f} s")
