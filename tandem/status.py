"""`tandem status` and `tandem top`: the cluster as a router sees it."""

import asyncio
from collections.abc import Sequence

from rich import box
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from cluster.errors import ServiceError
from protos import inference_pb2 as pb
from tandem.client import Target
from tandem.receipts import format_bytes

MAX_LINKS = 8
"""Shown, the slowest first."""


async def show_status(console: Console, target: Target) -> None:
    """Raises ServiceError."""
    async with target.client() as client:
        console.print(view(await client.cluster_status()))


async def follow(console: Console, target: Target, interval_s: float) -> None:
    """Until it is interrupted. A router that is away for a while is waited for."""
    before: pb.ClusterStatusResponse | None = None
    async with target.client() as client:
        with Live(console=console, screen=console.is_terminal, auto_refresh=False) as live:
            while True:
                try:
                    status = await client.cluster_status()
                    shown, before = view(status, before), status
                except ServiceError as error:
                    shown = Text(f"{target.address}: {error}", style="red")
                live.update(shown, refresh=True)
                await asyncio.sleep(interval_s)


def view(status: pb.ClusterStatusResponse, before: pb.ClusterStatusResponse | None = None) -> RenderableType:
    """`before`: of the same router a moment ago, for rates."""
    state = "draining" if status.draining else "serving"
    parts: list[RenderableType] = [Text(f"{status.router_id}: {state}, up {_duration(status.uptime_s)}", style="bold")]
    earlier = {model.name: model for model in before.models} if before else {}
    span_s = status.uptime_s - before.uptime_s if before else 0.0
    for model in status.models:
        parts += _model(model, earlier.get(model.name), span_s)
    return Group(*parts)


def _model(model: pb.ModelStatus, before: pb.ModelStatus | None, span_s: float) -> list[RenderableType]:
    running = sum(worker.running for worker in model.workers if worker.role == "decode")
    line = f"{model.name}: {running} running, {model.waiting} waiting, {model.requests} over"
    if before is not None and span_s > 0:
        rate, tokens = model.requests - before.requests, model.output_tokens - before.output_tokens
        line += f"; {rate / span_s:.1f} requests/s, {tokens / span_s:.0f} tokens/s"
    if model.HasField("prediction_ratio"):
        line += f"; TTFT predicted {model.prediction_ratio:.2f} x actual"
    parts: list[RenderableType] = [Text(line)]
    if model.refused:
        refused = ", ".join(f"{count} x {reason}" for reason, count in sorted(model.refused.items()))
        parts.append(Text(f"refused: {refused}", style="yellow"))
    parts.append(_workers(model.workers))
    if model.links:
        parts.append(_links(model.links))
    return parts


def _workers(workers: Sequence[pb.WorkerStatus]) -> Table:
    table = Table(box=box.SIMPLE_HEAD)
    for heading in ("worker", "role"):
        table.add_column(heading)
    for heading in ("running", "decoding", "loans", "prompt tokens queued", "KV taken", "cached", "prefill tokens/s"):
        table.add_column(heading, justify="right")
    for worker in workers:
        speed = worker.decode_prefill_tokens_per_s if worker.role == "decode" else worker.prefill_tokens_per_s
        table.add_row(
            worker.worker_id + (" (draining)" if worker.draining else ""),
            worker.role,
            str(worker.running),
            str(worker.decoding),
            str(worker.loans) + (f" +{worker.queued_loans}" if worker.queued_loans else ""),
            f"{worker.queued_prefill_tokens:,}",
            f"{1 - worker.available_blocks / max(1, worker.num_blocks):.0%} of {worker.num_blocks:,}",
            f"{worker.cached_blocks:,}",
            f"{speed:,.0f}",
        )
    return table


def _links(links: Sequence[pb.LinkStatus]) -> Table:
    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("KV read by")
    table.add_column("from")
    for heading in ("a second", "and ms each"):
        table.add_column(heading, justify="right")
    for link in sorted(links, key=lambda link: link.bytes_per_s)[:MAX_LINKS]:
        table.add_row(link.borrower, link.lender, format_bytes(int(link.bytes_per_s)), f"{link.overhead_ms:.1f}")
    return table


def _duration(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s" if minutes else f"{rest} s"
