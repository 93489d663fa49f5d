"""Workers started one by one, as the README does, that nobody told which cores are theirs."""

import os

from engine.host.cores import CoreShare, in_machine_order, share_cores
from support.processes import LENDER_ALWAYS, Stream, assert_equal_answers, engine_of, kill_worker, until, workers_joined
from tandem.client import Client
from tandem.local.local_cluster import LocalCluster, RoleProcess
from tandem.storyteller import STORYTELLER
from tandem.topology import Topology, plan_topology

CORES = tuple(in_machine_order(os.sched_getaffinity(0)))


def computes_on(engine: int) -> tuple[set[int], set[int]]:
    """Cores of its main thread, and those of its other threads beside them."""
    own = os.sched_getaffinity(engine)
    others: set[int] = set()
    for thread in os.listdir(f"/proc/{engine}/task"):
        try:
            others |= os.sched_getaffinity(int(thread))
        except ProcessLookupError:
            continue
    return own, others - own


async def settled(role: RoleProcess, share: CoreShare) -> None:
    engine = engine_of(role)

    async def there() -> bool:
        niceness = os.getpriority(os.PRIO_PROCESS, engine) - os.nice(0)
        return niceness >= share.niceness and computes_on(engine) == (set(share.own), set(share.shared))

    await until(there, f"{role.name} computes on {share}")


def told_nothing(num_prefill: int, num_decode: int) -> Topology:
    worker = {"model": STORYTELLER, "kv_memory_mib": 32}
    router = {"model": STORYTELLER, "port": 0} | LENDER_ALWAYS
    return plan_topology(
        num_prefill, num_decode, router, worker, CORES, finds_cores=lambda config: config.finds_own_cores
    )


async def test_engines_that_are_told_nothing_keep_off_each_others_cores() -> None:
    prompt, longer = list(range(1, 200)), [*range(300, 400), *range(1, 200)]
    whole = share_cores(CORES, ["decode"])[0]
    async with LocalCluster(told_nothing(0, 1)) as cluster, Client(cluster.address) as client:
        (first,) = cluster.decode
        await settled(first, whole)
        undisturbed = await Stream(client, prompt, 300).task

        stream = Stream(client, prompt, 300)
        of_prefill, of_decode = share_cores(CORES, ["prefill", "decode"])
        prefill = await cluster.add_worker("prefill_worker", told_nothing(1, 1).prefill[0])
        await settled(first, of_decode)
        await settled(prefill, of_prefill)
        await workers_joined(client, 1, 1)
        assert (await Stream(client, longer, 4).task).receipt.kv.moved_blocks, "it computes there"
        await settled(prefill, of_prefill)
        assert_equal_answers([await stream.task, await Stream(client, prompt, 300).task], [undisturbed] * 2)

        kill_worker(prefill)
        await settled(first, whole)
