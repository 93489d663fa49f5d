"""When requests are sent, and from when their times count."""

import asyncio
import json
import math
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from cluster.errors import InvalidRequest, Overloaded, StartError, Unavailable
from protos import inference_pb2 as pb
from tandem.cli.main import app
from tandem.loadgen import command
from tandem.loadgen.command import LeftOut, OfferedLoad
from tandem.loadgen.drive import LoadDriver, SentRequest
from tandem.loadgen.frontends import Frontend, HttpFrontend, OnTokens, error_of, read_event
from workloads.request import BadSetup, BadTrace, EndState, TraceRequest
from workloads.traces.reading import Trace, Window


class Behind(Frontend):
    """Answers when it is told to."""

    def __init__(self, error: Exception | None = None) -> None:
        self.open = asyncio.Event()
        self.asked: asyncio.Queue[TraceRequest] = asyncio.Queue()
        self._error = error

    async def __aexit__(self, *exception: object) -> None:
        return

    async def ask(self, request: TraceRequest, on_tokens: OnTokens) -> pb.Finish:
        self.asked.put_nowait(request)
        await self.open.wait()
        if self._error is not None:
            raise self._error
        for count in (1, 1, 3):
            on_tokens(count)
        return pb.Finish(usage=pb.Usage(prompt_tokens=4, completion_tokens=5, cached_tokens=2))


def load_of(tmp_path: Path, lengths: list[int], **changes: Any) -> OfferedLoad:
    path = tmp_path / "t"
    rows = [{"timestamp": 1000 * n, "input_length": length, "output_length": 10} for n, length in enumerate(lengths)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return OfferedLoad(trace=Trace(path, Window()), most=changes.pop("most", 100), **changes)


def test_requests_of_a_trace_that_are_too_long_are_counted(tmp_path: Path) -> None:
    load = load_of(tmp_path, [100, 991, 300, 990, 5000])
    assert load.left_out(1000) == LeftOut(2, 5)
    assert [request.input_tokens for request in load.requests(1000)] == [100, 300, 990]
    assert load_of(tmp_path, [5000, 100, 100, 5000], most=2).left_out(1000) == LeftOut(1, 3)
    assert load_of(tmp_path, [5000, 100, 100, 5000], duration_s=1.5).left_out(1000) == LeftOut(1, 2)
    with pytest.raises(BadSetup, match="all 2 requests are longer than the context of 1000 tokens"):
        load_of(tmp_path, [1000, 2000]).left_out(1000)


@pytest.mark.parametrize("name", ["rate", "scale"])
@pytest.mark.parametrize("value", [0.0, -1.0, math.nan, math.inf])
def test_a_load_that_cannot_be_offered(tmp_path: Path, name: str, value: float) -> None:
    with pytest.raises(BadSetup, match=f"{name}: .* is not above 0"):
        load_of(tmp_path, [100], **{name: value})


def requests(count: int, gap_s: float = 0.0) -> list[TraceRequest]:
    return [TraceRequest(number, number * gap_s, 4, 5) for number in range(count)]


async def test_an_open_loop_waits_for_nobody_and_times_count_from_when_each_was_due() -> None:
    frontend, over = Behind(), list[SentRequest]()
    drive = LoadDriver(frontend, over.append)
    began_at = asyncio.get_running_loop().time() - 100.0  # so that all are due, and were for long
    running = asyncio.ensure_future(drive.open_loop(requests(50, gap_s=1.0), began_at))
    for _ in range(50):
        await frontend.asked.get()
    assert not over
    assert drive.num_under_way == drive.sent.most_under_way == 50
    frontend.open.set()
    await running
    assert [asked.outcome.end_state for asked in over] == 50 * [EndState.FINISHED]
    assert drive.num_under_way == 0
    by_number = sorted(over, key=lambda asked: asked.number)
    for number, asked in enumerate(by_number):
        assert asked.outcome.sent_at == began_at + number
        assert asked.outcome.ttft_s >= 100.0 - number  # sent late is answered late
    assert min(drive.sent.late_s) >= 50.0
    assert by_number[0].outcome.num_emitted == 5
    assert by_number[0].outcome.reused_tokens == 2
    assert drive.sent.gaps.count == 50 * 4


async def test_what_is_due_in_the_warmup_is_in_no_figure() -> None:
    frontend, over = Behind(), list[SentRequest]()
    frontend.open.set()
    drive = LoadDriver(frontend, over.append, warmup_s=3.0)
    await drive.open_loop(requests(5, gap_s=1.0), asyncio.get_running_loop().time() - 10)
    assert len(over) == 5
    assert (drive.sent.count, len(drive.sent.late_s), drive.sent.gaps.count) == (2, 2, 2 * 4)


async def test_a_closed_loop_has_so_many_at_a_time() -> None:
    frontend, over = Behind(), list[SentRequest]()
    drive = LoadDriver(frontend, over.append)
    running = asyncio.ensure_future(drive.closed_loop(requests(20), 3))
    for _ in range(50):
        await asyncio.sleep(0)
    assert frontend.asked.qsize() == 3
    frontend.open.set()
    await running
    assert len(over) == 20
    assert drive.sent.most_under_way == 3


@pytest.mark.parametrize(
    ("error", "end_state", "reason"),
    [
        (Overloaded("full, 17 before you"), EndState.REFUSED, "Overloaded: full, N before you"),
        (Unavailable("no worker"), EndState.FAILED, "Unavailable: no worker"),
    ],
)
async def test_errors_end_a_request_and_not_the_run(error: Exception, end_state: EndState, reason: str) -> None:
    frontend, over = Behind(error), list[SentRequest]()
    frontend.open.set()
    await LoadDriver(frontend, over.append).open_loop(requests(3), asyncio.get_running_loop().time())
    assert [(asked.outcome.end_state, asked.outcome.reason) for asked in over] == 3 * [(end_state, reason)]


async def test_a_trace_that_is_bad_from_some_line_on_says_so() -> None:
    def bad() -> Iterator[TraceRequest]:
        yield from requests(1)
        raise BadTrace(Path("t"), 2, "is bad")

    for run in (lambda drive: drive.open_loop(bad(), 0.0), lambda drive: drive.closed_loop(bad(), 2)):
        with pytest.raises(BadTrace, match="line 2"):
            await run(LoadDriver(Behind(), lambda _: None))


async def test_a_mistake_of_ours_ends_the_run() -> None:
    frontend = Behind(ZeroDivisionError())
    frontend.open.set()
    with pytest.raises(ExceptionGroup):
        await LoadDriver(frontend, lambda _: None).open_loop(requests(3), asyncio.get_running_loop().time())


async def test_cancelled_it_leaves_nothing_under_way() -> None:
    frontend, over = Behind(), list[SentRequest]()
    drive = LoadDriver(frontend, over.append)
    running = asyncio.ensure_future(drive.open_loop(requests(3), asyncio.get_running_loop().time()))
    for _ in range(3):
        await frontend.asked.get()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert not over
    assert drive.num_under_way == 0


def test_events_of_a_server_that_counts_and_of_one_that_does_not() -> None:
    came: list[int] = []
    finish = pb.Finish()
    seen = read_event({"choices": [{"text": "ab"}], "usage": {"completion_tokens": 3}}, finish, 0, came.append)
    seen = read_event({"choices": [{"text": "c"}]}, finish, seen, came.append)
    seen = read_event({"choices": [{"text": ""}]}, finish, seen, came.append)
    assert (came, seen) == ([3, 1], 4)
    with pytest.raises(Unavailable):
        read_event({"error": {"message": "gone", "code": 503}}, finish, seen, came.append)


@pytest.mark.parametrize("url", ["foo", "ftp://a", "http://", "http://a:99999", "", 99 * "x"])
def test_an_address_that_is_none(url: str) -> None:
    with pytest.raises(StartError, match="is not an address such as http://"):
        HttpFrontend(url, "", 1.0)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--gpus", "0"], "gpus: 0 is not above 0"),
        (["--gpus", "-2"], "gpus: -2 is not above 0"),
        (["--timeout", "nan"], "timeout: nan is not above 0"),
        (["--timeout", "-1"], "timeout: -1 is not above 0"),
        (["--price", "nan"], "price: nan is not at least 0"),
        (["--rate", "0"], "rate: 0 is not above 0"),
        (["--scale", "-1"], "scale: -1 is not above 0"),
        (["--http", "foo"], "http: 'foo' is not an address"),
        (["--log", "/nonexistent/x"], "there is no directory /nonexistent"),
        (["--json", "."], "--json: cannot write .: it is a directory"),
    ],
)
def test_the_command_with_a_bad_option(options: list[str], said: str) -> None:
    done = CliRunner().invoke(app, ["bench", "--requests", "1", *options])
    assert isinstance(done.exception, StartError)
    assert said in str(done.exception)


def test_the_command_spreads_a_traces_times(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loads: list[OfferedLoad] = []

    async def offered(_: object, __: object, load: OfferedLoad, ___: object) -> Any:
        loads.append(load)
        return SimpleNamespace(exit_code=1)

    monkeypatch.setattr(command, "run_bench", offered)
    load_of(tmp_path, [100])
    done = CliRunner().invoke(app, ["bench", str(tmp_path / "t"), "--spread", "3", "--requests", "9"])
    assert done.exit_code == 1  # nothing was served
    assert loads[0].trace.window.spread_s == 3.0


def test_what_an_http_status_means() -> None:
    overloaded = error_of(429, b'{"error": {"message": "full", "param": "tenant"}}', {"Retry-After": "3"})
    assert (type(overloaded), overloaded.retry_after_s, overloaded.field) == (Overloaded, 3.0, "tenant")
    assert isinstance(error_of(400, b"<html>", {}), InvalidRequest)
    assert isinstance(error_of(502, b"", {}), Unavailable)
