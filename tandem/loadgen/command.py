"""The command `tandem bench`."""

import asyncio
import contextlib
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from cluster.process.tasks import Tasks
from tandem.loadgen.drive import LoadDriver, SentRequest
from tandem.loadgen.frontends import Frontend
from tandem.loadgen.report import Receipts, Report, tables_of, write_json, write_plot
from workloads.profiles import Profile, evenly, poisson, requests_of
from workloads.report import open_figures
from workloads.request import BadSetup, EndState, TraceRequest, check_above_0
from workloads.results import LatencySummary, ResultCounter, Slo
from workloads.traces.reading import Trace
from workloads.traces.receipts import ServedRequest, write_served

BEGIN_S = 0.2
"""Seconds before the first request is due, so that it is not sent late."""


@dataclass(slots=True)
class LeftOut:
    """Requests of a trace that are longer than the model's context and not sent."""

    count: int = 0
    of: int = 0


@dataclass(frozen=True, slots=True)
class OfferedLoad:
    """Load: a profile at a rate or concurrency, or a trace at its own times."""

    profile: Profile | None = None
    trace: Trace | None = None
    rate: float = 1.0
    """Requests per second of a profile. A trace has its rate in its window."""
    even: bool = False
    """Whether gaps are equal; otherwise Poisson."""
    concurrency: int | None = None
    """Number of concurrent requests in a closed loop; None: an open loop."""
    duration_s: float | None = None
    most: int | None = None
    warmup_s: float = 0.0
    """Seconds whose requests are sent but not counted."""
    scale: float = 1.0
    """Factor of a profile's lengths."""
    seed: int = 0

    def __post_init__(self) -> None:
        check_above_0("rate", self.rate)
        check_above_0("scale", self.scale)
        if self.concurrency is not None and self.concurrency < 1:
            raise BadSetup("concurrency", f"{self.concurrency} is not at least 1")
        for name in ("duration_s", "most"):
            if (value := getattr(self, name)) is not None and not 0 < value < math.inf:
                raise BadSetup({"most": "requests"}.get(name, "duration"), f"{value} is not above 0")
        if not 0 <= self.warmup_s < (self.duration_s or math.inf):
            raise BadSetup("warmup", f"{self.warmup_s} s is not from 0 to below the duration, {self.duration_s} s")
        if self.trace is None and self.duration_s is None and self.most is None:
            raise BadSetup("duration", "is missing: set a duration, or a number of requests")

    def left_out(self, context: int) -> LeftOut:
        """Read a trace once, to report its errors before sending anything.

        Raises BadTrace and BadSetup.

        BadSetup means that no request fits the context.
        """
        if self.trace is None:
            return LeftOut()
        left = LeftOut()
        for request in self._in_time(self.trace):
            if left.of - left.count == self.most:
                break
            left.of += 1
            left.count += request.input_tokens + request.output_tokens > context
        if left.count == left.of:
            raise BadSetup("trace", f"all {left.of} requests are longer than the context of {context} tokens")
        return left

    def _in_time(self, requests: Iterable[TraceRequest]) -> Iterable[TraceRequest]:
        if self.duration_s is None or self.concurrency is not None:
            return requests
        last_s = self.duration_s
        return takewhile(lambda each: each.arrival_s < last_s, requests)

    @property
    def name(self) -> str:
        what = self.profile.name if self.profile else self.trace.path.name if self.trace else ""
        if self.concurrency is not None:
            return f"{what}, {self.concurrency} at a time"
        return f"{what}, {self.rate:g}/s {'evenly' if self.even else 'Poisson'}" if self.profile else what

    def requests(self, context: int) -> Iterator[TraceRequest]:
        """Yield the requests, without those longer than `context`.

        Raises BadTrace and BadSetup.
        """
        requests: Iterable[TraceRequest]
        if self.profile is not None:
            arrivals = evenly(self.rate) if self.even else poisson(self.rate, self.seed)
            requests = requests_of(self.profile, arrivals, self.seed, self.scale, context)
        else:
            assert self.trace is not None
            requests = (each for each in self.trace if each.input_tokens + each.output_tokens <= context)
        for number, request in enumerate(self._in_time(requests)):
            if number == self.most:
                break
            yield request


@dataclass(frozen=True, slots=True)
class OutputOptions:
    """Output of the results."""

    slo: Slo
    gpus: int | None = None
    """GPUs of the cluster; default: as many as workers."""
    usd_per_gpu_hour: float | None = None
    json_path: Path | None = None
    png_path: Path | None = None
    log_path: Path | None = None
    """File for requests with their receipts, for `tandem replay` and `tandem calibrate`."""

    def __post_init__(self) -> None:
        check_above_0("gpus", self.gpus)
        check_above_0("price", self.usd_per_gpu_hour, or_0=True)


async def run_bench(console: Console, frontend: Frontend, load: OfferedLoad, wanted: OutputOptions) -> Report:
    """Run the load and print the report.

    Raises ServiceError, StartError, BadSetup and BadTrace.

    Cancelled, it reports the requests finished by then.
    """
    if wanted.png_path is not None:
        open_figures()
    async with frontend, contextlib.AsyncExitStack() as stack:
        left_out = await asyncio.to_thread(load.left_out, frontend.max_context_tokens)
        log = stack.enter_context(wanted.log_path.open("w")) if wanted.log_path else None
        count = _Count(load, wanted, log)
        progress = stack.enter_context(_progress(console))
        drive = LoadDriver(frontend, count.ended, load.warmup_s)
        await _offer(load, frontend, drive, count, progress)
        report = count.report(drive, f"{load.name} at {frontend.model}", frontend.num_workers)
    report.left_out, report.requests_of_trace = left_out.count, left_out.of
    for table in tables_of(report):
        console.print(table)
    if wanted.json_path is not None:
        write_json(wanted.json_path, report)
        console.print(f"figures: {wanted.json_path}")
    if wanted.png_path is not None:
        write_plot(wanted.png_path, report)
        console.print(f"picture: {wanted.png_path}")
    if wanted.log_path is not None:
        console.print(f"requests and receipts: {wanted.log_path}")
    return report


async def _offer(load: OfferedLoad, frontend: Frontend, drive: LoadDriver, count: "_Count", progress: Progress) -> None:
    loop = asyncio.get_running_loop()
    total = load.most if load.most is not None else load.duration_s
    task = progress.add_task(load.name, total=total, said="")
    begins_at = count.begins_at = loop.time() + (BEGIN_S if load.concurrency is None else 0.0)

    def advance() -> None:
        done = count.num_over if load.most is not None else min(loop.time() - begins_at, total or math.inf)
        status = f"{drive.num_under_way} under way, {count.num_over} over"
        progress.update(task, completed=max(0.0, done), said=status)

    tasks = Tasks("progress is shown no more")
    tasks.spawn(_every(0.2, advance))
    try:
        requests = load.requests(frontend.max_context_tokens)
        if load.concurrency is None:
            await drive.open_loop(requests, begins_at)
        else:
            until = math.inf if load.duration_s is None else begins_at + load.duration_s
            await drive.closed_loop(requests, load.concurrency, until)
    except asyncio.CancelledError:
        count.interrupted = True
        count.reasons["(interrupted: those under way are not counted)"] = 1
    finally:
        await tasks.close()
        advance()


async def _every(seconds: float, act: Callable[[], None]) -> None:
    while True:
        await asyncio.sleep(seconds)
        act()


class _Count:
    """Counters of finished requests."""

    def __init__(self, load: OfferedLoad, wanted: OutputOptions, log: TextIO | None) -> None:
        self._load, self._wanted, self._log = load, wanted, log
        self.begins_at = 0.0
        self.num_over = 0
        self.interrupted = False
        self.reasons: dict[str, int] = {}
        self._tally: ResultCounter | None = None
        self._receipts = Receipts()
        self._first_tokens: list[tuple[float, float]] = []
        self._held: dict[int, ServedRequest | None] = {}
        self._written = 0

    def ended(self, sent: SentRequest) -> None:
        self.num_over += 1
        outcome = sent.outcome
        finished = outcome.end_state is EndState.FINISHED
        if self._log is not None:
            self._held[sent.number] = _served(sent, self.begins_at) if finished else None
            while self._written in self._held:  # in the order of arrival
                if (served := self._held.pop(self._written)) is not None:
                    write_served(self._log, served)
                self._written += 1
        if self._tally is None:
            self._tally = ResultCounter(self._wanted.slo, self.begins_at + self._load.warmup_s)
        if sent.counted:
            self._tally.add(outcome)
            if finished:
                self._receipts.add(sent.finish.receipt, outcome.ttft_s)
                self._first_tokens.append((outcome.sent_at - self.begins_at, outcome.ttft_s))

    def report(self, drive: LoadDriver, title: str, num_workers: int) -> Report:
        tally = self._tally or ResultCounter(self._wanted.slo, self.begins_at)
        gpus, price = self._wanted.gpus or num_workers or 1, self._wanted.usd_per_gpu_hour
        gpu_seconds = gpus * tally.duration_s
        usd = gpu_seconds / 3600 * (price or 0.0)
        results = tally.results(drive.sent.gaps, gpu_seconds, usd, gpus * tally.arrivals_s)
        due_s = max(drive.sent.last_due_at - self.begins_at - self._load.warmup_s, 1e-9)
        return Report(
            title=title,
            slo=self._wanted.slo,
            num_gpus=gpus,
            results=results,
            offered_per_s=drive.sent.count / due_s,
            most_under_way=drive.sent.most_under_way,
            late=LatencySummary.of(drive.sent.late_s),
            receipts=self._receipts,
            reasons=tally.reasons | self.reasons,
            first_tokens=self._first_tokens,
            priced=price is not None,
            interrupted=self.interrupted,
        )


def _served(sent: SentRequest, begins_at: float) -> ServedRequest:
    """Return a request's log entry with the intended lengths; prompts sent as text may differ by a few tokens."""
    outcome, request = sent.outcome, sent.outcome.request
    return ServedRequest(
        arrived_s=max(0.0, outcome.sent_at - begins_at),
        prompt_tokens=request.input_tokens,
        completion_tokens=outcome.num_emitted,
        block_tokens=request.hash_tokens,
        blocks=request.hash_ids,
        ttft_s=outcome.ttft_s,
        itl_s=outcome.itl_s,
        receipt=sent.finish.receipt,
        priority=request.priority,
    )


def _progress(console: Console) -> Progress:
    columns = TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), TextColumn("{task.fields[said]}")
    return Progress(*columns, console=console, transient=True)
