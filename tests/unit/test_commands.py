"""The command line: what is wrong with an option is one line that names it."""

import os
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from cluster.errors import Unavailable
from tandem.cli import main as cli


def _said(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], code: int = 2
) -> str:
    """Run a command and return what it wrote to standard error."""
    monkeypatch.setattr(sys, "argv", ["tandem", *arguments])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == code
    return capsys.readouterr().err


@pytest.mark.parametrize(("name", "option"), [("TANDEM_API_KEY", "--api-key"), ("TANDEM_ADDRESS", "--address")])
def test_what_no_call_can_carry(
    name: str, option: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(os.environb, name.encode(), b"b\xffd")
    said = _said(["generate", "hi"], monkeypatch, capsys)
    assert said == f"error: {option} (or {name}): must be printable ASCII\n"


@pytest.mark.parametrize(
    ("command", "option"),
    [("batch in.jsonl -o", "--out"), ("bench --json", "--json"), ("bench --log", "--log"), ("replay x --png", "--png")],
)
def test_a_file_that_cannot_be_written(
    command: str, option: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    missing = tmp_path / "no" / "x"
    said = _said([*command.split(), str(missing)], monkeypatch, capsys)
    assert said == f"error: {option}: cannot write {missing}: there is no directory {missing.parent}\n"
    said = _said([*command.split(), str(tmp_path)], monkeypatch, capsys)
    assert said == f"error: {option}: cannot write {tmp_path}: it is a directory\n"


def test_where_no_router_is_it_says_how_to_start_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def ask(*rest: object) -> None:
        last = "UNKNOWN: ipv4:127.0.0.1:1: Failed to connect to remote host: Connection refused"
        raise Unavailable(f"failed to connect to all addresses; last error: {last}")

    monkeypatch.setattr("tandem.cli.client.explain.show_decisions", ask)
    said = _said(["explain", "--request", "r", "--address", "127.0.0.1:1"], monkeypatch, capsys, 1)
    assert said.startswith("error: no router answers at 127.0.0.1:1: Connection refused. `tandem demo` or `tandem up` ")


def test_the_version_is_the_distribution_s(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["tandem", "--version"])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"tandem {version('tandem-serving')}\n"


def test_commands_are_grouped_by_what_they_are_for(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["tandem", "--help"])
    with pytest.raises(SystemExit):
        cli.main()
    page = capsys.readouterr().out
    places = [page.index(f"─ {group} ─") for group in ("Use", "Inspect", "Serve", "Size")]
    assert page.count("─ Commands ─") == 0, "every command is in a group"
    assert len(set(places)) == 4
    assert "--install-completion" in page
