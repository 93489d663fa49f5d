"""Data-parallel ranks of a mixture of experts: they step together, and are lost, drain and start again together.

TANDEM_ROUNDS=n makes n rounds of each fault. vLLM's CPU has no kernels for experts on ranks of their own, so each rank
has a part of every expert; ranks gather each other's tokens all the same.
"""

import asyncio
import os
import random
import signal
import time
from collections import defaultdict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from cluster.errors import StartError
from engine.config import WorkerConfig
from support.ports import free_port
from support.processes import (
    LENDER_ALWAYS,
    Stream,
    engine_of,
    finished,
    kill_engine,
    kill_front,
    pause,
    running,
    workers_joined,
)
from support.real_engines import engines, greedy
from support.vllm_engines import BLOCK, OPTIONS, V1, V2, ids, need_vllm, vllm_engine
from support.vllm_models import VOCAB, write_model
from tandem.client import Client
from tandem.local.local_cluster import LocalCluster, RoleProcess
from tandem.topology import plan_topology

pytestmark = [need_vllm]
ROUNDS = int(os.environ.get("TANDEM_ROUNDS", "1"))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model("qwen3_moe", tmp_path_factory.mktemp("model"))


def prompt_of(num_tokens: int) -> list[int]:
    return random.Random(num_tokens).choices(range(3, VOCAB), k=num_tokens)


def group_of(size: int) -> list[dict[str, Any]]:
    """Settings of each rank."""
    port, cores = free_port(), sorted(os.sched_getaffinity(0))
    return [
        {
            "data_parallel": size,
            "data_parallel_rank": rank,
            "data_parallel_port": port,
            "cores": (cores[rank % len(cores)],),
        }
        for rank in range(size)
    ]


@pytest.mark.parametrize(
    ("python", "sizes"), [(V1, (40, 100, 300)), pytest.param(V2, (40, 70, 75), marks=pytest.mark.long)]
)
async def test_ranks_answer_as_one_engine_does_and_lend_to_each_other(
    model: Path, python: Path, sizes: tuple[int, ...]
) -> None:
    wanted = [
        greedy(f"of {size}", prompt_of(size), 8 + 4 * number, ignore_eos=True) for number, size in enumerate(sizes)
    ]
    loan = greedy("loan", prompt_of(4 * BLOCK + 5), 6, ignore_eos=True)
    one = vllm_engine("one", model=model, vllm_python=python)
    async with engines(one):
        expected = [ids(await one.answer(each)) for each in wanted]
        expected_of_loan = ids(await one.answer(loan))
    ranks = [vllm_engine(f"rank-{n}", model=model, vllm_python=python, **of) for n, of in enumerate(group_of(2))]
    async with engines(*ranks):
        assert {rank.ready.model_fingerprint for rank in ranks} == {one.ready.model_fingerprint}
        for rank in ranks:  # the other one has no work
            assert [ids(await rank.answer(each)) for each in wanted[:1]] == expected[:1]
        answers = await asyncio.gather(
            *(
                rank.answer(each._replace(request_id=f"beside {number}", prompt=each.prompt))
                for rank, number in ((ranks[0], 1), (ranks[1], 2))
                for each in (wanted[number],)
            )
        )
        assert [ids(tokens) for tokens in answers] == expected[1:]
        moved = await ranks[1].answer(loan, ranks[0])
        account = moved[0].account
        assert (account.moved_blocks, account.mismatched_blocks, account.loan_failure) == (4, 0, "")
        assert ids(moved) == expected_of_loan
        for rank in ranks:
            assert (await rank.audited()).reserved_blocks == 0


async def test_a_rank_that_does_not_fit_says_why(model: Path, tmp_path: Path) -> None:
    """While rank 0 waits for one that does."""
    first, second = group_of(2)
    head = vllm_engine("head", model=model, vllm_python=V1, **first)
    starting = asyncio.ensure_future(head.start())
    other_options = {"vllm_options": {"max_num_seqs": 8}}
    dense = write_model("llama", tmp_path)
    try:
        for field, settings in (
            ("vllm_options", second | other_options),
            ("data_parallel", second | {"model": dense}),
        ):
            unfit = vllm_engine("unfit", vllm_python=V1, **({"model": model} | settings))
            with pytest.raises(StartError) as refused:
                await unfit.start()
            assert refused.value.field == field
            await unfit.host.stop()
        assert not starting.done()
        fit = vllm_engine("fit", model=model, vllm_python=V1, **second)
        await fit.start()
        await starting
        tokens = ids(await fit.answer(greedy("short", prompt_of(20), 4, ignore_eos=True)))
        assert len(tokens) == 4
        await fit.host.stop()
        assert "rank 1 of its data-parallel group is lost" in await head.has_ended()
    finally:
        starting.cancel()
        await head.host.stop()


# ---------------------------------------------------------------------------------------------- a cluster


class Site:
    """A router, one worker of its own, and a group of two; the group is started again after each fault."""

    def __init__(self, cluster: LocalCluster, client: Client, model: Path) -> None:
        self.cluster, self.client = cluster, client
        self._settings = common(model)
        self._ranks = group_of(2)
        self.group: list[RoleProcess] = []

    async def start_group(self) -> None:
        self.group = await asyncio.gather(
            *(
                self.cluster.add_worker(
                    "decode_worker", WorkerConfig.parse(self._settings | of | {"worker_id": f"rank-{n}"})
                )
                for n, of in enumerate(self._ranks)
            )
        )
        self.cluster.engines += [engine_of(worker) for worker in self.group]  # type: ignore[attr-defined]
        await workers_joined(self.client, 0, 3)

    async def group_ends(self) -> None:
        await asyncio.gather(*(worker.process.wait() for worker in self.group))
        for worker in self.group:
            self.cluster.decode.remove(worker)


def common(model: Path) -> dict[str, Any]:
    return {
        "model": model,
        "engine": "vllm",
        "vllm_python": V1,
        "vllm_options": OPTIONS,
        "dtype": "float32",
        "kv_memory_mib": 64,
        "max_prefill_tokens": 64,
        "peer_silence_s": 5.0,
        "drain_s": 20.0,
    }


@asynccontextmanager
async def site_of(model: Path) -> AsyncIterator[Site]:
    topology = plan_topology(
        0, 1, {"model": model, "port": 0} | LENDER_ALWAYS, common(model), [sorted(os.sched_getaffinity(0))[-1]], 1
    )
    async with running(LocalCluster(topology)) as (cluster, client):
        site = Site(cluster, client, model)
        await site.start_group()
        yield site


FAULTS = ("engine killed", "front killed", "engine stopped")


@pytest.mark.timeout(0 if ROUNDS > 1 else 900)
async def test_a_group_is_lost_as_a_whole_and_its_streams_go_on(model: Path) -> None:
    rng = random.Random(1)
    async with site_of(model) as site:
        shapes = [(n, 40 + 13 * n, 120) for n in range(6)]
        undisturbed = [
            stream.token_ids
            for stream in await finished([Stream(site.client, prompt_of(size), count) for _, size, count in shapes])
        ]
        gone: dict[str, list[float]] = defaultdict(list)
        resumed: dict[str, list[float]] = defaultdict(list)
        for number in range(len(FAULTS) * ROUNDS):
            fault = FAULTS[number % len(FAULTS)]
            streams = [
                Stream(site.client, prompt_of(size), count, cache_salt=f"{number} {n}") for n, size, count in shapes
            ]
            await asyncio.gather(*(stream.reached(5) for stream in streams))
            rank = rng.randrange(2)
            victim, other = engine_of(site.group[rank]), site.group[1 - rank]
            began_at, seen = time.monotonic(), [len(stream.token_ids) for stream in streams]
            assert min(seen) < 120
            match fault:
                case "engine killed":
                    kill_engine(site.group[rank])
                case "front killed":
                    kill_front(site.group[rank])
                case "engine stopped":
                    await pause(victim)
            await asyncio.gather(*(stream.reached(min(n + 5, 120)) for stream, n in zip(streams, seen, strict=True)))
            resumed[fault].append(time.monotonic() - began_at)
            await other.process.wait()
            gone[fault].append(time.monotonic() - began_at)
            if fault == "engine stopped":
                os.kill(victim, signal.SIGCONT)  # it finds its connection broken, and ends
            assert [stream.token_ids for stream in await finished(streams)] == undisturbed
            moved = sum(stream.receipt.placement.attempt > 1 for stream in streams)
            print(f"{fault}: {moved} of {len(streams)} streams moved; all went on after {resumed[fault][-1]:.2f} s")
            assert {s.receipt.placement.decode_worker for s in streams if s.receipt.placement.attempt > 1} == {
                "decode-0"
            }
            await site.group_ends()
            await site.start_group()
        for fault in FAULTS:
            print(
                f"{fault}: {len(gone[fault])} times; streams went on after at most {max(resumed[fault]):.2f} s, "
                f"the other rank's worker was gone after at most {max(gone[fault]):.2f} s"
            )


async def test_a_drain_is_of_the_whole_group_and_loses_nothing(model: Path) -> None:
    async with site_of(model) as site:
        shapes = [(40 + 13 * n, 150) for n in range(6)]
        streams = [Stream(site.client, prompt_of(size), count) for size, count in shapes]
        await asyncio.gather(*(stream.reached(3) for stream in streams))
        status = await site.client.cluster_status()
        (workers,) = [each.workers for each in status.models]
        groups = {worker.worker_id: (worker.group, worker.group_rank) for worker in workers if worker.group}
        assert groups.keys() == {"rank-0", "rank-1"}
        assert len({group for group, _ in groups.values()}) == 1
        assert groups["rank-1"][1] == 1
        site.group[1].process.terminate()
        await finished(streams)
        await site.group_ends()
        assert [worker.process.returncode for worker in site.group] == [0, 0]
        whole = await finished([Stream(site.client, prompt_of(size), count) for size, count in shapes])
        assert [stream.token_ids for stream in whole] == [stream.token_ids for stream in streams]
        assert {stream.receipt.placement.attempt for stream in streams} == {1}
