"""A node of a Ray cluster that is cut off for a while: three nodes in namespaces of their own, joined by a network.

The router and the driver are on the head. One node has room for the prefill worker, both have room for decode workers.

TANDEM_ROUNDS=n makes n rounds of each outage.
"""

import asyncio
import itertools
import os
import sys
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import pytest_asyncio
import yaml

from cluster.errors import Unavailable
from support.namespaces import missing
from support.processes import LENDER_ALWAYS, Stream, finished, report_of, until
from support.ray_nodes import DEAD_AFTER_S, RayNode, RayNodes
from support.sim_directories import write_sim_model
from tandem.client import Client

pytestmark = [pytest.mark.skipif(bool(reason := missing()), reason=reason), pytest.mark.timeout(0)]
pytestmark.append(pytest.mark.asyncio(loop_scope="module"))

ROUNDS = int(os.environ.get("TANDEM_ROUNDS", "1"))
PORT = 50051
ALL = ["decode-0", "decode-1", "prefill-0"]
NOTICED_WITHIN_S = DEAD_AFTER_S + 60.0
STARTED_WITHIN_S = 300.0
FREE_WITHIN_S = 60.0
LOANS_WITHIN_S = 90.0
SHORT_S = 2.0


@dataclass
class Site:
    nodes: RayNodes
    client: Client
    output: Path
    """File of what `tandem up` prints."""
    undisturbed: list[list[int]] = field(default_factory=list)
    slowest: dict[str, float] = field(default_factory=dict)
    """Longest seconds by what was waited for."""

    @property
    def told(self) -> list[str]:
        """Lines that `tandem up` has printed."""
        return self.output.read_text(errors="replace").splitlines()

    @property
    def lender(self) -> RayNode:
        """The node with room for the prefill worker, which is the one to be cut off."""
        return self.nodes.nodes["lender"]

    @property
    def other(self) -> RayNode:
        return self.nodes.nodes["other"]

    def ask(self, seed: str) -> list[Stream]:
        """Ask for four answers of two seconds each, uncached."""
        prompts = [range(number, number + 450 + 100 * number) for number in range(4)]
        return [Stream(self.client, prompt, 200, cache_salt=f"{seed}-{prompt.start}") for prompt in prompts]

    async def answered(self, streams: list[Stream]) -> None:
        """All streams end well, with the tokens that they have without an outage."""
        for stream, expected in zip(await finished(streams), self.undisturbed, strict=True):
            assert stream.token_ids == expected

    async def workers(self) -> dict[str, str]:
        """Return the hosts of all workers that serve, by their names."""
        (model,) = (await self.client.cluster_status()).models
        serving = [worker for worker in model.workers if worker.has_reported and not worker.draining]
        return {worker.worker_id: worker.address.rpartition(":")[0] for worker in serving}

    async def loans_cross_nodes(self, after: str) -> None:
        """Answers are right, and soon all of KV that came by TCP from the other node and was verified.

        After an outage a read may wait for TCP's next retransmission, and its borrower computes instead.
        """
        began_at = time.monotonic()
        for number in itertools.count():
            streams = self.ask(f"{after}-{began_at}-{number}")
            await self.answered(streams)
            loans = [stream.receipt.kv for stream in streams]
            assert all(kv.verified_blocks == kv.moved_blocks for kv in loans)
            if all(kv.moved_blocks and list(kv.ucx_transports) == ["tcp/eth0"] for kv in loans):
                break
            assert time.monotonic() < began_at + LOANS_WITHIN_S, loans
        self.note(f"all loans cross nodes {after}", began_at)

    async def memory_is_free(self) -> None:
        (model,) = (await self.client.cluster_status()).models

        async def free() -> bool:
            reports = [await report_of(worker.address) for worker in model.workers]
            assert not any(report.fault for report in reports)
            return not any(r.held_blocks or r.reserved_blocks or r.quarantined_blocks for r in reports)

        await until(free, "no worker holds a block", FREE_WITHIN_S)

    async def reach(self, workers: dict[str, str], what: str, timeout_s: float) -> None:
        """Wait until exactly these workers serve on these hosts."""
        began_at = time.monotonic()

        async def there() -> bool:
            return await self.workers() == workers

        await until(there, what, timeout_s)
        self.note(what, began_at)

    def note(self, what: str, since: float) -> None:
        self.slowest[what] = max(self.slowest.get(what, 0.0), time.monotonic() - since)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def site(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Site]:
    folder = tmp_path_factory.mktemp("nodes")
    settings = {
        "models": [{"path": str(write_sim_model(folder / "simulated", 1000)), "prefill": 1, "decode": 2}],
        "router": LENDER_ALWAYS,
        "worker": {"engine": "sim", "sim_step_ms": 10.0, "kv_memory_mib": 16},
        "ray": {"prefill": {"resources": {"lending": 1}}, "decode": {"resources": {"decoding": 1}}},
    }
    (folder / "cluster.yaml").write_text(yaml.safe_dump(settings))
    room = {"lender": {"lending": 1, "decoding": 2}, "other": {"decoding": 2}}
    async with RayNodes(room) as nodes:
        options = ("--config", str(folder / "cluster.yaml"), "--port", str(PORT), "--no-http")
        output = folder / "up.log"  # no pipe: what is left of a driver that is killed would keep it open
        with output.open("wb") as file:
            up = await asyncio.create_subprocess_exec(
                *nodes.head.inside("tandem", "up", *options),
                env=nodes.head.environment | {"PYTHONUNBUFFERED": "1", "COLUMNS": "500"},
                stdout=file,
                stderr=file,
            )
        try:
            async with Client(f"{nodes.head.ip}:{PORT}") as client:
                yield await _undisturbed(Site(nodes, client, output))
            await nodes.head.run("tandem", "down")
            assert await up.wait() == 0
        finally:
            if up.returncode is None:
                up.kill()
                await up.wait()
            sys.stderr.write(output.read_text(errors="replace"))


async def _undisturbed(site: Site) -> Site:
    """Wait until all is there, and note the answers without an outage."""

    async def there() -> bool:
        try:
            return sorted(await site.workers()) == ALL
        except Unavailable:
            return False

    await until(there, "the cluster serves", 300)
    site.undisturbed = [stream.token_ids for stream in await finished(site.ask("undisturbed"))]
    return site


def unplug(node: RayNode, others: list[RayNode]) -> Callable[[], None]:
    """Unplug the node's cable; return what plugs it in."""
    node.namespace.set_up(False)
    return lambda: node.namespace.set_up(True)


def deafen(node: RayNode, others: list[RayNode]) -> Callable[[], None]:
    """Drop all that comes to the node from others; return what ends that."""
    node.namespace.drop_from([other.ip for other in others])
    return lambda: node.namespace.drop_from([])


def cut(site: Site, number: int) -> Callable[[], None]:
    """Cut the lender's node off, in one of two ways; return what ends the outage."""
    return (unplug, deafen)[number % 2](site.lender, [site.nodes.head, site.other])


async def on_both_nodes(site: Site) -> dict[str, str]:
    """Let each node have a decode worker, as at the beginning; return the workers' hosts."""
    if site.lender.ip not in {host for name, host in (await site.workers()).items() if name.startswith("decode")}:
        await site.nodes.head.run("tandem", "scale", "decode=1")
        await site.nodes.head.run("tandem", "scale", "decode=2")
    workers = await site.workers()
    assert sorted(workers) == ALL
    assert workers["prefill-0"] == site.lender.ip
    assert {workers["decode-0"], workers["decode-1"]} == {site.lender.ip, site.other.ip}
    return workers


async def long_outage(site: Site, number: int) -> None:
    """Cut a node off until Ray declares it dead: its decode worker moves, its prefill worker waits for the node."""
    workers = await on_both_nodes(site)
    (moving,) = [name for name in workers if name.startswith("decode") and workers[name] == site.lender.ip]
    streams = site.ask(f"long-{number}")
    await asyncio.gather(*(stream.reached(5) for stream in streams))
    begun, cut_at = len(site.told), time.monotonic()
    heal = cut(site, number)

    async def noticed() -> bool:
        told = site.told[begun:]
        return all(any(f"{name}: its actor died" in line for line in told) for name in (moving, "prefill-0"))

    await until(noticed, "the supervisor knows of the lost workers", NOTICED_WITHIN_S)
    site.note("the supervisor knows of the lost workers", cut_at)
    await site.answered(streams)
    elsewhere = {"decode-0": site.other.ip, "decode-1": site.other.ip}
    await site.reach(elsewhere, "the decode worker runs on the other node", STARTED_WITHIN_S)
    await site.answered(site.ask(f"without-{number}"))
    assert any("prefill-0: waiting for room" in line for line in site.told[begun:])

    streams, healed_at = site.ask(f"healed-{number}"), time.monotonic()
    heal()  # the dead node's workers join again, until their raylet hears that it is dead

    await until(
        lambda: not any(site.lender.runs(each) for each in ("raylet/raylet", "RoleActor", "engine.process")),
        "the lost node's processes have ended",
    )
    site.note("the lost node's processes have ended", healed_at)
    await site.answered(streams)
    await site.lender.start_ray_again(site.nodes.head)
    back = elsewhere | {"prefill-0": site.lender.ip}
    await site.reach(back, "the prefill worker is back with its node", STARTED_WITHIN_S)


async def short_outage(site: Site, number: int) -> None:
    """Cut the lender off for less than Ray's limit while its loans are read: the same workers go on."""
    workers, begun = await site.workers(), len(site.told)
    streams = site.ask(f"short-{number}")
    await streams[0].reached(1)
    heal = cut(site, number + 1)
    await asyncio.sleep(SHORT_S)
    heal()
    healed_at = time.monotonic()
    await site.answered(streams)
    site.note("answers are complete after a short outage", healed_at)
    assert await site.workers() == workers
    assert not any("starting it again" in line for line in site.told[begun:])


async def test_a_node_is_cut_off_and_comes_back_and_no_request_is_lost(site: Site) -> None:
    for number in range(ROUNDS):
        await long_outage(site, number)
        await site.loans_cross_nodes("after a long outage")
        await short_outage(site, number)
        await site.loans_cross_nodes("after a short outage")
        await site.memory_is_free()
    print("".join(f"\n{what}: {seconds:.1f} s" for what, seconds in site.slowest.items()))
