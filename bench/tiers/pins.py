"""Pinned prompts in a flood of 20 times the pool, with one worker and the sim engine.

The flood has prompts that come once, and others that come again and again. These others' hit rate is compared with that
of a pool without pins that is smaller by the pinned blocks.
"""

import os
import random
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.progress import Progress

from bench.models import sim_model
from bench.report import Bar
from bench.tiers import folder
from protos import inference_pb2 as pb
from tandem.client import Client
from tandem.local.local_cluster import LocalCluster
from tandem.topology import plan_topology

BLOCK = 16
BLOCK_KIB = 16
POOL_BLOCKS = 512
PINNED, PINNED_BLOCKS = 8, 8
"""Pinned prompts, and full blocks of each."""
FLOOD = 20
"""Blocks that the flood computes, in pools."""
ONCE_BLOCKS, AGAIN_BLOCKS, NUM_AGAIN = 24, 12, 40
"""Blocks of prompts that come once and again, and number of the latter."""


def prompt(seeds: random.Random, num_blocks: int) -> list[int]:
    return [seeds.randrange(1, 1000) for _ in range(num_blocks * BLOCK + 1)]


async def ask(client: Client, tokens: list[int], retention_s: float | None = None) -> pb.KvReceipt:
    receipt, _ = await folder.ask(client, tokens, retention_s)
    return receipt.kv


async def flood(model: Path, num_blocks: int, pins: bool, progress: Progress) -> dict[str, float]:
    """Return how many pinned prompts survived whole, and the hit rate of prompts that come again."""
    seeds = random.Random(9)
    worker = {"model": model, "engine": "sim", "sim_block_kib": BLOCK_KIB}
    topology = plan_topology(0, 1, {"model": model, "port": 0}, worker, sorted(os.sched_getaffinity(0)))
    decode = topology.decode[0].model_copy(update={"kv_memory_mib": num_blocks * BLOCK_KIB >> 10})
    topology = replace(topology, decode=(decode,))
    kept = [prompt(seeds, PINNED_BLOCKS) for _ in range(PINNED)]
    again = [prompt(seeds, AGAIN_BLOCKS) for _ in range(NUM_AGAIN)]
    task = progress.add_task(f"{num_blocks} blocks, {'pins' if pins else 'no pins'}", total=FLOOD * POOL_BLOCKS)
    asked = hit = computed = 0
    async with LocalCluster(topology) as cluster, Client(cluster.address) as client:
        if pins:
            for tokens in kept:
                assert (await ask(client, tokens, 3600.0)).pinned_blocks == PINNED_BLOCKS
        while computed < FLOOD * POOL_BLOCKS:
            once = await ask(client, prompt(seeds, ONCE_BLOCKS))
            receipt = await ask(client, seeds.choice(again))
            asked += AGAIN_BLOCKS
            hit += receipt.reused_blocks
            computed += once.computed_blocks + receipt.computed_blocks
            progress.update(task, completed=computed)
        survived = 0
        for tokens in kept:
            survived += (await ask(client, tokens)).reused_blocks == PINNED_BLOCKS
    return {"survived": survived, "hit_rate": hit / asked}


async def measure(progress: Progress) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as root:
        model = sim_model(Path(root) / "sim")
        return {
            "pinned": await flood(model, POOL_BLOCKS, True, progress),
            "not pinned": await flood(model, POOL_BLOCKS, False, progress),
            "smaller pool": await flood(model, POOL_BLOCKS - PINNED * PINNED_BLOCKS, False, progress),
        }


def bars_of(figures: dict[str, Any]) -> list[Bar]:
    rate = figures["pinned"]["hit_rate"] / figures["smaller pool"]["hit_rate"]
    return [
        Bar(f"pinned prompts of {PINNED} that survive {FLOOD} pools", figures["pinned"]["survived"], PINNED, True),
        Bar("others' hit rate / that of a pool smaller by the pins", rate, 0.9, at_least=True),
    ]
