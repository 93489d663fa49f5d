"""`tandem status` and `tandem top`: the cluster as a router sees it."""

import asyncio
from collections import Counter
from collections.abc import Sequence
from typing import Any

from rich import box
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from cluster.errors import Forbidden, ServiceError, Unauthenticated
from protos import inference_pb2 as pb
from tandem.cli.tables import NamesTable, format_bytes, uncut
from tandem.client import Target

MAX_LINKS = 8
"""Number of links shown, slowest first."""
STYLE: dict[str, Any] = {"box": box.SIMPLE_HEAD, "padding": (0, 1, 0, 0)}
"""Style of tables."""


async def show_status(console: Console, target: Target) -> None:
    """Print the status.

    Raises ServiceError.
    """
    async with target.client() as client:
        shown = view(await client.cluster_status())
    with uncut(console):
        console.print(shown)


async def follow(console: Console, target: Target, interval_s: float) -> None:
    """Refresh the status until interrupted, and wait for a router that is away for a while."""
    before: pb.ClusterStatusResponse | None = None
    async with target.client() as client:
        with uncut(console), Live(console=console, screen=console.is_terminal, auto_refresh=False) as live:
            while True:
                try:
                    status = await client.cluster_status()
                    shown, before = view(status, before), status
                except (Unauthenticated, Forbidden):
                    raise
                except ServiceError as error:
                    shown = Text(f"{target.address}: {error}", style="red")
                live.update(shown, refresh=True)
                await asyncio.sleep(interval_s)


def view(status: pb.ClusterStatusResponse, before: pb.ClusterStatusResponse | None = None) -> RenderableType:
    """Return the status for display; `before` is an earlier one of the same router, for rates."""
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
    counts = Counter(worker.revision for worker in model.workers)
    if len(counts) > 1:
        revisions = (f"{_short(revision)} on {count}" for revision, count in sorted(counts.items()))
        parts.append(Text(f"{len(counts)} revisions of the model: {', '.join(revisions)} workers", style="yellow"))
    parts.append(_workers(model.workers, shows_revision=len(counts) > 1))
    parts += [Text(line) for line in _servers(model.workers)]
    if model.links:
        parts.append(_links(model.links))
    return parts


def _servers(workers: Sequence[pb.WorkerStatus]) -> list[str]:
    """Return lines about what stock servers can do."""
    able: dict[str, list[str]] = {}
    for worker in workers:
        if worker.server:
            able.setdefault(worker.server, []).append(worker.worker_id)
    return [f"{summary}: {', '.join(sorted(names))}" for summary, names in sorted(able.items())]


def _short(revision: str) -> str:
    """Return the digits by which people tell revisions apart; a worker of an earlier version does not tell its own."""
    return revision[:8] or "unknown"


def _condition(worker: pb.WorkerStatus, shows_revision: bool) -> str:
    """Return the conditions of a worker that a person should notice."""
    conditions = [f"rank {worker.group_rank} of {worker.group}"] if worker.group else []
    if shows_revision:
        conditions.append(_short(worker.revision))
    if worker.draining:
        conditions.append("draining")
    if worker.failing:
        conditions.append("failing")
    if worker.failing_lenders:
        conditions.append(f"loans from {', '.join(worker.failing_lenders)} fail")
    return f" ({'; '.join(conditions)})" if conditions else ""


def _workers(workers: Sequence[pb.WorkerStatus], shows_revision: bool) -> NamesTable:
    figures = ("running", "decoding", "loans", "prompt tokens queued", "KV taken", "cached", "prefill tokens/s")
    rows = []
    for worker in workers:
        speed = worker.decode_prefill_tokens_per_s if worker.role == "decode" else worker.prefill_tokens_per_s
        row = (
            worker.worker_id + _condition(worker, shows_revision),
            worker.role,
            str(worker.running),
            str(worker.decoding),
            str(worker.loans) + (f" +{worker.queued_loans}" if worker.queued_loans else ""),
            f"{worker.queued_prefill_tokens:,}",
            f"{1 - worker.available_blocks / max(1, worker.num_blocks):.0%} of {worker.num_blocks:,}",
            f"{worker.cached_blocks:,}",
            f"{speed:,.0f}",
            f"{worker.start_seconds:.1f} s {worker.weights_source}".rstrip() if worker.start_seconds else "",
        )
        rows.append(row)
    dropped = ("start", "decoding", "prefill tokens/s", "cached", "role", "loans", "prompt tokens queued", "KV taken")
    return NamesTable(("worker", "role"), (*figures, "start"), rows, dropped, text=("start",), **STYLE)


def _links(links: Sequence[pb.LinkStatus]) -> NamesTable:
    shown = sorted(links, key=lambda link: link.bytes_per_s)[:MAX_LINKS]
    rows = [
        (link.borrower, link.lender, format_bytes(int(link.bytes_per_s)), f"{link.overhead_ms:.1f}") for link in shown
    ]
    return NamesTable(("KV read by", "from"), ("a second", "and ms each"), rows, ("and ms each",), **STYLE)


def _duration(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s" if minutes else f"{rest} s"
