"""A cluster that moves KV over `ucxx`, and workers whose transport cannot be had. The sim engine: a wrong byte of KV
would be a wrong token."""

import random
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from cluster.errors import StartError
from support.processes import until
from tandem.client import Client

VOCAB = 600
SIM: dict[str, Any] = {"engine": "sim", "sim_step_ms": 1.0, "kv_memory_mib": 8}


def prompt_of(seed: int) -> list[int]:
    return random.Random(seed).choices(range(VOCAB), k=200)


async def tokens_over(cluster_of: Any, ask: Any, model: Path, transport: str) -> list[list[int]]:
    async with cluster_of(model, transport=transport, **SIM) as cluster, Client(cluster.address) as client:
        seeds = count(100)

        async def has_moved() -> bool:
            """Ask with a prompt of its own: a first contact may take so long that the prompt is computed in place."""
            return bool((await ask(client, prompt_of(next(seeds)))).kv.moved_blocks)

        await until(has_moved, "blocks have moved")
        answers = [await ask(client, prompt_of(seed)) for seed in range(4)]
    for answer in answers:
        assert answer.kv.transport == transport
        assert answer.kv.moved_blocks == answer.kv.verified_blocks > 0
        lanes = [lane.partition("/")[0] for lane in answer.kv.ucx_transports]
        assert lanes == ["posix" if transport == "nixl" else "tcp"], "a prefill worker's pool is mapped by `nixl`"
        assert not answer.kv.loan_failure
    return [answer.token_ids for answer in answers]


async def test_the_same_tokens_over_either_transport(cluster_of: Any, ask: Any, model: Path) -> None:
    over_nixl = await tokens_over(cluster_of, ask, model, "nixl")
    assert await tokens_over(cluster_of, ask, model, "ucxx") == over_nixl


@pytest.mark.skipif(any(Path("/sys/class/infiniband").glob("*")), reason="this machine has RDMA")
async def test_a_worker_that_demands_rdma_where_there_is_none_does_not_serve_over_less(
    cluster_of: Any, ask: Any, model: Path
) -> None:
    with pytest.raises(StartError, match="strict_lanes demands rdma; found none"):
        async with cluster_of(model, strict_lanes=["rdma"], **SIM):
            pytest.fail("it serves")
