"""Result of a drill: one row for each fault that was injected."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field

from rich import box
from rich.table import Table

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
