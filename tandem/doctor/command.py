"""The command `tandem doctor`, and its report as tables and as JSON."""

import asyncio
import json
import os
import socket
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from cluster.errors import StartError
from cluster.network.tls import member_of
from engine.config import WorkerConfig
from engine.model.hub import CONFIG_FILES, fetch
from engine.model.model_dir import ModelDir
from kvtransfer.errors import TransportUnavailable
from kvtransfer.registry import check_transport
from tandem.doctor.checks import check_all
from tandem.doctor.hosts import (
    PATTERN_BYTES,
    PEER_COMMAND,
    DoctorService,
    HostLink,
    HostReport,
    PairResult,
    Peer,
    judge_pairs,
    listen,
    measure_pairs,
    plan_peers,
    start_peers,
)
from tandem.doctor.machine import Finding, Machine, exit_code, read_machine
from tandem.doctor.peer import PeerGone, PeerSpec

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


MAX_WORKERS = 16
LOOPBACK = "127.0.0.1"


def run_doctor(
    console: Console,
    settings: dict[str, Any],
    model: Path | None,
    workers: int,
    print_json: bool,
    others: Sequence[str] = (),
) -> int:
    """Run the doctor with a worker's settings; return the exit code.

    Raises StartError when it cannot begin.

    `others`: addresses of hosts that listen.
    """
    least = 1 if others else 2
    if not least <= workers <= MAX_WORKERS:
        raise StartError("workers", f"must be 2 to {MAX_WORKERS}, not {workers}")
    if others and settings.get("host", LOOPBACK) == LOOPBACK:
        settings = settings | {"host": _address_toward(others[0])}
    config, machine = _settled(settings, model)
    try:
        check_transport(config.transport)
    except TransportUnavailable as error:
        raise StartError("transport", str(error)) from None
    findings = check_all(machine, config, workers, os.environ, alone=not others)
    reports, pairs, unreached = asyncio.run(_examine(config, machine, workers, others))
    findings += [each.judge_clock() for each in reports] + unreached + judge_pairs(pairs, machine, config)
    if print_json:
        print(json.dumps(as_json(machine, findings, pairs, reports), indent=2))
    else:
        show(console, findings, pairs, reports)
    return exit_code([*findings, *(finding for each in reports for finding in each.findings)])


def listen_for_doctor(console: Console, settings: dict[str, Any], model: Path | None, port: int) -> None:
    """Lend a peer to a doctor of another host until interrupted.

    Raises StartError.
    """
    if settings.get("host", LOOPBACK) == LOOPBACK:
        settings = settings | {"host": "0.0.0.0"}
    config, machine = _settled(settings, model)
    findings = check_all(machine, config, 1, os.environ, alone=False)

    def spec(seed: int, num_bytes: int, asker: str) -> PeerSpec:
        here = config.advertise_host or _address_toward(asker)
        known = config.model_copy(update={"advertise_host": here})
        (planned,) = plan_peers(known, 1, _on_gpu(machine, config), num_bytes, seed)
        return planned

    def say(address: str) -> None:
        named = address.replace("0.0.0.0", socket.gethostname())
        console.print(f"listening at {address}; elsewhere: tandem doctor --peer {named}", soft_wrap=True)

    async def serve() -> None:
        service = DoctorService(findings, spec, PEER_COMMAND)
        await listen(service, member_of(config), config.host, port, say)

    asyncio.run(serve())


async def _examine(
    config: WorkerConfig, machine: Machine, workers: int, others: Sequence[str]
) -> tuple[list[HostReport], list[PairResult], list[Finding]]:
    """Return other hosts' reports, the results of the pairs, and findings about unreachable hosts."""
    reports: list[HostReport] = []
    unreached: list[Finding] = []
    async with AsyncExitStack() as stack:
        peers = await start_peers(stack, plan_peers(config, workers, _on_gpu(machine, config)))
        for number, address in enumerate(others, start=workers + 1):
            link = HostLink(address, member_of(config))
            stack.push_async_callback(link.stop)
            try:
                reports.append(await link.examine(number, PATTERN_BYTES))
            except PeerGone as error:
                advice = "is `tandem doctor --listen PORT` running there, with the same certificates?"
                unreached.append(Finding("hosts", "broken", str(error), advice))
                continue
            peers.append(Peer(address, number, link, elsewhere=True))
        return reports, await measure_pairs(peers), unreached


def _config(settings: dict[str, Any], model: Path | None) -> WorkerConfig:
    if model is not None:
        ModelDir.open(fetch(model, CONFIG_FILES))
    return WorkerConfig.parse({"model": model or Path()} | settings)


def _settled(settings: dict[str, Any], model: Path | None) -> tuple[WorkerConfig, Machine]:
    config = _config(settings, model)
    return config, read_machine(config)


def _on_gpu(machine: Machine, config: WorkerConfig) -> bool:
    return bool(machine.torch_gpus) and config.kind.may_use_gpu


def _address_toward(other: str) -> str:
    """Return this host's address as seen from another one.

    Raises StartError.
    """
    name, _, port = other.rpartition(":")
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((name, int(port)))
            address: str = probe.getsockname()[0]
            return address
    except (OSError, ValueError) as error:
        raise StartError("peer", f"{other!r} is not a HOST:PORT that can be reached: {error}") from None
