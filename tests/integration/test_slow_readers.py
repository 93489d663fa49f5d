"""Clients of gRPC that stop reading cost the router bounded memory, and nobody else their time."""

import asyncio
import itertools
import os
from pathlib import Path
from typing import Any

from cluster.network.rpc import media_channel
from conftest import Ask
from protos import inference_pb2 as pb
from protos import inference_pb2_grpc as pb_grpc
from support.openai_http import http_cluster
from support.processes import report_of
from support.sim_directories import write_sim_model, write_tokenizer
from tandem.client import Client
from tandem.local.local_cluster import LocalCluster

VOCAB = 600
NUM_SILENT = 8
MAX_TOKENS = 2_000
PACE = {"sim_step_ms": 2.0}
"""Or the worker would lag behind its engine, whoever reads."""
WORD = "x" * 8000
"""What tokens of the vocabulary end in, but for the 256 that are bytes."""
ANSWER_BYTES = MAX_TOKENS * len(WORD) // 2
"""At least."""
MAX_GROWTH = 40 << 20
"""Of the router: as much of each answer as waits on its way. All the answers together are 70 MB."""


def rss_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def cluster_of(folder: Path) -> LocalCluster:
    model = write_sim_model(folder / "simulated", VOCAB)
    write_tokenizer(model, VOCAB, WORD)
    return http_cluster(
        model, 1, {"default_deadline_s": 120.0}, engine="sim", kv_memory_mib=64, sim_reads="last", **PACE
    )


async def _all_go_on(cluster: LocalCluster, ask: Ask) -> int:
    """While others do not read: how much the router has grown when their answers are computed."""
    before = rss_of(cluster.router.pid)
    (worker,) = cluster.decode
    async with Client(cluster.address) as client:
        for number in itertools.count():
            await ask(client, list(range(1, 40)), cache_salt=f"{number}")
            if not (await report_of(worker.address)).requests:
                print("GROWN", number, (rss_of(cluster.router.pid) - before) / 2**20)
                return rss_of(cluster.router.pid) - before
            assert number < 1000
            await asyncio.sleep(0.1)
    raise AssertionError("it counts for ever")


async def test_by_grpc(tmp_path: Path, ask: Ask, audit: Any) -> None:
    assert NUM_SILENT * ANSWER_BYTES > MAX_GROWTH
    async with cluster_of(tmp_path) as cluster:
        async with Client(cluster.address) as warm:
            await ask(warm, [1, 2, 3])
        sampling = pb.Sampling(max_tokens=MAX_TOKENS, ignore_eos=True)
        async with media_channel(cluster.address) as link:
            stub: pb_grpc.InferenceAsyncStub = pb_grpc.InferenceStub(link)  # type: ignore[assignment]
            calls = [
                stub.Generate(pb.GenerateRequest(token_ids=[1, 2, n], sampling=sampling)) for n in range(NUM_SILENT)
            ]
            for call in calls:
                assert await anext(aiter(call))  # one message, and then no more
            assert await _all_go_on(cluster, ask) < MAX_GROWTH
            rest = [message async for message in calls[0]]
            num_bytes = sum(message.ByteSize() for message in rest)
            assert num_bytes > ANSWER_BYTES / 2, "who reads on gets all of it"
            assert rest[-1].HasField("finish")
            for call in calls[1:]:
                call.cancel()
        await audit([worker.address for worker in cluster.workers])
