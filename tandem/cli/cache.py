"""`tandem cache`: what workers' KV pools hold, prompts that stay there, and their release."""

from rich.console import Console
from rich.table import Table

from cluster.errors import InvalidRequest
from cluster.tls import TlsIdentity
from protos import inference_pb2 as public_pb
from protos import membership_pb2 as pb
from tandem.cli.tables import uncut
from tandem.client import Client, Target
from tandem.client.live_workers import CALL_S, LiveWorkers

ACTIONS = ("ls", "pin", "drop")


async def list_caches(console: Console, target: Target, member: TlsIdentity | None, worker_id: str) -> None:
    """Print the pool of each worker, or of one, and the tenants whose prompts stay in it.

    Raises ServiceError.
    """
    table = Table("worker", "role", "blocks", "in use", "with KV", "pinned", "of tenant", "ends in")
    async with target.client() as client:
        for worker, report in await _ask(client, member, worker_id, pb.CacheRequest()):
            pinned = f"{sum(each.blocks for each in report.pins)} of {report.max_pinned_blocks}"
            sizes = (report.num_blocks, report.held_blocks, report.filled_blocks)
            row = (worker.worker_id, worker.role, *map(str, sizes), pinned)
            for each in report.pins or [None]:
                whose = (
                    ("", "") if each is None else (f"{each.tenant or '-'}: {each.blocks}", f"{each.ends_in_s:.0f} s")
                )
                table.add_row(*row, *whose)
                row = ("",) * len(row)
    with uncut(console):
        console.print(table)


async def drop_pins(
    console: Console, target: Target, member: TlsIdentity | None, worker_id: str, tenant: str | None
) -> None:
    """Drop the pins of a tenant, or all, on one worker or on all.

    Raises ServiceError.
    """
    request = pb.CacheRequest(drop_pins=True, tenant=tenant)
    async with target.client() as client:
        for worker, report in await _ask(client, member, worker_id, request):
            console.print(f"{worker.worker_id}: {report.dropped_blocks} blocks may be evicted again", markup=False)


async def pin(console: Console, target: Target, model: str, text: str, seconds: float, tenant: str) -> None:
    """Compute a prompt where placement puts it, and keep its blocks there.

    Raises ServiceError.
    """
    if not text:
        raise InvalidRequest("text", "is missing")
    sampling = public_pb.Sampling(max_tokens=1, temperature=0)
    async with target.client() as client:
        async for message in client.generate(
            text=text, model=model, sampling=sampling, tenant=tenant, cache_retention_s=seconds
        ):
            if message.HasField("finish") and message.finish.HasField("receipt"):
                receipt = message.finish.receipt
                kept = f"{receipt.kv.pinned_blocks} blocks of {receipt.kv.block_tokens} tokens stay"
                console.print(f"{receipt.placement.decode_worker}: {kept} for {seconds:g} s", markup=False)


async def _ask(
    client: Client, member: TlsIdentity | None, worker_id: str, request: pb.CacheRequest
) -> list[tuple[public_pb.WorkerStatus, pb.CacheReport]]:
    live = LiveWorkers(client, member)
    workers = [await live.worker(worker_id, "worker")] if worker_id else await live.workers()
    return [(worker, await live.call(worker, lambda stub: stub.Cache(request, timeout=CALL_S))) for worker in workers]
