"""Report of the doctor's findings, as tables and as JSON."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from tandem.doctor.hosts import HostReport, PairResult
from tandem.doctor.machine import Finding, Machine, exit_code

STYLES = {"ok": "green", "warning": "yellow", "broken": "bold red"}


def as_json(
    machine: Machine, findings: Sequence[Finding], pairs: Sequence[PairResult], others: Sequence[HostReport] = ()
) -> dict[str, Any]:
    """Return all findings as JSON: `exit_code`, `findings`, `pairs`, `machine`, and `hosts` for the other hosts."""
    return {
        "exit_code": exit_code([*findings, *(finding for host in others for finding in host.findings)]),
        "findings": [asdict(finding) for finding in findings],
        "pairs": [asdict(pair) for pair in pairs],
        "machine": asdict(machine),
        "hosts": [asdict(host) for host in others],
    }


def show(
    console: Console, findings: Sequence[Finding], pairs: Sequence[PairResult], others: Sequence[HostReport] = ()
) -> None:
    """Print the findings of each host, then the matrix."""
    for host in others:
        console.print(_table(f"{host.address} ({host.name})", host.findings))
    console.print(_table("this host", findings))
    if pairs:
        console.print(matrix(pairs))


def _table(title: str, findings: Sequence[Finding]) -> Table:
    table = Table(title=title, title_justify="left")
    for heading in ("check", "", "found", "what to do"):
        table.add_column(heading, overflow="fold")
    for finding in findings:
        level = Text(finding.level, style=STYLES[finding.level])
        table.add_row(finding.check, level, Text(finding.found), Text(finding.advice))
    return table


def matrix(pairs: Sequence[PairResult]) -> Table:
    """Return the table of GB/s and lanes: readers down, lenders across."""
    names = list(dict.fromkeys(pair.reader for pair in pairs))
    by_names = {(pair.reader, pair.lender): pair for pair in pairs}
    table = Table(title="GB/s, readers down, lenders across", title_justify="left")
    table.add_column("")
    for name in names:
        table.add_column(name, justify="right")
    for reader in names:
        table.add_row(reader, *(_cell(by_names.get((reader, lender))) for lender in names))
    return table


def _cell(pair: PairResult | None) -> Text:
    if pair is None:
        return Text("")
    if pair.error or pair.gigabytes_per_s is None:
        return Text("failed", style=STYLES["broken"])
    if pair.first_wrong_byte is not None:
        return Text("WRONG BYTES", style=STYLES["broken"])
    return Text(f"{pair.gigabytes_per_s:.2f}\n{', '.join(pair.lanes)}")
