"""A live cluster in a drill, and the drill's result: one row for each fault that was injected.

`FAULTS` names the faults. Workers are those of the router's status; calls go to the workers themselves.
"""

import json
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from rich import box
from rich.table import Table

from cluster.errors import InvalidRequest
from protos import inference_pb2 as public_pb
from protos import membership_pb2 as pb
from tandem.client.live_workers import CALL_S, LiveWorkers
from tandem.drill.load import DrillReply

FIGURES = (
    *("streams", "lost", "wrong", "placed again", "loans failed", "mismatched blocks"),
    *("slowest TTFT", "slowest stream", "recovered after", "stranded blocks"),
)
"""Headings of the table's columns of figures."""


@dataclass(slots=True)
class FaultResult:
    """Result of one injected fault, over all streams from its injection to the recovery."""

    fault: str
    worker: str
    peer: str = ""
    """Other end of a partition."""
    streams: int = 0
    lost: int = 0
    """Streams that did not end well."""
    wrong: int = 0
    """Streams with another token than the undisturbed answer."""
    placed_again: int = 0
    """Streams that the router placed more than once."""
    loans_failed: int = 0
    """Streams whose loan ended early, or whose lender was silent for so long that they computed blocks themselves."""
    mismatched_blocks: int = 0
    """Blocks that arrived with a wrong fingerprint."""
    ttft_ratio: float = 0.0
    """Longest TTFT under the fault over the longest undisturbed one."""
    total_ratio: float = 0.0
    recovered_s: float | None = None
    """Seconds from the injection until all workers were back and a whole wave began that nothing disturbed."""
    stranded_blocks: int = 0
    """Blocks that workers without requests and loans still held afterwards."""
    busy_workers: int = 0
    """Workers whose blocks nobody can judge, since they served others during the whole check."""
    broken: list[str] = field(default_factory=list)
    """Audits that found wrong records, or failed."""
    errors: list[str] = field(default_factory=list)
    """Errors of lost streams."""

    @property
    def passed(self) -> bool:
        return not (self.lost or self.wrong or self.stranded_blocks or self.broken) and self.recovered_s is not None

    def add(self, answers: Iterable[DrillReply], expected: Sequence[list[int] | None]) -> None:
        """Count a wave; a prompt whose undisturbed answers differed has no `expected` answer and is not compared."""
        for answer, tokens in zip(answers, expected, strict=True):
            receipt = answer.receipt
            self.streams += 1
            self.placed_again += receipt.placement.attempt > 1
            self.loans_failed += bool(receipt.kv.loan_failure or receipt.kv.hedged_blocks)
            self.mismatched_blocks += receipt.kv.mismatched_blocks
            if tokens is not None:
                self.wrong += answer.token_ids != tokens[: len(answer.token_ids)]
            if answer.error is not None:
                self.lost += 1
                self.errors.append(str(answer.error))


@dataclass(slots=True)
class DrillReport:
    """Result of a drill."""

    ttft_s: float
    """Longest TTFT of an undisturbed wave."""
    total_s: float
    unstable: int
    """Prompts whose undisturbed answers differed, so that their tokens are not compared."""
    results: list[FaultResult] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        return all(result.passed for result in self.results)

    def to_json(self) -> str:
        results = [asdict(result) | {"passed": result.passed} for result in self.results]
        return json.dumps(asdict(self) | {"results": results, "passed": self.passed}, indent=2)

    def table(self) -> Table:
        table = Table("fault", "worker", box=box.SIMPLE_HEAD)
        for heading in FIGURES:
            table.add_column(heading, justify="right")
        for each in self.results:
            table.add_row(
                each.fault,
                f"{each.worker} - {each.peer}" if each.peer else each.worker,
                *map(str, (each.streams, each.lost, each.wrong, each.placed_again, each.loans_failed)),
                str(each.mismatched_blocks),
                f"x {each.ttft_ratio:.2f}",
                f"x {each.total_ratio:.2f}",
                "never" if each.recovered_s is None else f"{each.recovered_s:.1f} s",
                f"{each.stranded_blocks}" + (f" ({each.busy_workers} busy)" if each.busy_workers else ""),
            )
        return table

    def remarks(self) -> list[str]:
        """Return what the table has no room for."""
        remarks = [f"slowest undisturbed stream: {self.total_s:.2f} s; slowest TTFT: {self.ttft_s * 1e3:.0f} ms"]
        if self.unstable:
            remarks.append(f"{self.unstable} prompts are not compared: their undisturbed answers differ already")
        for each in self.results:
            errors = (*dict.fromkeys(each.errors), *each.broken)
            remarks += [f"{each.fault} of {each.worker}: {what}" for what in errors]
        return remarks


FAULTS = ("kill", "stop", "delay", "corrupt", "partition")


@dataclass(frozen=True, slots=True)
class FaultOptions:
    """Strength of faults; each fault uses the options that it has."""

    seconds: float = 3.0
    delay_ms: float = 200.0
    blocks: int = 4
    """Blocks to corrupt."""
    front: bool = False
    """Whether a stop includes the worker's front."""


class DrillCluster(LiveWorkers):
    """Workers of a cluster in a drill."""

    async def shape(self) -> Counter[str]:
        """Return the number of workers that can take work, by role."""
        return Counter(worker.role for worker in await self.workers() if not (worker.draining or worker.failing))

    async def inject(self, fault: str, worker_id: str, options: FaultOptions, peer_id: str = "") -> None:
        """Inject a fault into a worker; a partition into both of its ends.

        Raises ServiceError: InvalidRequest that names the field, Forbidden where a worker takes no faults.
        """
        if fault not in FAULTS:
            raise InvalidRequest("fault", f"unknown fault {fault!r}; known are {', '.join(FAULTS)}")
        if bool(peer_id) != (fault == "partition"):
            raise InvalidRequest("peer", "must name the other worker of a partition, and be left out for other faults")
        ends = [(await self.worker(worker_id, "worker"), peer_id)]
        if fault == "partition":
            ends.append((await self.worker(peer_id, "peer"), worker_id))
        for worker, other_id in ends:
            await self.call(worker, _injection(_request(fault, options, other_id)))

    async def audit(self, worker: public_pb.WorkerStatus) -> pb.AuditReport:
        """Return a worker's audit.

        Raises ServiceError.
        """
        return await self.call(worker, lambda stub: stub.Audit(pb.AuditRequest(), timeout=CALL_S))


def _injection(request: pb.InjectRequest) -> Callable[[Any], Awaitable[object]]:
    return lambda stub: stub.Inject(request, timeout=CALL_S)


def _request(fault: str, options: FaultOptions, peer_id: str) -> pb.InjectRequest:
    match fault:
        case "kill":
            return pb.InjectRequest(kill=pb.KillFault())
        case "stop":
            return pb.InjectRequest(stop=pb.StopFault(seconds=options.seconds, front=options.front))
        case "delay":
            return pb.InjectRequest(delay=pb.DelayFault(seconds=options.seconds, delay_ms=options.delay_ms))
        case "corrupt":
            return pb.InjectRequest(corrupt=pb.CorruptFault(blocks=options.blocks, seconds=options.seconds))
        case _:
            return pb.InjectRequest(partition=pb.PartitionFault(seconds=options.seconds, peer=peer_id))
