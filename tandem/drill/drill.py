"""The drill: faults one after another while streams run."""

import asyncio
import random
import statistics
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from cluster.errors import InvalidRequest, ServiceError, Unavailable
from cluster.process.tasks import Tasks
from protos import inference_pb2 as public_pb
from protos import membership_pb2 as pb
from tandem.drill.load import DrillLoad, DrillReply
from tandem.drill.report import FAULTS, DrillCluster, DrillReport, FaultOptions, FaultResult

SETTLE_S = 10.0
"""Longest wait for workers to hold nothing after a fault, in seconds."""
UNDISTURBED_WAVES = 3
EARLIEST, LATEST = 0.1, 0.6
"""Moments of an injection, as parts of an undisturbed stream's time."""
BEFORE_TOKENS = ("stop", "delay", "corrupt", "partition")
"""Faults that strike before the first tokens, while there are loans."""


@dataclass(frozen=True, slots=True)
class DrillPlan:
    """Plan of a drill."""

    faults: Sequence[str] = FAULTS
    rounds: int = 1
    options: FaultOptions = field(default_factory=FaultOptions)
    worker: str = ""
    """Worker that gets all faults; empty: workers in turns."""
    peer: str = ""
    """Other end of partitions; empty: a prefill worker where there is one."""
    recovery_s: float = 120.0
    """Seconds after which a cluster counts as not recovered, which ends the drill."""
    seed: int = 0
    """Seed of the moments."""

    def __post_init__(self) -> None:
        for fault in self.faults:
            if fault not in FAULTS:
                raise InvalidRequest("drill", f"unknown fault {fault!r}; known are all, {', '.join(FAULTS)}")
        if self.rounds < 1:
            raise InvalidRequest("rounds", f"must be at least 1, not {self.rounds}")
        if not self.recovery_s > 0:
            raise InvalidRequest("recovery_s", f"must be above 0, not {self.recovery_s:g}")


class Drill:
    """A drill of one cluster under one load."""

    def __init__(
        self, cluster: DrillCluster, load: DrillLoad, plan: DrillPlan, tell: Callable[[str], object] = lambda _: None
    ) -> None:
        """Create it; `tell` gets a line before each step."""
        self._cluster = cluster
        self._load = load
        self._plan = plan
        self._tell = tell
        self._rng = random.Random(plan.seed)
        self._shape = Counter[str]()
        self._expected: list[list[int] | None] = []

    async def run(self) -> DrillReport:
        """Run all rounds, and end early where the cluster does not recover.

        Raises ServiceError where the drill cannot begin or a fault is refused.
        """
        self._shape = await self._cluster.shape()
        self._tell("undisturbed streams")
        report = await self._undisturbed()
        for number in range(self._plan.rounds):
            for fault in self._plan.faults:
                report.results.append(await self._strike(fault, number, report))
                if report.results[-1].recovered_s is None:
                    return report
        return report

    async def _undisturbed(self) -> DrillReport:
        """Run some waves, which must answer alike: the first warms the cluster up, the others are measured.

        Raises the error of a stream.
        """
        waves = [await self._load.wave() for _ in range(UNDISTURBED_WAVES)]
        for answers in zip(*waves, strict=True):
            for answer in answers:
                if answer.error is not None:
                    raise answer.error
            first = answers[0].token_ids
            self._expected.append(first if all(answer.token_ids == first for answer in answers) else None)
        slowest = [_slowest(wave) for wave in waves[1:]]
        ttft_s, total_s = map(statistics.fmean, zip(*slowest, strict=True))
        return DrillReport(ttft_s, total_s, self._expected.count(None))

    async def _strike(self, fault: str, number: int, undisturbed: DrillReport) -> FaultResult:
        worker, peer = await self._ends(fault, number)
        result = FaultResult(fault, worker, peer)
        self._tell(f"{fault} of {worker}" + (f" from {peer}" if peer else ""))
        async with Tasks() as tasks:
            wave = tasks.spawn(self._load.wave())
            span_s = undisturbed.ttft_s if fault in BEFORE_TOKENS else undisturbed.total_s
            await asyncio.sleep(self._rng.uniform(EARLIEST, LATEST) * span_s)
            await self._cluster.inject(fault, worker, self._plan.options, peer)
            struck_at = time.monotonic()
            struck = await wave
        result.add(struck, self._expected)
        lasts_s = 0.0 if fault == "kill" else self._plan.options.seconds
        while result.recovered_s is None and (began_at := time.monotonic()) < struck_at + self._plan.recovery_s:
            is_whole = began_at >= struck_at + lasts_s and await self._is_whole()
            answers = await self._load.wave()
            result.add(answers, self._expected)
            if is_whole and all(answer.is_undisturbed for answer in answers):
                result.recovered_s = began_at - struck_at
            else:
                struck += answers
        ttft_s, total_s = _slowest(struck)
        result.ttft_ratio, result.total_ratio = ttft_s / undisturbed.ttft_s, total_s / undisturbed.total_s
        await self._audit(result)
        return result

    async def _ends(self, fault: str, number: int) -> tuple[str, str]:
        """Return the worker of a round's fault, and the other end of a partition.

        Raises InvalidRequest where there are none.
        """
        workers = await self._cluster.workers()
        decode = [worker.worker_id for worker in workers if worker.role == "decode"]
        prefill = [worker.worker_id for worker in workers if worker.role == "prefill"]
        # Corrupt bytes arrive at borrowers; a stopped engine is most telling at a lender.
        orders = {"corrupt": decode, "partition": decode, "stop": prefill + decode}
        candidates = [self._plan.worker] if self._plan.worker else orders.get(fault, decode + prefill)
        if not candidates:
            raise InvalidRequest("worker", f"no worker is running for the fault {fault}")
        worker = candidates[number % len(candidates)]
        if fault != "partition":
            return worker, ""
        others = [self._plan.peer] if self._plan.peer else [other for other in prefill if other != worker]
        others = others or [other for other in decode if other != worker]
        if not others:
            raise InvalidRequest("peer", f"no worker is running beside {worker!r}")
        return worker, others[number % len(others)]

    async def _is_whole(self) -> bool:
        """Return whether as many workers of each role take work as at the start."""
        try:
            return await self._cluster.shape() == self._shape
        except Unavailable:
            return False

    async def _audit(self, result: FaultResult) -> None:
        """Look for blocks that nothing accounts for, until there are none or `SETTLE_S` has passed."""
        give_up_at = time.monotonic() + SETTLE_S
        while True:
            audits = [await self._audit_of(worker) for worker in await self._cluster.workers()]
            idle = [audit for audit in audits if not (audit.requests or audit.loans)]
            held = [audit.held_blocks + audit.reserved_blocks + audit.quarantined_blocks for audit in idle]
            result.stranded_blocks = sum(held)
            result.busy_workers = len(audits) - len(idle)
            result.broken = [f"{audit.worker_id}: {audit.fault}" for audit in audits if audit.fault]
            is_clean = not (result.stranded_blocks or result.busy_workers or result.broken)
            if is_clean or time.monotonic() > give_up_at:
                return
            await asyncio.sleep(0.1)

    async def _audit_of(self, worker: public_pb.WorkerStatus) -> pb.AuditReport:
        try:
            return await self._cluster.audit(worker)
        except ServiceError as error:
            return pb.AuditReport(worker_id=worker.worker_id, fault=f"no audit: {error}")


def _slowest(answers: Sequence[DrillReply]) -> tuple[float, float]:
    """Return the longest TTFT and the longest total time."""
    return max(answer.ttft_s for answer in answers), max(answer.total_s for answer in answers)
