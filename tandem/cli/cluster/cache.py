"""`tandem cache`: what workers' KV pools hold, prompts that stay there, and their release."""

from dataclasses import dataclass
from pathlib import Path

from google.rpc.status_pb2 import Status
from rich.console import Console
from rich.table import Table

from cluster.cache_salt import isolated_salt
from cluster.errors import InvalidRequest
from cluster.network.tls import TlsIdentity
from protos import inference_pb2 as public_pb
from protos import membership_pb2 as pb
from tandem.cli.tables import uncut
from tandem.client import Client, Target
from tandem.client.live_workers import CALL_S, LiveWorkers

ACTIONS = ("ls", "pin", "warm", "drop")


@dataclass(frozen=True, slots=True)
class Prompt:
    """Prompt whose blocks are meant, with all that their names depend on."""

    text: str
    model: str = ""
    """Name of its model; empty: the only one."""
    tenant: str = ""
    cache_salt: str = ""


def read_prompt(text: str, file: Path | None) -> str:
    """Return the text of a prompt given by itself or in a file; empty without one.

    Raises InvalidRequest.
    """
    if file is None:
        return text
    if text:
        raise InvalidRequest("prompt_file", "give either a text or a file")
    try:
        return file.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidRequest("prompt_file", f"{file}: {error}") from error


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


async def drop_cached(
    console: Console, target: Target, member: TlsIdentity | None, worker_id: str, prompt: Prompt | None, store: bool
) -> None:
    """Drop the cached blocks of a prompt, or all, on one worker or on all; with `store` also the prompt's objects.

    Raises ServiceError.
    """
    async with target.client() as client:
        drop, model = pb.CacheDrop(all=True), ""
        if prompt is not None:
            served = await _served(client, prompt.model)
            drop, model = await _drop_of(client, prompt, served), served.base_model or served.name
        drop.store = store
        for worker, report in await _ask(client, member, worker_id, pb.CacheRequest(drop=drop), model):
            gone = f"{report.dropped_from_pool} blocks dropped from the pool"
            gone += f", {report.dropped_from_tiers} from the local store"
            stay = f"{report.in_use} in use stay"
            objects = f", {report.removed_objects} objects removed from the store" if store else ""
            console.print(f"{worker.worker_id}: {gone}, {stay}{objects}", markup=False)
            if report.store_failure:
                console.print(f"{worker.worker_id}: not all objects: {report.store_failure}", markup=False)


async def warm(
    console: Console, target: Target, prompt: Prompt, workers: int, retention_s: float | None, store: bool
) -> None:
    """Place a prompt's blocks on several decode workers, and say where they came from.

    Raises ServiceError.
    """
    if not prompt.text:
        raise InvalidRequest("text", "is missing")
    async with target.client() as client:
        answer = await client.warm(
            prompt.text,
            model=prompt.model,
            tenant=prompt.tenant,
            cache_salt=prompt.cache_salt,
            workers=workers,
            cache_retention_s=retention_s,
            store=store,
        )
    console.print(f"{answer.prompt_tokens} prompt tokens, {answer.blocks} full blocks", markup=False)
    for each in answer.workers:
        if each.status:
            failed = Status.FromString(each.status)
            console.print(f"{each.worker_id}: failed: {failed.message}", markup=False)
            continue
        kv = each.receipt.kv
        parts = {
            "cached": kv.reused_blocks,
            "from local store": kv.restored_blocks,
            "from the store": kv.store_blocks,
            f"from {each.receipt.placement.lender or 'a lender'}": kv.moved_blocks,
            "computed": kv.computed_blocks,
            "stay": each.pinned_blocks,
            "in the store": each.stored_blocks,
        }
        summary = ", ".join(f"{count} {what}" for what, count in parts.items() if count)
        console.print(f"{each.worker_id} holds {each.held_blocks}: {summary}", markup=False)


async def _drop_of(client: Client, prompt: Prompt, model: public_pb.Model) -> pb.CacheDrop:
    """Return the prompt's tokens and salt as its requests have them."""
    status = await client.cluster_status()
    salt = isolated_salt(prompt.tenant, prompt.cache_salt) if status.isolates_tenants else prompt.cache_salt
    return pb.CacheDrop(
        token_ids=await client.tokenize(prompt.text, model=model.name),
        cache_salt=salt,
        adapter=model.name if model.base_model else "",
    )


async def _served(client: Client, name: str) -> public_pb.Model:
    """Return the model of this name, or the only one.

    Raises InvalidRequest.
    """
    models = await client.list_models()
    matches = [model for model in models if name in ("", model.name)]
    if len(matches) != 1:
        raise InvalidRequest("model", f"name one of {', '.join(model.name for model in models) or 'none'}")
    return matches[0]


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
    client: Client, member: TlsIdentity | None, worker_id: str, request: pb.CacheRequest, model: str = ""
) -> list[tuple[public_pb.WorkerStatus, pb.CacheReport]]:
    live = LiveWorkers(client, member, model)
    workers = [await live.worker(worker_id, "worker")] if worker_id else await live.workers()
    return [(worker, await live.call(worker, lambda stub: stub.Cache(request, timeout=CALL_S))) for worker in workers]
