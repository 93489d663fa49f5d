"""Faults that only a network has, between pods with namespaces of their own: Redis, two routers, two prefill and two
decode workers and the planner, started by the rendered chart.

TANDEM_ROUNDS=n makes n rounds of each fault.
"""

import asyncio
import json
import os
import random
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

import pytest
import pytest_asyncio

from protos import membership_pb2
from support.chart import needs_helm
from support.chart_pods import TOKEN, NamespacedPods, Pod, all_ready, started
from support.namespaces import Namespaces, missing
from support.processes import Stream, finished, report_of, until
from support.scale_api import ScaleApi
from tandem.client import Client

pytestmark = [needs_helm, pytest.mark.skipif(bool(reason := missing()), reason=reason), pytest.mark.timeout(0)]

ROUNDS = int(os.environ.get("TANDEM_ROUNDS", "1"))
PREFILL, DECODE = "demo-simulated-prefill", "demo-simulated-decode"
WANTED = [(random.Random(seed).choices(range(1000), k=1200 + 300 * seed), 60) for seed in range(6)]
"""Prompts, and how many tokens each is to be continued by."""
FREE_WITHIN_S = 60.0
QUIET_WITHIN_S = 90.0
"""Longest time until quarantined blocks are free. A read over TCP that an outage of 10 s interrupts goes on with the
kernel's next retransmission, whose pause doubles each time: up to 10 s after the outage, and a neighbour to find."""


@dataclass
class Site:
    pods: NamespacedPods
    clients: list[Client]
    """One of each router."""
    undisturbed: list[list[int]]
    slowest: dict[str, float] = field(default_factory=dict)
    """Longest seconds since the end of a fault, by the fault and what was reached."""

    def workers(self, service: str | None = None) -> list[Pod]:
        return [pod for pod in self.pods.pods if pod.name.startswith(service or (PREFILL, DECODE))]

    async def ask(self, seed: str) -> list[Stream]:
        """Ask both routers for all that is wanted, uncached."""
        return [
            Stream(self.clients[number % 2], prompt, count, cache_salt=f"{seed}-{number}")
            for number, (prompt, count) in enumerate(WANTED)
        ]

    async def answered(self, streams: list[Stream]) -> None:
        """All streams end well, with the tokens that they have without a fault."""
        for stream, expected in zip(await finished(streams), self.undisturbed, strict=True):
            assert stream.token_ids == expected

    async def memory_is_free(self, fault: str) -> None:
        """No worker holds anything for anybody, soon after the fault's end."""
        ended_at = time.monotonic()

        async def released() -> bool:
            return not any(report.held_blocks or report.reserved_blocks for report in await self._reports())

        async def quiet() -> bool:
            return not any(report.quarantined_blocks for report in await self._reports())

        await until(released, f"no block is held after {fault}", FREE_WITHIN_S)
        self._note(f"{fault}: blocks released", ended_at)
        await until(quiet, f"no block is quarantined after {fault}", ended_at + QUIET_WITHIN_S - time.monotonic())
        self._note(f"{fault}: no read under way", ended_at)

    async def _reports(self) -> list[membership_pb2.AuditReport]:
        reports = [await report_of(pod.address) for pod in self.workers()]
        assert not any(report.fault for report in reports)
        return reports

    def _note(self, what: str, since: float) -> None:
        self.slowest[what] = max(self.slowest.get(what, 0.0), time.monotonic() - since)

    async def all_joined(self) -> None:
        """Both routers see all workers."""

        async def joined() -> bool:
            for client in self.clients:
                models = await client.list_models()
                if [(m.prefill_workers, m.decode_workers) for m in models] != [(2, 2)]:
                    return False
            return True

        await until(joined, "both routers see all workers")

    async def all_connected(self) -> None:
        """Blocks move over TCP. A worker's first contact with another may take so long that blocks are computed."""
        for attempt in range(10):
            receipts = [stream.receipt.kv for stream in await finished(await self.ask(f"contact-{attempt}"))]
            if all(kv.verified_blocks for kv in receipts):
                break
        assert any(kv.verified_blocks for kv in receipts), receipts
        assert {t for kv in receipts for t in kv.ucx_transports} == {"tcp/eth0"}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def site(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Site]:
    secrets = {"a-secret": {"password": b"a password"}}
    values: dict[str, Any] = {"redis.enabled": True, "redis.passwordSecret": "a-secret", "router.replicas": 2}
    values |= {"planner.enabled": True}
    sizes = {PREFILL: 2, DECODE: 2}
    with Namespaces() as namespaces, ScaleApi(TOKEN, host=namespaces.host_ip, **sizes) as api:
        sets = [part for name, value in values.items() for part in ("--set-json", f"{name}={json.dumps(value)}")]
        folder = tmp_path_factory.mktemp("pods")
        async with started(folder, "sim", secrets, api.url, sets, namespaces, sizes) as pods:
            assert isinstance(pods, NamespacedPods)
            await all_ready(pods, 120)
            async with (
                Client(f"{pods.pods_of('demo')[0].ip}:50051") as first,
                Client(f"{pods.pods_of('demo')[1].ip}:50051") as second,
            ):
                site = Site(pods, [first, second], [])
                await site.all_joined()
                await site.all_connected()
                site.undisturbed = [stream.token_ids for stream in await finished(await site.ask("undisturbed"))]
                yield site
    print("".join(f"\n{what} after {seconds:.1f} s" for what, seconds in site.slowest.items()))


Fault = Callable[[Site, random.Random], Coroutine[Any, Any, None]]
pytestmark.append(pytest.mark.asyncio(loop_scope="module"))


async def link_down(site: Site, rng: random.Random) -> None:
    """The cable of a worker is out for a while."""
    pod = rng.choice(site.workers())
    pod.namespace.set_up(False)
    await asyncio.sleep(rng.choice([0.2, 3.0, 10.0]))
    pod.namespace.set_up(True)


async def one_way_loss(site: Site, rng: random.Random) -> None:
    """What one worker sends is lost on the way to another, which it hears."""
    deaf, lost = rng.sample([*site.workers(PREFILL)[:1], *site.workers(DECODE)[:1]], 2)
    await lose(deaf, [lost], rng)


async def partition(site: Site, rng: random.Random) -> None:
    """No lender reaches a borrower, or the other way round, and all see the routers."""
    lenders, borrowers = site.workers(PREFILL), site.workers(DECODE)
    duration = rng.choice([0.5, 4.0, 10.0])
    await asyncio.gather(
        *(lose(pod, borrowers, rng, duration) for pod in lenders),
        *(lose(pod, lenders, rng, duration) for pod in borrowers),
    )


async def redis_lost(site: Site, rng: random.Random) -> None:
    """The routers and Redis do not reach each other."""
    redis = site.pods.pods_of("demo-redis")
    duration = rng.choice([1.0, 12.0])
    await asyncio.gather(*(lose(router, redis, rng, duration) for router in site.pods.pods_of("demo")))


async def other_address(site: Site, rng: random.Random) -> None:
    """A worker is killed and comes back with another address."""
    await restart(site, rng.choice(site.workers()))


async def small_packets(site: Site, rng: random.Random) -> None:
    """The network takes packets of 1,400 bytes only, from the middle of a transfer on."""
    for pod in site.pods.pods:
        pod.namespace.set_mtu(1400)


async def late_names(site: Site, rng: random.Random) -> None:
    """A worker comes back before the name of Redis, where it finds its routers, can be resolved."""
    site.pods.late_services = ["demo-redis"]
    restarting = asyncio.ensure_future(restart(site, rng.choice(site.workers())))
    await asyncio.sleep(6.0)
    site.pods.late_services = []
    site.pods.publish_names()
    await restarting


async def restart(site: Site, pod: Pod) -> None:
    """Kill a pod and start it with another address; return when it has started."""
    await site.pods.restart_elsewhere(pod)

    await until(lambda: site.pods.probe(pod, "startup"), f"{pod.name} has started")


async def lose(pod: Pod, sources: list[Pod], rng: random.Random, duration_s: float | None = None) -> None:
    """Drop all that comes to a pod from others, for a while."""
    pod.namespace.drop_from([source.ip for source in sources])
    await asyncio.sleep(duration_s or rng.choice([0.5, 4.0, 10.0]))
    pod.namespace.drop_from([])


@pytest.mark.parametrize(
    "fault", [link_down, one_way_loss, partition, redis_lost, other_address, small_packets, late_names]
)
async def test_no_request_is_lost_or_wrong_and_no_block_is_stranded(site: Site, fault: Fault) -> None:
    rng = random.Random(fault.__name__)
    for number in range(ROUNDS):
        streams = await site.ask(f"{fault.__name__}-{number}")
        await asyncio.sleep(rng.uniform(0.0, 0.4))
        await fault(site, rng)
        await site.answered(streams)
        await site.memory_is_free(fault.__name__)
        await site.all_joined()
