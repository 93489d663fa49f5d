"""`tandem demo`: a real cluster on this machine, with text that a person can watch."""

import asyncio
import contextlib
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from cluster.errors import TandemError
from cluster.process.tasks import Tasks, all_of
from engine.model.hub import MODEL_FILES, absolute, fetch_beside
from engine.model.model_dir import ModelDir
from protos import inference_pb2 as pb
from tandem.cli.tables import describe, stage_table
from tandem.client import Client, Message
from tandem.local.local_cluster import LocalCluster
from tandem.progress import ProgressSteps
from tandem.storyteller import STORYTELLER
from tandem.topology import plan_topology

REFRESH_PER_S = 8
LORE = (
    "{village} is the village whose storyteller you are. The village stands between a quiet river and an old forest. "
    "The baker keeps a lamp in her window, the miller keeps a grey cat, and the children keep secrets. "
)
VILLAGES = ("Amberley", "Birchwood", "Copperfield", "Dovecote")
ALWAYS_LENT: dict[str, Any] = {"learn_rates": False, "decode_prefill_tokens_per_s": 100.0}
"""Settings of the demo's routers: long prompts are lent, however slow or busy this machine is."""
SUBJECTS = (
    "a fox and a lantern",
    "an owl and a key",
    "a girl and a boat",
    "a bear and a bell",
    "a boy and a kite",
    "a rabbit and a map",
    "a cat and a drum",
    "a mouse and a lamp",
)


@dataclass(slots=True)
class Story:
    """One request as its client sees it. Times are seconds of the monotonic clock."""

    title: str
    messages: list[Message]
    text: str = ""
    sent_at: float = 0.0
    token_times: list[float] = field(default_factory=list)
    finish: pb.Finish | None = None

    @property
    def ttft_ms(self) -> float:
        return (self.token_times[0] - self.sent_at) * 1e3

    @property
    def itl_ms(self) -> float:
        """Mean inter-token latency of the stream."""
        gaps = len(self.token_times) - 1
        return (self.token_times[-1] - self.token_times[0]) / gaps * 1e3 if gaps else 0.0


def make_stories(count: int) -> list[Story]:
    """Make stories, of which every second one has a long prompt: the lore of a village, which is lent as KV blocks.

    Each village has its own, so that no block is there already when a request is late.
    """
    stories: list[Story] = []
    for number in range(count):
        ask = f"Tell me a story about {SUBJECTS[number % len(SUBJECTS)]}."
        village = VILLAGES[number // 2 % len(VILLAGES)]
        is_long = number % 2 == 0
        system: list[Message] = [("system", LORE.format(village=village) * 3)] if is_long else []
        stories.append(Story(f"{ask}{f' (with the lore of {village})' * is_long}", [*system, ("user", ask)]))
    return stories


async def run_demo(
    console: Console, num_requests: int, model: Path | None, cores: Sequence[int], num_routers: int = 1
) -> None:
    """Start a cluster, serve two rounds, show the results, and stop.

    Raises TandemError when anything is wrong.
    """
    path = absolute(await fetch_beside(model or STORYTELLER, MODEL_FILES, say=lambda line: _say(console, line)))
    ModelDir.open(path)
    topology = plan_topology(1, 1, {"model": path, "port": 0} | ALWAYS_LENT, {"model": path}, cores, num_routers)
    started_at = time.monotonic()
    async with contextlib.AsyncExitStack() as stack:
        with ProgressSteps(console, "  ") as steps:
            cluster = await stack.enter_async_context(LocalCluster(topology, steps))
        console.print(f"  ready after {time.monotonic() - started_at:.1f} s\n")
        clients = [await stack.enter_async_context(Client(address)) for address in cluster.addresses]
        stories = make_stories(num_requests)
        await _watch(console, clients, stories)
        _report(console, stories)
        again = make_stories(2)
        console.print("\nthe first two stories once more: their KV blocks are still cached\n")
        await _watch(console, clients, again)
        _report(console, again)
        console.print()
        console.print(stage_table(_receipt(stories[0])))
        console.print(f"\nboth rounds: {summary([_receipt(story) for story in (*stories, *again)])}")
    console.print(f"\nstopped; {time.monotonic() - started_at:.1f} s in all")


def _say(console: Console, line: str) -> None:
    console.print(f"  {line}", markup=False, soft_wrap=True)


async def _watch(console: Console, clients: list[Client], stories: list[Story]) -> None:
    """Run all stories at once, with growing text on a terminal; elsewhere print each when it is done."""
    work = all_of(_stream(clients[i % len(clients)], story) for i, story in enumerate(stories))
    if not console.is_terminal:
        await work
        console.print(_page(stories, lines=None))
        return
    async with Tasks() as tasks:
        running = tasks.spawn(work)
        with Live(console=console, refresh_per_second=REFRESH_PER_S, vertical_overflow="visible") as live:
            while not running.done():
                live.update(_page(stories, lines=2))
                await asyncio.wait([running], timeout=1 / REFRESH_PER_S)
            live.update(_page(stories, lines=None))
        await running


async def _stream(client: Client, story: Story) -> None:
    sampling = pb.Sampling(max_tokens=120, temperature=0.7, top_p=0.95, seed=len(story.title))
    story.sent_at = time.monotonic()
    async for piece in client.generate(messages=story.messages, sampling=sampling, timeout_s=120):
        story.text += piece.text
        story.token_times += [time.monotonic()] * len(piece.token_ids)
        if piece.HasField("finish"):
            story.finish = piece.finish


def _page(stories: list[Story], lines: int | None) -> Group:
    """Return titles with their text; while it grows, only its last `lines`."""
    table = Table.grid(padding=(0, 1))
    width = 100
    for story in stories:
        shown = story.text if lines is None else story.text[-lines * width :]
        table.add_row(Text(story.title, style="bold"))
        table.add_row(Text(shown.replace("\n", " ") or "..."))
    return Group(table)


def _receipt(story: Story) -> pb.Receipt:
    if story.finish is None:
        raise TandemError(f"the stream of {story.title!r} ended without its last message")
    return story.finish.receipt


def _report(console: Console, stories: list[Story]) -> None:
    receipts = [_receipt(story) for story in stories]
    console.print("\nwhere each request ran, and where its KV came from", style="bold")
    for story, receipt in zip(stories, receipts, strict=True):
        console.print(describe(receipt, story.ttft_ms, story.itl_ms))


def summary(receipts: Sequence[pb.Receipt]) -> str:
    """Return a line about the loans and blocks of requests."""
    kv = [receipt.kv for receipt in receipts if receipt.placement.lender]
    whole = sum(not (each.loan_failure or each.hedged_blocks or each.mismatched_blocks) for each in kv)
    moved, verified = sum(each.moved_blocks for each in kv), sum(each.verified_blocks for each in kv)
    mismatched, reused = sum(each.mismatched_blocks for each in kv), sum(each.kv.reused_blocks for each in receipts)
    return (
        f"{whole} of {len(kv)} loans were whole; {moved} KV blocks moved, {verified} verified, {mismatched} mismatched;"
        f" {reused} reused from the cache"
    )
