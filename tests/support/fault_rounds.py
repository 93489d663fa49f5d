"""Faults again and again on real processes, and what must come of the requests under way: for test_real_faults.py."""

import asyncio
import os
import random
import statistics
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from cluster.errors import ServiceError
from support.processes import PATIENCE_S, Stream, engine_of, report_of, running, until
from support.sim_cluster_model import SimClusterModel
from tandem.client import Client
from tandem.local.local_cluster import LocalCluster, RoleProcess

ROUNDS = int(os.environ.get("TANDEM_REAL_FAULTS", "1"))
VOCAB = 600
BLOCK = 16


class Rounds:
    """One fault, again and again, and what came of it."""

    def __init__(self, fault: str, model: Path, **layout: int) -> None:
        self.fault = fault
        self.rng = random.Random(fault)
        self.model = SimClusterModel(model, **layout)
        self.seen: Counter[str] = Counter()
        self.freed_s: list[float] = []
        self.cluster: LocalCluster
        self.client: Client
        self.told: list[tuple[list[int], list[int]]] = []
        """Prompts and their answers."""

    def __iter__(self) -> Any:
        yield from range(ROUNDS)
        freed = sorted(self.freed_s)
        line = f"free after median {statistics.median(freed):.3f} s, at most {freed[-1]:.3f} s" if freed else ""
        print(f"\n{self.fault}: {ROUNDS} real; {dict(self.seen)}; {line}")

    def prompt(self) -> list[int]:
        """New, evicted or continued."""
        rng = self.rng
        kind = rng.choice(["new", "new", "again", "continued"])
        if kind == "again" and len(self.told) > 6:
            return rng.choice(self.told[:-6])[0]
        if kind == "continued" and self.told:
            prompt, answer = self.told[-1]
            return [*prompt, *answer, *rng.choices(range(VOCAB), k=30 * BLOCK)][: 150 * BLOCK]
        return rng.choices(range(VOCAB), k=rng.randint(40, 110) * BLOCK + rng.randint(1, BLOCK))

    def start(self, timeout_s: float = 120.0) -> "Asked":
        prompt, max_tokens = self.prompt(), self.rng.randint(8, 4 * BLOCK)
        return Asked(self, Stream(self.client, prompt, max_tokens, timeout_s=timeout_s), prompt, max_tokens)

    async def moment(self, longest_s: float = 0.4) -> None:
        await asyncio.sleep(self.rng.random() * longest_s)

    async def free(self, workers: list[RoleProcess], quarantine: bool = False) -> float:
        """Wait until these hold nothing, or nothing but a `quarantine` of one window; how long that took."""
        began = time.monotonic()
        while True:
            reports = [await report_of(worker.address) for worker in workers]
            assert not any(report.fault for report in reports), reports
            held = [(r.held_blocks, r.reserved_blocks, r.requests, r.loans) for r in reports]
            if all(books == (0, 0, 0, 0) for books in held) and (
                quarantine or not any(report.quarantined_blocks for report in reports)
            ):
                self.seen["quarantined"] += any(report.quarantined_blocks for report in reports)
                return time.monotonic() - began
            assert time.monotonic() - began < PATIENCE_S, f"still held: {reports}"
            await asyncio.sleep(0.005)

    @asynccontextmanager
    async def on(self, cluster: LocalCluster) -> AsyncIterator[LocalCluster]:
        async with running(cluster) as (self.cluster, self.client):
            yield self.cluster

    async def replace(self, worker: RoleProcess, role: str) -> None:
        """Start another one in the place of a dead one."""
        await worker.process.wait()
        workers = self.cluster.decode if role == "decode_worker" else self.cluster.prefill
        workers.remove(worker)
        (config,) = [c for _, c in self.cluster.topology.workers() if c.worker_id == worker.name]
        started = await self.cluster.add_worker(role, config)
        self.cluster.engines.append(engine_of(started))  # type: ignore[attr-defined]
        await self.all_here()

    async def all_here(self) -> None:
        topology = self.cluster.topology

        async def here() -> bool:
            (served,) = await self.client.list_models()
            return (served.prefill_workers, served.decode_workers) == (len(topology.prefill), len(topology.decode))

        await until(here, "every worker has joined")


class Asked:
    """A request under way, and what it must answer."""

    def __init__(self, rounds: Rounds, stream: Stream, prompt: list[int], max_tokens: int) -> None:
        self.stream = stream
        self._rounds = rounds
        self._prompt = prompt
        self._expected = rounds.model.answer(prompt, max_tokens)

    async def ends(self, *errors: type[ServiceError]) -> bool:
        """Right, or with one of these errors; True when right. What came before an error is right too."""
        seen = self._rounds.seen
        try:
            await self.stream.task
        except errors as error:
            seen[type(error).__name__] += 1
            assert self.stream.token_ids == self._expected[: len(self.stream.token_ids)], "a wrong token"
            return False
        assert self.stream.token_ids == self._expected, "a wrong token"
        self._rounds.told.append((self._prompt, self._expected))
        kv = self.stream.receipt.kv
        seen["right"] += 1
        seen["loan failed"] += bool(kv.loan_failure)
        seen["loan whole"] += bool(kv.moved_blocks) and not kv.loan_failure
        seen["lender fetched"] += bool(kv.lender_fetched_blocks)
        seen["restored"] += bool(kv.restored_blocks)
        seen["mismatched"] += bool(kv.mismatched_blocks)
        seen["attempts"] += self.stream.receipt.placement.attempt
        return True


class Memory:
    """Another process's."""

    def __init__(self, pid: int) -> None:
        self._pid = pid

    def find(self, content: bytes) -> int | None:
        """Where these bytes lie in what it has mapped for itself."""
        with open(f"/proc/{self._pid}/mem", "rb", buffering=0) as memory:
            for line in Path(f"/proc/{self._pid}/maps").read_text().splitlines():
                span, flags, _, _, inode, *_ = line.split()
                first, end = (int(part, 16) for part in span.split("-"))
                if not flags.startswith("rw") or (inode != "0" and "memfd:tandem-kv" not in line):
                    continue
                if not len(content) <= end - first <= 1 << 27:
                    continue
                memory.seek(first)
                at = (memory.read(end - first) or b"").find(content)
                if at >= 0:
                    return first + at
        return None

    def flip(self, address: int) -> None:
        """One bit."""
        with open(f"/proc/{self._pid}/mem", "r+b", buffering=0) as memory:
            memory.seek(address)
            (byte,) = memory.read(1)
            memory.seek(address)
            memory.write(bytes([byte ^ 16]))
