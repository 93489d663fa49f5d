"""Every fault of the fault trials on real processes, gRPC and NIXL, at moments drawn from a seed.

The sim engine's tokens are hashes of the KV that was read, and what it must answer is worked out here: an answer that
a fault made wrong is seen. Prompts are new, or continue what was decoded (so that the lender itself reads from a decode
worker), or come again after they were evicted (so that they come back from host memory).
TANDEM_REAL_FAULTS=n: n rounds of each fault instead of one. How soon blocks were free is printed (-s).
"""

import asyncio
import os
import signal
import time
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from cluster.errors import DeadlineExceeded, Overloaded, Unavailable
from support.cut_link import CutLink
from support.fault_rounds import BLOCK, ROUNDS, VOCAB, Asked, Memory, Rounds
from support.long_runs import mostly_long
from support.ports import free_port
from support.processes import LENDER_ALWAYS, Stream, engine_of, kill_worker, pause, report_of, until
from tandem.local.local_cluster import RoleProcess

pytestmark = pytest.mark.timeout(900 + 60 * ROUNDS)
SILENCE_S = 4.0
"""Longer than a worker is without a CPU on a busy machine."""
RETRIABLE = (Unavailable, Overloaded)
SIM: dict[str, Any] = {
    "engine": "sim",
    "sim_step_ms": 4.0,
    "max_prefill_tokens": 32,
    "kv_memory_mib": 1,
    "kv_host_memory_mib": 2,
    "peer_silence_s": SILENCE_S,
}
"""A pool of 512 blocks; a prompt of 100 blocks takes 50 steps."""
ROUTER: dict[str, Any] = LENDER_ALWAYS | {"worker_silence_s": SILENCE_S, "no_worker_grace_s": 0.5}


@pytest.fixture(scope="module")
def model(sim_model: Callable[..., Path]) -> Path:
    return sim_model(VOCAB)


async def pause_engine(worker: RoleProcess) -> list[int]:
    """The processes that were stopped."""
    engine = engine_of(worker)
    await pause(engine)
    return [engine]


async def pause_worker(worker: RoleProcess) -> list[int]:
    engine = engine_of(worker)
    await pause(worker.pid)
    await pause(engine)
    return [worker.pid, engine]


def wake(pids: list[int]) -> None:
    for pid in reversed(pids):
        os.kill(pid, signal.SIGCONT)


# ------------------------------------------------------------------------------------------ peers that die


async def test_a_lender_is_killed(model: Path, cluster_of: Any) -> None:
    """Every request is answered right, and nothing waits for the dead one."""
    rounds = Rounds("lender killed", model)
    async with rounds.on(cluster_of(model, decode=2, router=ROUTER, **SIM)) as cluster:
        for _ in rounds:
            asked = [rounds.start() for _ in range(3)]
            await rounds.moment()
            (lender,) = cluster.prefill
            kill_worker(lender)
            killed_at = time.monotonic()

            async def unlent() -> bool:
                """The dead one borrowed, too: from decode workers."""
                reports = [await report_of(worker.address) for worker in cluster.decode]
                return not any(report.loans or report.quarantined_blocks for report in reports)

            await until(unlent, "nothing is held for the dead one")
            rounds.freed_s.append(time.monotonic() - killed_at)
            for each in asked:
                assert await each.ends()
            await rounds.free(cluster.decode)
            await rounds.replace(lender, "prefill_worker")


async def test_a_borrower_is_killed(model: Path, cluster_of: Any) -> None:
    """What its lender held for it is free at once."""
    rounds = Rounds("borrower killed", model)
    async with rounds.on(cluster_of(model, router=ROUTER, **SIM)) as cluster:
        for _ in rounds:
            asked = [rounds.start() for _ in range(2)]
            await rounds.moment()
            (borrower,) = cluster.decode
            kill_worker(borrower)
            rounds.freed_s.append(await rounds.free(cluster.prefill))
            for each in asked:
                await each.ends(*RETRIABLE)
            await rounds.replace(borrower, "decode_worker")


# ------------------------------------------------------------------------------------- peers that fall silent


@pytest.mark.parametrize("who", mostly_long(["engine", "worker"], "engine"))
async def test_a_lender_is_stopped_and_wakes(who: str, model: Path, cluster_of: Any) -> None:
    """It is given up after its silence, and goes on with what it thinks it lends when it wakes."""
    rounds = Rounds(f"lender's {who} stopped", model)
    async with rounds.on(cluster_of(model, decode=2, router=ROUTER, **SIM)) as cluster:
        for _ in rounds:
            asked = [rounds.start() for _ in range(3)]
            await rounds.moment()
            stopped = await (pause_engine if who == "engine" else pause_worker)(cluster.prefill[0])
            stopped_at = time.monotonic()
            short = rounds.rng.random() < 0.3
            if short:
                await asyncio.sleep(rounds.rng.random() * 0.8 * SILENCE_S)
                wake(stopped)
            for each in asked:
                assert await each.ends()
            if not short:
                await rounds.free(cluster.decode, quarantine=True)
                rounds.freed_s.append(time.monotonic() - stopped_at)
                wake(stopped)
            await rounds.free(list(cluster.workers))
            await rounds.all_here()


@pytest.mark.parametrize("who", mostly_long(["engine", "worker"], "worker"))
async def test_a_borrower_is_stopped_and_wakes(who: str, model: Path, cluster_of: Any) -> None:
    """What is lent to it is free after the silence, and when it wakes it reads nothing that is wrong."""
    rounds = Rounds(f"borrower's {who} stopped", model)
    async with rounds.on(cluster_of(model, router=ROUTER, **SIM)) as cluster:
        for _ in rounds:
            asked = [rounds.start() for _ in range(2)]
            await rounds.moment()
            stopped = await (pause_engine if who == "engine" else pause_worker)(cluster.decode[0])
            if rounds.rng.random() < 0.3:
                await asyncio.sleep(rounds.rng.random() * 0.8 * SILENCE_S)
            else:
                rounds.freed_s.append(await rounds.free(cluster.prefill))
            wake(stopped)
            for each in asked:
                await each.ends(*RETRIABLE)
            await rounds.free(list(cluster.workers))
            await rounds.all_here()


# -------------------------------------------------------------------------------------------- clients that go


async def test_a_request_is_cancelled(model: Path, cluster_of: Any) -> None:
    """Some of them wait in the router."""
    rounds = Rounds("cancelled", model)
    async with rounds.on(cluster_of(model, decode=2, router=ROUTER, **SIM)) as cluster:
        for _ in rounds:
            asked = [rounds.start() for _ in range(10)]
            await rounds.moment(0.6)
            for each in asked:
                await each.stream.cancel()
            rounds.freed_s.append(await rounds.free(list(cluster.workers)))


async def test_a_deadline_passes(model: Path, cluster_of: Any) -> None:
    """No request outlives its deadline, nor do its blocks."""
    rounds = Rounds("deadline", model)
    hopeful = ROUTER | {"prefill_tokens_per_s": 1e6, "learn_rates": False}  # else it is refused on arrival
    async with rounds.on(cluster_of(model, decode=2, router=hopeful, **SIM)) as cluster:
        for _ in rounds:
            deadline_s = 0.02 + rounds.rng.random() * 0.5
            asked = rounds.start(timeout_s=deadline_s)
            await asked.ends(DeadlineExceeded, Overloaded)  # who is placed shortly before it is refused
            rounds.freed_s.append(await rounds.free(list(cluster.workers)))
        assert rounds.seen["Overloaded"] <= max(1, ROUNDS // 4), rounds.seen


# ----------------------------------------------------------------------------------- connections, bytes and room


@pytest.mark.parametrize("how", ["cut", "swallow"])
async def test_the_connection_to_the_lender_goes(how: str, model: Path, cluster_of: Any) -> None:
    """Cut: both ends hear of it. Swallowed: neither does, and each gives the other up after the silence."""
    rounds = Rounds(f"connection {how}", model)
    cluster = cluster_of(model, decode=2, router=ROUTER, **SIM)
    async with AsyncExitStack() as held:
        # Either engine may have called the other, so the loans of every worker go by a link.
        links = [await held.enter_async_context(link) for link in _linked(cluster)][:3]
        await held.enter_async_context(rounds.on(cluster))
        for _ in rounds:
            asked = [rounds.start() for _ in range(3)]
            await rounds.moment()
            for link in links:
                link.cut() if how == "cut" else link.swallow()
            gone_at = time.monotonic()
            for each in asked:
                assert await each.ends()
            if how == "cut":
                rounds.freed_s.append(await rounds.free(list(cluster.workers)))
            else:
                await rounds.free(list(cluster.workers))
                rounds.freed_s.append(time.monotonic() - gone_at)
                for link in links:
                    link.restore()
            rounds.seen["links cut"] = sum(link.num_cut for link in links)


def _linked(cluster: Any) -> list[CutLink]:
    """Have every worker called by links, and return them: those to the engines first, then those for routers."""
    to_engines, for_routers = [], []
    for role in ("prefill", "decode"):
        told = []
        for config in getattr(cluster.topology, role):
            ports = {name: free_port("127.0.0.1", "127.0.0.2") for name in ("port", "stream_port", "loan_port")}
            told.append(config.model_copy(update={"advertise_host": "127.0.0.2", **ports}))
            to_engines.append(CutLink("127.0.0.2", ports["loan_port"], "127.0.0.1"))
            for_routers += [CutLink("127.0.0.2", ports[name], "127.0.0.1") for name in ("port", "stream_port")]
        cluster.replace_roles(**{role: tuple(told)})
    return [*to_engines, *for_routers]


async def test_bytes_are_corrupted_after_they_were_announced(model: Path, cluster_of: Any) -> None:
    """The borrower sleeps while the lender announces everything; then a bit of what it will read flips."""
    rounds = Rounds("bytes corrupted", model)
    async with rounds.on(cluster_of(model, router=ROUTER, **SIM | {"kv_host_memory_mib": 0})) as cluster:
        borrower, lender = cluster.decode[0], cluster.prefill[0]
        memory = Memory(engine_of(lender))

        async def flips() -> bool:
            """False when nothing was lent: for a while after a loan that failed, the borrower computes itself."""
            prompt = rounds.rng.choices(range(VOCAB), k=80 * BLOCK + 1)
            asked = Asked(rounds, Stream(rounds.client, prompt, 20), prompt, 20)
            await rounds.moment(0.1)
            stopped = await pause_engine(borrower)
            for _ in range(50):
                if (await report_of(lender.address)).held_blocks >= 80:
                    break
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.05)
            block = rounds.rng.randrange(80)
            address = memory.find(rounds.model.block(prompt, block))
            if address is not None:
                address += rounds.rng.randrange(rounds.model.layout.block_bytes)
                memory.flip(address)
                rounds.seen["flipped"] += 1
            wake(stopped)
            assert await asked.ends()
            if address is not None:
                memory.flip(address)
            return address is not None

        for _ in rounds:
            while not await flips():
                pass
            rounds.freed_s.append(await rounds.free(list(cluster.workers)))
        assert ROUNDS < 10 or rounds.seen["mismatched"] > ROUNDS // 2, rounds.seen


async def test_the_pool_is_exhausted(model: Path, cluster_of: Any) -> None:
    """More than there is room for, on lenders and borrowers; output that nobody promised blocks for."""
    rounds = Rounds("pool exhausted", model)
    settings = SIM | {"reserve_output_tokens": 4}
    async with rounds.on(cluster_of(model, decode=2, router=ROUTER, **settings)) as cluster:
        for _ in rounds:
            asked = [rounds.start() for _ in range(14)]
            for each in asked:
                assert await each.ends()
            rounds.freed_s.append(await rounds.free(list(cluster.workers)))


# ------------------------------------------------------------------------------------- reads that end too late

TCP = SIM | {"sim_block_kib": 256, "kv_memory_mib": 64, "kv_host_memory_mib": 0, "sim_step_ms": 1.0}
"""Of 256 blocks. There is always something to read: a step makes half a MiB."""


@pytest.mark.parametrize("late", [False, True], ids=["delayed", "after release"])
async def test_a_read_over_tcp_stands_still(
    late: bool, model: Path, cluster_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stopped lender answers no read over TCP, and a posted one cannot be aborted. Delayed: it wakes in time, and
    the loan goes on. After release: the request has ended without it, and others are served from the same pool when the
    bytes arrive after all."""
    monkeypatch.setenv("UCX_TLS", "tcp")
    rounds = Rounds("late write" if late else "completion delayed", model, block_kib=256)
    async with rounds.on(cluster_of(model, router=ROUTER, **TCP)) as cluster:
        (lender,) = cluster.prefill
        for _ in rounds:
            asked = rounds.start()
            await rounds.moment()
            stopped = await pause_worker(lender)
            if not late:
                await asyncio.sleep(rounds.rng.random() * 0.7 * SILENCE_S)
                wake(stopped)
                assert await asked.ends()
            else:
                assert await asked.ends()
                await rounds.free(cluster.decode, quarantine=True)
                others = [rounds.start() for _ in range(3)]
                await rounds.moment()
                wake(stopped)
                for each in others:
                    assert await each.ends()
            rounds.freed_s.append(await rounds.free(list(cluster.workers)))
            await rounds.all_here()
