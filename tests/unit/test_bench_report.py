"""The end of every benchmark."""

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from bench.support.report import Bar, Parts, conclude


async def test_a_part_that_fails_takes_no_others_figures_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    said = io.StringIO()
    console = Console(file=said, width=120)
    parts = Parts(console)

    async def well() -> float:
        return 2.0

    async def badly() -> float:
        raise TimeoutError("too slow")

    await parts.measure("slow", badly())
    await parts.measure("fast", well())
    assert parts.figures == {"fast": 2.0}
    conclude("two", [Bar("fast", 2.0, 1.0, at_least=True)], parts.figures, console, parts.failed)
    assert said.getvalue().splitlines()[-1] == "bars: 1 of 2 met"
    assert "slow failed: TimeoutError: too slow" in said.getvalue()
    written = json.loads((tmp_path / ".bench" / "two.json").read_text())
    assert (written["figures"], written["failed"]) == ({"fast": 2.0}, {"slow": "TimeoutError: too slow"})
