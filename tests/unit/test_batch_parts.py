"""Parts of batches: states, inputs, records that are written once, logs, retries, space, pace."""

import asyncio
import io
import json
import time
from pathlib import Path
from typing import Any

import pytest

from batches.claims import LockClaims
from batches.lines import (
    MAX_FAULTS,
    InputLimits,
    LineAnswer,
    LineFault,
    answered,
    check_input,
    lines_of,
    make_outputs,
    read_line,
    unanswered,
    wait_s,
)
from batches.router_client import START_GAP_S, StartPace
from batches.service import Batches
from batches.state import (
    Cancelled,
    Checked,
    Decided,
    Ended,
    Facts,
    Fault,
    FileInfo,
    Made,
    Progress,
    Step,
    batch_object,
    next_step,
    status_of,
    window_s,
)
from batches.storage.answer_log import AnswerLog, encoded, read_log
from batches.storage.disk import BATCH_PREFIX, FILE_PREFIX, Disk, TenantSpace, derived_id, is_id, new_id, tenant_folder
from batches.storage.file_store import STALE_S, BatchFolder, BatchStore, FileStore
from cluster.errors import InvalidRequest, Overloaded, StartError, Unavailable
from cluster.process.life import Drain
from router.frontend.http.body.fields import parse_object
from support.batch_runs import ENDPOINT, World, line, link

MADE = Made(
    id=new_id(BATCH_PREFIX, 5), tenant="a", key="k", endpoint=ENDPOINT, input_file_id="file-1",
    completion_window="1h", created_at=5, expires_at=3605,
)  # fmt: skip
CHECKED, CANCELLED = Checked(at=6, num_lines=3), Cancelled(at=7)
COMPLETED = Decided(at=8, outcome="completed", log_bytes={})


def parse(raw: bytes) -> dict[str, Any]:
    return parse_object(raw, 1000)


# ------------------------------------------------------------------ states


@pytest.mark.parametrize(
    ("facts", "now", "status", "step"),
    [
        ({}, 6, "validating", Step.CHECK),
        ({}, 3605, "validating", Step.END_EXPIRED),
        ({"checked": CHECKED}, 7, "in_progress", Step.ANSWER),
        ({"checked": CHECKED}, 3604.9, "in_progress", Step.ANSWER),
        ({"checked": CHECKED}, 3605, "in_progress", Step.END_EXPIRED),
        ({"checked": CHECKED, "cancelled": CANCELLED}, 8, "cancelling", Step.END_CANCELLED),
        ({"cancelled": CANCELLED}, 8, "cancelling", Step.END_CANCELLED),
        ({"checked": CHECKED, "decided": COMPLETED}, 9, "finalizing", Step.MAKE_OUTPUTS),
        ({"checked": CHECKED, "decided": COMPLETED, "cancelled": CANCELLED}, 9, "finalizing", Step.MAKE_OUTPUTS),
        ({"decided": Decided(at=8, outcome="expired", log_bytes={})}, 9, "finalizing", Step.MAKE_OUTPUTS),
        (
            {"cancelled": CANCELLED, "decided": Decided(at=8, outcome="cancelled", log_bytes={})}, 9,
            "cancelling", Step.MAKE_OUTPUTS,
        ),
        ({"ended": Ended(at=9, status="failed")}, 9, "failed", Step.NOTHING),
        ({"decided": COMPLETED, "ended": Ended(at=9, status="completed")}, 9, "completed", Step.NOTHING),
        ({"cancelled": CANCELLED, "ended": Ended(at=9, status="cancelled")}, 9, "cancelled", Step.NOTHING),
        ({"ended": Ended(at=9, status="expired")}, 9, "expired", Step.NOTHING),
    ],
)  # fmt: skip
def test_status_and_next_step(facts: dict[str, Any], now: float, status: str, step: Step) -> None:
    known = Facts(made=MADE, **facts)
    assert (status_of(known), next_step(known, now)) == (status, step)


def test_the_object_of_a_batch() -> None:
    running = batch_object(Facts(made=MADE, checked=CHECKED, cancelled=CANCELLED), Progress(completed=1, failed=1))
    assert running["request_counts"] == {"total": 3, "completed": 1, "failed": 1}
    assert (running["in_progress_at"], running["cancelling_at"], running["expires_at"]) == (6, 7, 3605)
    assert (running["finalizing_at"], running["completed_at"], running["output_file_id"]) == (None, None, None)
    ended = Ended(at=9, status="completed", completed=2, failed=1, output_file_id="file-2", error_file_id="file-3")
    done = batch_object(Facts(made=MADE, checked=CHECKED, decided=COMPLETED, ended=ended), Progress())
    assert done["request_counts"] == {"total": 3, "completed": 2, "failed": 1}
    assert (done["finalizing_at"], done["completed_at"]) == (8, 9)
    assert (done["output_file_id"], done["error_file_id"]) == ("file-2", "file-3")
    fault = Fault(code="invalid_json_line", message="m", line=4)
    failed = batch_object(Facts(made=MADE, ended=Ended(at=9, status="failed", faults=(fault,))), Progress())
    assert failed["failed_at"] == 9
    data = [{"code": "invalid_json_line", "message": "m", "param": None, "line": 4}]
    assert failed["errors"] == {"object": "list", "data": data}


@pytest.mark.parametrize(("window", "seconds"), [("24h", 86_400), ("1m", 60), ("168h", 604_800), ("90m", 5400)])
def test_windows(window: str, seconds: int) -> None:
    assert window_s(window) == seconds


@pytest.mark.parametrize("window", ["", "24", "0h", "169h", "1.5h", "-1h", "24H", "24h ", "1d", "9999999m"])
def test_windows_that_are_none(window: str) -> None:
    with pytest.raises(InvalidRequest, match="completion_window"):
        window_s(window)


# ------------------------------------------------------------------ inputs


def checked(content: bytes, **limits: int) -> tuple[int, list[tuple[int | None, str]]]:
    known = InputLimits(**({"max_line_bytes": 200} | limits))
    lines = lines_of(io.BytesIO(content), known.max_line_bytes)
    num_lines, faults = check_input(lines, ENDPOINT, parse, known)
    return num_lines, [(fault.line, fault.code) for fault in faults]


def raw(name: str, **change: Any) -> bytes:
    return json.dumps(line(name) | change).encode() + b"\n"


def test_a_good_input() -> None:
    assert checked(raw("a") + raw("b")) == (2, [])
    assert checked(raw("a") + raw("b").rstrip()) == (2, []), "the last line needs no end"
    assert checked((raw("a") + raw("b")).replace(b"\n", b"\r\n") + b"\n \n") == (2, [])


def test_an_input_without_lines() -> None:
    assert checked(b"") == (0, [(None, "empty_file")])
    assert checked(b"\n\n") == (0, [(None, "empty_file")])
    assert checked(b"\n" * 10_000_000)[1] == [(None, "empty_file")], "and the rest of it is not read"


@pytest.mark.parametrize(
    ("bad", "code"),
    [
        (b"{\n", "invalid_json_line"),
        (b"[]\n", "invalid_json_line"),
        (b'{"custom_id": NaN}\n', "invalid_json_line"),
        (b"[" * 100_000 + b"\n", "line_too_long"),
        (b"\n", "invalid_json_line"),
        (raw("x", custom_id=None), "missing_required_parameter"),
        (raw("x", custom_id=1), "invalid_type"),
        (raw("x", custom_id=""), "invalid_value"),
        (raw("x", method="GET"), "invalid_method"),
        (raw("x", url="/v1/chat/completions"), "mismatched_url"),
        (raw("x", body=[]), "invalid_type"),
        (raw("x", body={"prompt": "x" * 200}), "line_too_long"),
        (raw("a"), "duplicate_custom_id"),
    ],
)
def test_a_bad_line_is_named(bad: bytes, code: str) -> None:
    assert checked(raw("a") + bad + raw("b"))[1] == [(2, code)]


def test_a_line_nested_too_deeply_is_a_fault_of_that_line() -> None:
    assert checked(b"[" * 100_000 + b"\n", max_line_bytes=1 << 20)[1] == [(1, "invalid_json_line")]


def test_limits_of_an_input() -> None:
    length = len(raw("a")) - 1
    assert checked(raw("a"), max_line_bytes=length) == (1, [])
    assert checked(raw("a"), max_line_bytes=length - 1)[1] == [(1, "line_too_long")]
    assert checked(raw("a") + raw("b"), max_lines=2) == (2, [])
    assert checked(raw("a") + raw("b") + raw("c") + b"{\n", max_lines=2)[1] == [(3, "too_many_requests")]
    assert len(checked(b"{\n" * 1000)[1]) == MAX_FAULTS


def test_a_custom_id_has_a_longest_length() -> None:
    read_line(raw("a" * 512), ENDPOINT, parse)
    with pytest.raises(LineFault, match="512"):
        read_line(raw("a" * 513), ENDPOINT, parse)


def test_output_lines() -> None:
    answer = LineAnswer(200, b'{\n "text": "one\\nline"}\r\n')
    output = answered("batch_1", 3, 'a"b', "r-1", answer)
    assert b"\n" not in output
    said = json.loads(output)
    assert said.pop("id").startswith("batch_req_")
    body = {"text": "one\nline"}
    assert said == {
        "custom_id": 'a"b',
        "response": {"status_code": 200, "request_id": "r-1", "body": body},
        "error": None,
    }
    late = json.loads(unanswered("batch_1", 3, "c", "expired"))
    assert (late["response"], late["error"]["code"]) == (None, "batch_expired")


# ------------------------------------------------------------------ retries, space, pace


def test_waits_grow_and_follow_advice() -> None:
    waits = [wait_s(Unavailable("none"), num_tries, 0.0) for num_tries in (1, 2, 3, 8, 1000)]
    assert waits == [0.25, 0.5, 1.0, 30.0, 30.0]
    assert wait_s(Overloaded("full", retry_after_s=7), 1, 0.0) == 7
    assert wait_s(Overloaded("full", retry_after_s=1e9), 1, 0.0) == 600
    assert wait_s(Unavailable("none"), 1, 1.0) == 0.375


def test_space_counts_files_that_are_being_written() -> None:
    space = TenantSpace(1)
    half = 1 << 19
    space.begin("a", 100)
    space.take("a", half)
    space.begin("a", 100 + half)  # the first one's bytes are on disk by now
    space.take("a", half - 100)
    with pytest.raises(InvalidRequest, match=r"1 MiB.*max_files_mib_per_tenant"):
        space.take("a", 1)
    space.begin("b", 0)
    space.take("b", 1 << 20)
    space.end("a", half, is_kept=True)
    with pytest.raises(InvalidRequest):
        space.take("a", 1)
    space.end("a", half - 100, is_kept=False)
    space.begin("a", half + 100)
    space.take("a", half - 100)
    with pytest.raises(InvalidRequest):
        space.take("a", 1)


async def test_lines_start_one_after_the_other() -> None:
    pace, loop = StartPace(), asyncio.get_running_loop()

    async def start() -> float:
        await pace.wait()
        return loop.time()

    began_at = loop.time()
    starts = await asyncio.gather(*(start() for _ in range(3)))
    assert [at - began_at for at in starts] == pytest.approx([0, START_GAP_S, 2 * START_GAP_S])
    await asyncio.sleep(1)
    assert await start() == loop.time() == pytest.approx(began_at + 2 * START_GAP_S + 1), "none is saved up"
    assert await start() == pytest.approx(began_at + 3 * START_GAP_S + 1)


# ------------------------------------------------------------------ on disk


def test_names_in_the_folder() -> None:
    root = Path("/r")
    names = ["", "a", "../../etc", "é/.", "A" * 300, "#" + "a" * 64]
    folders = {tenant_folder(root, name) for name in names}
    assert len(folders) == len(names)
    assert all(folder.parent == root and len(folder.name) < 255 for folder in folders)
    assert is_id(new_id(FILE_PREFIX, 1.5), FILE_PREFIX)
    assert new_id(FILE_PREFIX, 1) < new_id(FILE_PREFIX, 2)
    assert derived_id(FILE_PREFIX, 1, "a", "b") == derived_id(FILE_PREFIX, 1, "a", "b")
    assert is_id(derived_id(FILE_PREFIX, 1, "a", "b"), FILE_PREFIX)
    for wrong in ("file-", "file-../../x", new_id(BATCH_PREFIX, 1), new_id(FILE_PREFIX, 1) + "/"):
        assert not is_id(wrong, FILE_PREFIX)


def test_a_record_is_written_once(tmp_path: Path) -> None:
    world = World(tmp_path, [line("a")])
    world.batch.record(COMPLETED)
    world.batch.record(Decided(at=99, outcome="cancelled", log_bytes={}))
    facts = world.batch.facts()
    assert facts.decided == COMPLETED
    assert not list(tmp_path.rglob("*.tmp"))


def test_outputs_follow_from_the_named_parts_of_the_logs(tmp_path: Path) -> None:
    world = World(tmp_path, [line("a"), line("b")])

    def log(*answers: tuple[int, str]) -> tuple[Path, int]:
        path, _ = world.batch.new_log()
        path.write_bytes(b"".join(encoded(number, False, json.dumps(text).encode()) for number, text in answers))
        return path, path.stat().st_size

    first, second = log((1, "first")), log((1, "later"), (2, "counts"))
    log_bytes = {path.name: size for path, size in (first, second)}
    # A router that had lost the batch, and woke up.
    with first[0].open("ab") as late:
        late.write(encoded(2, False, b'"too late"'))
    log((2, "too late"))
    facts = world.batch.facts()
    decided = Decided(at=8, outcome="completed", log_bytes=log_bytes)
    facts = facts.model_copy(update={"checked": Checked(at=6, num_lines=2), "decided": decided})
    made = [make_outputs(world.batch, facts, world.files, parse, 1000, now) for now in (9, 10)]
    assert made[0].output_file_id == made[1].output_file_id, "made again, they are the same"
    assert made[0].output_file_id is not None
    assert made[0].error_file_id is None
    output = world.files.find(made[0].output_file_id, "somebody")
    assert output.content.read_text() == '"first"\n"counts"\n'
    assert output.info.num_bytes == len('"first"\n"counts"\n')
    assert len(world.files.ids(None)) == 2, "the input and the output"


def test_a_log_ends_at_its_first_damaged_line(tmp_path: Path) -> None:
    path = tmp_path / "answers-0.jsonl"
    lines = [encoded(number, number == 2, b'{"a": %d}' % number) for number in (1, 2, 3)]
    whole = b"".join(lines)
    for length in range(len(whole) + 1):
        path.write_bytes(whole[:length])
        found = [answer.number for answer in read_log(path, 3)]
        assert found == [1, 2, 3][: whole[:length].count(b"\n")]
    for at in range(len(lines[0]), len(whole) - len(lines[2]) - 1):
        path.write_bytes(whole[:at] + b"\0" + whole[at + 1 :])
        found_now = list(read_log(path, 3))
        assert [answer.number for answer in found_now][:1] == [1]
        assert all(answer.number != 2 or answer.length == len(b'{"a": 2}') for answer in found_now)
    path.write_bytes(whole)
    assert [answer.failed for answer in read_log(path, 3)] == [False, True, False]
    assert [answer.number for answer in read_log(path, 2)] == [1, 2], "a number that no line has"
    assert [answer.number for answer in read_log(path, 3, len(whole) - 1)] == [1, 2]


async def test_answers_that_come_together_are_synced_together(tmp_path: Path) -> None:
    class Counting(Disk):
        num_synced = 0

        def sync(self, fd: int) -> None:
            self.num_synced += 1

    disk = Counting()
    fd = disk.open_new(tmp_path / "log")
    log = AnswerLog(disk, fd)
    await asyncio.gather(*(log.append(b"%d\n" % number) for number in range(100)))
    assert disk.num_synced == 1
    await log.append(b"last\n")
    await log.close()
    assert (tmp_path / "log").read_bytes() == b"".join(b"%d\n" % number for number in range(100)) + b"last\n"


async def test_one_process_at_a_time_has_a_batch(tmp_path: Path) -> None:
    world = World(tmp_path, [line("a")])
    claims, others = LockClaims(), LockClaims()
    first = await claims.claim(world.batch)
    assert await others.claim(world.batch) is None
    await first.release()
    second = await others.claim(world.batch)
    assert await claims.claim(world.batch) is None
    await second.release()


def test_files_of_tenants_are_apart(tmp_path: Path) -> None:
    now = 100.0
    files = FileStore(tmp_path, Disk(), lambda: now)

    def add(tenant: str, expires_at: float | None = None) -> str:
        new = files.new_file(tenant)
        new.write(b"abc")
        info = FileInfo(
            id=new.id, tenant=tenant, num_bytes=3, created_at=now, filename="f", purpose="batch", expires_at=expires_at
        )
        return files.add(new, info).info.id

    of_a, of_b = add("a"), add("b")
    assert files.find(of_a, "b") is None
    assert files.find(of_a, "a") == files.find(of_a, None)
    assert files.ids("a") == [of_a]
    assert set(files.ids(None)) == {of_a, of_b}
    assert files.used_bytes("nobody") == 0
    short = add("a", expires_at=200.0)
    assert files.find(short, "a") is not None
    now = 200.0
    assert files.find(short, "a") is None, "it expired"
    assert files.ids("a") == [of_a]
    found = files.find(of_a, "a")
    assert found is not None
    files.delete(found)
    assert files.used_bytes("a") == 0


def test_leftovers_of_dead_processes_are_removed(tmp_path: Path) -> None:
    files = FileStore(tmp_path, Disk(), time.time)
    batches = BatchStore(tmp_path, Disk(), time.time)
    new = files.new_file("a")
    new.write(b"abc")
    half_made = tmp_path / "tenant-a" / "batches" / new_id(BATCH_PREFIX, 1)
    half_made.mkdir(parents=True)
    (half_made / "input.jsonl").write_bytes(b"abc")
    files.clean()
    batches.clean()
    assert files.used_bytes("a") == 6, "they may be of a process that is at work"
    later = time.time() + 2 * STALE_S
    FileStore(tmp_path, Disk(), lambda: later).clean()
    BatchStore(tmp_path, Disk(), lambda: later).clean()
    assert files.used_bytes("a") == 0
    assert not half_made.exists()


def test_open_batches_of_a_tenant_are_bounded(tmp_path: Path) -> None:
    batches = BatchStore(tmp_path, Disk(), lambda: 0.0, 2)
    content = tmp_path / "content"
    content.write_bytes(b"")
    made = [batches.make(MADE.model_copy(update={"id": new_id(BATCH_PREFIX, at)}), content) for at in (1, 2)]
    another = MADE.model_copy(update={"id": new_id(BATCH_PREFIX, 3)})
    with pytest.raises(Overloaded, match="2 batches that have not ended"):
        batches.make(another, content)
    batches.make(another.model_copy(update={"tenant": "b"}), content)
    made[0].record(Ended(at=4, status="completed"))
    assert [batch.id for batch in batches.open_of("a")] == [made[1].id]
    assert [path.name for path in made[0].path.iterdir() if path.suffix != ".json"] == [], "what it needed is removed"
    batches.make(another, content)
    assert len(batches.ids("a")) == 3
    assert batches.find(made[0].id, "b") is None
    content.unlink()
    with pytest.raises(InvalidRequest, match="input_file_id"):
        batches.make(MADE.model_copy(update={"id": new_id(BATCH_PREFIX, 9), "tenant": "c"}), content)


def test_a_folder_that_cannot_be_used_stops_the_start(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"")
    with pytest.raises(StartError, match="batches_folder"):
        Batches(link(batches_folder=file / "folder"), World(tmp_path / "w", [line("a")]).answer, Drain(), LockClaims())


def test_a_batch_that_is_being_made_is_not_seen(tmp_path: Path) -> None:
    assert BatchFolder(tmp_path, Disk()).facts() is None
