"""A canary among decode workers: which requests it gets, of a real cluster."""

from pathlib import Path
from typing import Any

from router.placement.demand import traffic_hash_of
from support.processes import Stream, finished, named, running, workers_joined

SHARE = 0.3
PROMPT = [1, 2, 3, 4, 5]


async def test_a_canary_gets_its_share_until_it_goes(model: Path, cluster_of: Any) -> None:
    """The requests are those whose lot says so, whoever runs what: so it is known before."""
    cluster = cluster_of(model, prefill=0, decode=2, engine="sim", sim_step_ms=1.0, drain_s=0.0)
    plain, canary = cluster.topology.decode
    decode = (plain, canary.model_copy(update={"worker_id": "canary", "traffic_share": SHARE}))
    cluster.replace_roles(decode=decode)
    ids = [f"request {number}" for number in range(60)]
    theirs = {request_id for request_id in ids if traffic_hash_of(request_id) < SHARE}
    assert 5 < len(theirs) < 30
    async with running(cluster) as (cluster, client):

        async def served_by_the_canary() -> set[str]:
            streams = {request_id: Stream(client, PROMPT, 5, request_id=request_id) for request_id in ids}
            await finished(list(streams.values()))
            return {
                request_id
                for request_id, stream in streams.items()
                if stream.receipt.placement.decode_worker == "canary"
            }

        assert await served_by_the_canary() == theirs
        leaving = named(cluster, "canary")
        leaving.process.terminate()
        await leaving.process.wait()
        await workers_joined(client, 0, 1)
        assert await served_by_the_canary() == set()
