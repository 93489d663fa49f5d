"""Traces: known formats and named columns, what is wrong with them, and how much of one is in memory."""

import gzip
import io
import json
import re
import tracemalloc
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protos import inference_pb2 as pb
from workloads.request import BadSetup, BadTrace, TraceRequest
from workloads.traces.columns import parse_columns
from workloads.traces.reading import Trace, Window, served_of
from workloads.traces.receipts import ServedRequest, write_served

GOOD = {"timestamp": 1000, "input_length": 1000, "output_length": 5, "hash_ids": [0, 1]}


def mooncake(path: Path, *lines: object) -> Path:
    text = "\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines)
    path.write_text(text + "\n")
    return path


def read(path: Path, **window: object) -> list[TraceRequest]:
    return list(Trace(path, Window(**window)))  # type: ignore[arg-type]


def test_mooncake(tmp_path: Path) -> None:
    later = GOOD | {"timestamp": 4000, "input_length": 1024, "hash_ids": [0, 7]}
    first, second = read(mooncake(tmp_path / "t", GOOD, "", later))
    assert (first.arrival_s, first.input_tokens, first.output_tokens) == (0.0, 1000, 5)
    assert second.arrival_s == 3.0
    assert first.tokens() == 512 * [0] + 488 * [1]
    assert second.tokens() == 512 * [0] + 512 * [7]


def test_azure(tmp_path: Path) -> None:
    path = mooncake(
        tmp_path / "t.csv",
        "\ufeffTIMESTAMP,ContextTokens,GeneratedTokens\r",
        "2023-11-16 18:15:46.6805900,374,44\r",
        "2023-11-16 18:15:50.9951690,396,109\r",
    )
    first, second = read(path)
    assert (first.input_tokens, first.output_tokens, first.hash_ids) == (374, 44, ())
    assert second.arrival_s == pytest.approx(4.314579, abs=1e-6)
    assert not set(first.tokens()) & set(second.tokens())


def test_azure_with_a_zone(tmp_path: Path) -> None:
    path = mooncake(
        tmp_path / "t.csv",
        "TIMESTAMP,ContextTokens,GeneratedTokens",
        "2024-05-10 00:00:00.009930+00:00,2162,5",
        "2024-05-10 00:00:01+00:00,2399,6",
        "2024-05-10 02:00:01.5+02:00,76,15",
        "2024-05-10 00:00:02.25Z,76,15",
        "2024-05-10 00:00:03,76,15",
    )
    arrivals = [request.arrival_s for request in read(path)]
    assert arrivals == pytest.approx([0.0, 0.99007, 1.49007, 2.24007, 2.99007], abs=1e-6)


def test_burst_gpt(tmp_path: Path) -> None:
    """Several requests share a second, and failed ones have no output."""
    path = mooncake(
        tmp_path / "t.csv",
        "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type",
        "5,ChatGPT,472,18,490,Conversation log",
        "45,ChatGPT,1087,230,1317,Conversation log",
        "45,GPT-4,417,276,693,Conversation log",
        "46,GPT-4,417,0,417,API log",
    )
    trace = Trace(path, Window())
    lengths = [(request.arrival_s, request.input_tokens, request.output_tokens) for request in trace]
    assert lengths == [(0.0, 472, 18), (40.0, 1087, 230), (40.0, 417, 276)]
    assert trace.num_failed == 1
    assert [request.input_tokens for request in read(path, model="GPT-4")] == [417]
    with pytest.raises(BadTrace, match="no request of model 'gpt-4'; models: ChatGPT, GPT-4"):
        read(path, model="gpt-4")


def lengths_of(path: Path, columns: str = "") -> list[tuple[float, int, int, str]]:
    trace = Trace(path, Window(), parse_columns(columns) if columns else None)
    return [(each.arrival_s, each.input_tokens, each.output_tokens, each.session_id) for each in trace]


def test_the_spend_log_of_a_gateway(tmp_path: Path) -> None:
    """LiteLLM writes a row when a request ends, so its lines are in another order than its requests."""
    rows = [
        {"startTime": "2026-10-01T12:00:02.5Z", "prompt_tokens": 30, "completion_tokens": 5, "session_id": "b"},
        {"startTime": "2026-10-01T12:00:00Z", "prompt_tokens": 10, "completion_tokens": 700, "session_id": None},
        {"startTime": "2026-10-01T12:00:03Z", "prompt_tokens": 0, "completion_tokens": 0, "status": "failure"},
    ]
    expected = [(0.0, 10, 700, ""), (2.5, 30, 5, "b")]
    assert lengths_of(mooncake(tmp_path / "json", *rows)) == expected
    table = mooncake(
        tmp_path / "csv",
        "request_id,startTime,model,prompt_tokens,completion_tokens,session_id,messages",
        'r1,2026-10-01 12:00:02.500,m,30,5,b,"[{""role"":',
        '""user""}]"',
        "r2,2026-10-01 12:00:00+00,m,10,700.0,,{}",
        "r3,2026-10-01 12:00:03 UTC,m,,,,{}",
    )
    assert lengths_of(table) == expected


def test_spans(tmp_path: Path) -> None:
    """A line of OpenTelemetry's file exporter has many spans; only calls of a model are requests."""

    def span(start_s: int, **attributes: object) -> dict[str, object]:
        values = [
            {"key": key.replace("__", "."), "value": {"intValue": str(value)}} for key, value in attributes.items()
        ]
        session = {"key": "gen_ai.conversation.id", "value": {"stringValue": "c"}}
        return {"startTimeUnixNano": f"{1_790_000_000 + start_s}000000000", "attributes": [*values, session]}

    agent = span(0, gen_ai__usage__input_tokens=99, gen_ai__usage__output_tokens=99)
    agent["attributes"] += [{"key": "gen_ai.operation.name", "value": {"stringValue": "invoke_agent"}}]  # type: ignore[operator]
    spans = [
        span(4, gen_ai__usage__input_tokens=40, gen_ai__usage__output_tokens=4),
        span(2, gen_ai__usage__prompt_tokens=20, gen_ai__usage__completion_tokens=2),
        span(3, http__request__method=1),
        span(3, gen_ai__usage__input_tokens=7),
        agent,
    ]
    path = mooncake(tmp_path / "t", {"resourceSpans": [{"scopeSpans": [{"spans": spans}]}]})
    assert lengths_of(path) == [(0.0, 20, 2, "c"), (2.0, 40, 4, "c")]
    flat = {"start_time": "2026-10-01T12:00:00Z", "attributes": {"gen_ai.usage.input_tokens": 8, "gen_ai.usage": {}}}
    flat["attributes"]["gen_ai.usage.output_tokens"] = 3  # type: ignore[index]
    usage = "attributes.gen_ai.usage"
    names = f"time=start_time,prompt={usage}.input_tokens,output={usage}.output_tokens"
    assert lengths_of(mooncake(tmp_path / "flat", flat), names) == [(0.0, 8, 3, "")]


@pytest.mark.parametrize(
    ("columns", "first", "second"),
    [
        ("time=at,prompt=use.in,output=use.out,session=who", 10.5, 12),
        ("time=at:ms,prompt=use.in,output=use.out,session=who", 10_500, "12000"),
        ("time=at,prompt=use.in,output=use.out,session=who", 1_790_000_000_500, 1_790_000_002_000),
        ("time=at,prompt=use.in,output=use.out,session=who", "1790000000500000000", "1790000002000000000"),
        ("time=at,prompt=use.in,output=use.out,session=who", "2026-10-01 12:00:00.5", "2026-10-01T14:00:02+02:00"),
    ],
)
def test_named_columns(tmp_path: Path, columns: str, first: object, second: object) -> None:
    later = {"at": second, "use": {"in": 5, "out": "6"}, "who": 7}
    path = mooncake(tmp_path / "t", later, {"at": first, "use": {"in": 3, "out": 4}, "who": "x"})
    assert [(round(at, 6), *rest) for at, *rest in lengths_of(path, columns)] == [(0.0, 3, 4, "x"), (1.5, 5, 6, "7")]


@pytest.mark.parametrize(
    ("columns", "lines", "reason"),
    [
        ("time=t,prompt=p,output=o", ["t,p", "1,2"], "line 1: has no column 'o' of --columns; it has 't, p'"),
        ("time=t,prompt=p,output=o", [{"t": 1, "p": 2}], "line 1: o is missing"),
        ("time=t,prompt=p,output=o,session=s", [{"t": 1, "p": 2, "o": 3}], "line 1: s is missing"),
        ("time=t,prompt=p,output=o", ["t,p,o", "1,2,3", "noon,2,3"], "line 3: t is 'noon', not a time such as 12.5"),
        ("time=t,prompt=p,output=o", ["t,p,o", "1,2.5,3"], "line 2: p is '2.5', not a whole number"),
        ("time=t,prompt=p,output=o", [[{"t": 1}]], "is a JSON array: write one object a line"),
        ("", ["a,b", "1,2"], "BurstGPT's has Timestamp, Request tokens, Response tokens"),
        ("", ["t,p", "1,2"], "name columns by --columns"),
    ],
)
def test_what_a_column_lacks_is_named(tmp_path: Path, columns: str, lines: list[object], reason: str) -> None:
    with pytest.raises(BadTrace, match=re.escape(reason)):
        lengths_of(mooncake(tmp_path / "t", *lines), columns)


@pytest.mark.parametrize(
    ("columns", "reason"),
    [
        ("time=t,prompt=p", "output must be named"),
        ("when=t", "'when=t' is not FIELD=COLUMN; fields are time, prompt, output, session, model"),
        ("time=t,prompt=", "'prompt=' is not FIELD=COLUMN"),
        ("time=t,time=u,prompt=p,output=o", "time is given twice"),
    ],
)
def test_columns_that_are_not_understood(columns: str, reason: str) -> None:
    with pytest.raises(BadSetup, match=reason) as caught:
        parse_columns(columns)
    assert caught.value.field == "columns"


def test_a_trace_is_no_log_of_receipts(tmp_path: Path) -> None:
    with pytest.raises(BadTrace, match="whose receipts have the times of stages"):
        list(served_of(mooncake(tmp_path / "t", "Timestamp,Request tokens,Response tokens", "1,2,3")))


def test_receipts_are_read_as_they_were_written(tmp_path: Path) -> None:
    file = io.StringIO()
    prompts = [(6, [0, 1]), (9, [0, 2, 3]), (2, [4])]
    for number, (length, blocks) in enumerate(prompts):
        receipt = pb.Receipt(request_id=f"r{number}")
        write_served(file, ServedRequest(10.0 + number, length, 3, 4, blocks, 0.5, 0.01, receipt, "tenant", 2))
    path = tmp_path / "log"
    path.write_text(file.getvalue())
    assert json.loads(file.getvalue().splitlines()[0])["receipt"] == {"request_id": "r0"}
    requests = read(path)
    assert [request.arrival_s for request in requests] == [0.0, 1.0, 2.0]
    assert [(request.tenant, request.priority, request.output_tokens) for request in requests] == 3 * [("tenant", 2, 3)]
    tokens = [request.tokens() for request in requests]
    assert [len(each) for each in tokens] == [6, 9, 2]
    assert tokens[0][:4] == tokens[1][:4]
    assert tokens[0][4] != tokens[1][4]  # [5, 6] is another end than [5, 6, 7, 8]
    assert tokens[2][0] not in tokens[0] + tokens[1]


@pytest.mark.parametrize(
    ("second", "reason"),
    [
        ("{", "is not JSON"),
        ("[1]", "is not a JSON object"),
        ("[" * 100_000, "not JSON"),
        (GOOD | {"input_length": -3}, "input_length is -3"),
        (GOOD | {"input_length": 0, "hash_ids": []}, "input_length is 0"),
        (GOOD | {"output_length": 1.5}, "output_length is 1.5"),
        (GOOD | {"output_length": True}, "output_length is True"),
        ({"timestamp": 5000, "input_length": 3}, "output_length is missing"),
        (GOOD | {"timestamp": "now"}, "timestamp is 'now'"),
        (GOOD | {"timestamp": float("nan")}, "timestamp is nan"),
        (GOOD | {"timestamp": 999}, "before the line above"),
        (GOOD | {"hash_ids": [0], "input_length": 1024}, "a prompt of 1024 tokens has 2, of 512"),
        (GOOD | {"hash_ids": [0, 1, 2]}, "hash_ids has 3"),
        (GOOD | {"hash_ids": [0, "x"]}, "not a list of whole numbers"),
        (GOOD | {"hash_ids": [0, 1 << 40]}, "outside"),
        (GOOD | {"input_length": 1 << 60}, "input_length is"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, second: object, reason: str) -> None:
    path = mooncake(tmp_path / "t", GOOD, second)
    with pytest.raises(BadTrace) as caught:
        read(path)
    assert caught.value.line == 2
    assert reason in str(caught.value)
    assert str(caught.value).startswith(f"{path}, line 2: ")


@pytest.mark.parametrize(
    ("content", "line", "reason"),
    [
        (b"", 0, "is empty"),
        (b"\n \n", 0, "is empty"),
        (b"\xff\xfe\x00", 1, "not UTF-8"),
        (b"hello\n", 1, "neither JSON nor a CSV header"),
        (b"TIMESTAMP,ContextTokens\n", 1, "GeneratedTokens"),
        (b"TIMESTAMP,ContextTokens,GeneratedTokens\nyesterday,1,1\n", 2, "not a time"),
        (b"TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46,1\n", 2, "has 2 columns"),
        (b"TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46,-1,2\n", 2, "ContextTokens is -1, not 0"),
        (b"TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46,many,2\n", 2, "ContextTokens is 'many'"),
        (b'{"a": 1}\n', 1, "an unknown format"),
        (b"{" + 17 * (1 << 20) * b" ", 1, "is longer than"),
        (gzip.compress(b"{}", mtime=0), 0, r"is compressed \(gzip\): unpack it first"),
        (
            b"TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46," + 100_000 * b"x" + b",2\n",
            2,
            r"x\.\.\., not",
        ),
    ],
)
def test_a_file_that_is_no_trace(tmp_path: Path, content: bytes, line: int, reason: str) -> None:
    path = tmp_path / "t"
    path.write_bytes(content)
    with pytest.raises(BadTrace, match=reason) as caught:
        read(path)
    assert caught.value.line == line
    assert len(str(caught.value)) < 400


def test_a_file_that_may_not_be_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    trace = Trace(mooncake(tmp_path / "t", GOOD), Window())
    monkeypatch.setattr(Path, "open", forbidden)
    with pytest.raises(BadTrace, match="Permission denied"):
        list(trace)
    monkeypatch.setattr(Path, "is_file", forbidden)
    with pytest.raises(BadTrace, match="Permission denied"):
        Trace(tmp_path / "t", Window())


def test_no_file(tmp_path: Path) -> None:
    with pytest.raises(BadTrace, match="is not a file"):
        Trace(tmp_path, Window())


@pytest.mark.parametrize("field", ["rate", "duration_s", "most", "start_s", "spread_s"])
def test_a_window_that_makes_no_sense(field: str) -> None:
    with pytest.raises(BadSetup):
        Window(**{field: -1})
    with pytest.raises(BadSetup):
        Window(**{field: 0.0} if field in ("rate", "duration_s") else {"most": 0})


def test_windows(tmp_path: Path) -> None:
    path = mooncake(tmp_path / "t", *(GOOD | {"timestamp": 1000 * second} for second in range(10, 20)))
    assert [r.arrival_s for r in read(path, start_s=2.0, duration_s=3.0)] == [0.0, 1.0, 2.0]
    assert [r.arrival_s for r in read(path, rate=4.0, most=3)] == [0.0, 0.25, 0.5]
    with pytest.raises(BadTrace, match="window"):
        read(path, start_s=100.0)


@settings(max_examples=50)
@given(
    rows=st.lists(st.tuples(st.integers(0, 20), st.integers(1, 5000), st.integers(1, 500)), min_size=1, max_size=60),
    spread_s=st.floats(0, 10),
    seed=st.integers(0, 1000),
)
def test_spread_keeps_order_of_time_and_every_request(
    tmp_path_factory: pytest.TempPathFactory, rows: list[tuple[int, int, int]], spread_s: float, seed: int
) -> None:
    rows.sort(key=lambda row: row[0])
    path = tmp_path_factory.mktemp("trace") / "t"
    mooncake(path, *({"timestamp": 1e3 * at, "input_length": i, "output_length": o} for at, i, o in rows))
    trace = Trace(path, Window(spread_s=spread_s, seed=seed))
    requests = list(trace)
    assert requests == list(trace)
    assert [request.number for request in requests] == list(range(len(rows)))
    arrivals = [request.arrival_s for request in requests]
    assert arrivals == sorted(arrivals)
    assert sorted((r.input_tokens, r.output_tokens) for r in requests) == sorted((i, o) for _, i, o in rows)
    assert arrivals[-1] <= rows[-1][0] - rows[0][0] + spread_s


@settings(max_examples=100)
@given(content=st.binary(max_size=300) | st.text(max_size=300).map(str.encode))
def test_whatever_it_is_it_is_read_or_named(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    path = tmp_path_factory.mktemp("trace") / "t"
    path.write_bytes(content)
    with pytest.raises(BadTrace):
        read(path)


def test_a_large_trace_is_a_stream(tmp_path: Path) -> None:
    """So is one of a gigabyte: what is in memory does not grow with it."""
    path = tmp_path / "t"
    line = json.dumps({"timestamp": 1, "input_length": 500 * 512, "output_length": 1, "hash_ids": list(range(500))})
    with path.open("w") as file:
        for number in range(5000):
            file.write(line.replace('"timestamp": 1,', f'"timestamp": {number},') + "\n")
    assert path.stat().st_size > 12_000_000
    tracemalloc.start()
    count = sum(1 for _ in Trace(path, Window(spread_s=0.01)))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert count == 5000
    assert peak < 4 << 20
