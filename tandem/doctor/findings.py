"""What the doctor finds. A finding that is not all right says what to do."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

Level = Literal["ok", "warning", "broken"]


@dataclass(frozen=True, slots=True)
class Finding:
    check: str
    """What was looked at, such as "memlock"."""
    level: Level
    """warning: it will work, worse than it could. broken: it will not."""
    found: str
    advice: str = ""

    def __post_init__(self) -> None:
        assert self.level == "ok" or self.advice, f"{self.check} does not say what to do"


def exit_code(findings: Iterable[Finding]) -> int:
    """0: nothing is broken; 1: something is."""
    return int(any(finding.level == "broken" for finding in findings))
