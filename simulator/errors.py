"""What a user of the simulator can get wrong."""

from pathlib import Path

from cluster.errors import StartError, TandemError


class BadTrace(TandemError):
    """`line` of a trace, counted from 1, is not what its format says; 0: the file as a whole."""

    def __init__(self, path: Path, line: int, reason: str) -> None:
        super().__init__(f"{path}, line {line}: {reason}" if line else f"{path}: {reason}")
        self.path = path
        self.line = line
        self.reason = reason


class BadSetup(StartError):
    """An option is at fault, or does not go with the others."""
