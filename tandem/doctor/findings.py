"""Findings of the doctor.

Every finding but an "ok" one says what to do.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

Level = Literal["ok", "warning", "broken"]


@dataclass(frozen=True, slots=True)
class Finding:
    check: str
    """Name of the check, such as "memlock"."""
    level: Level
    """Level. warning: it works, worse than it could. broken: it does not work."""
    found: str
    advice: str = ""

    def __post_init__(self) -> None:
        assert self.level == "ok" or self.advice, f"{self.check} does not say what to do"


def exit_code(findings: Iterable[Finding]) -> int:
    """Return 0 when nothing is broken, else 1."""
    return int(any(finding.level == "broken" for finding in findings))
