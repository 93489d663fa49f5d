"""Log lines: what stands in each, and whose they are."""

import json
import logging
import subprocess
import sys
from contextvars import copy_context
from typing import Any

import pytest

from cluster.errors import StartError
from cluster.logs import JsonLines, TextLines, level_of, of, request_id, trace_id, traceparent
from cluster.settings import LogSettings
from router.config import RouterConfig

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"


def _record(
    message: str = "attempt %d failed", extra: dict[str, str] | None = None, **fields: Any
) -> logging.LogRecord:
    record = logging.LogRecord("router.request_path.request_handler", logging.INFO, "here", 1, message, (2,), None)
    vars(record).update(fields | (extra or {}))
    return record


def _serving(name: str, parent: str = "") -> None:
    request_id.set(name)
    traceparent.set(parent)


def test_a_line_of_json_says_whose_it_is() -> None:
    def line() -> dict[str, str]:
        _serving("r-1", f"00-{TRACE}-00f067aa0ba902b7-01")
        said: dict[str, str] = json.loads(JsonLines("router", "router-a").format(_record(created=1.5)))
        return said

    assert copy_context().run(line) == {
        "ts": "1970-01-01T00:00:01.500+00:00",
        "level": "info",
        "role": "router",
        "process": "router-a",
        "logger": "router.request_path.request_handler",
        "message": "attempt 2 failed",
        "request_id": "r-1",
        "trace_id": TRACE,
    }


def test_a_line_of_no_request_has_no_id() -> None:
    lines = JsonLines("router", "router-a"), TextLines("router", "router-a")
    as_json, as_text = (each.format(_record()) for each in lines)
    assert not {"request_id", "trace_id", "exception"} & json.loads(as_json).keys()
    assert as_text.endswith("INFO router router-a router.request_path.request_handler: attempt 2 failed")


def test_an_exception_is_one_line_of_json() -> None:
    try:
        raise ValueError("two\nlines")
    except ValueError:
        line = JsonLines("decode", "d").format(_record(exc_info=sys.exc_info()))
    assert "\n" not in line
    assert "ValueError: two\nlines" in json.loads(line)["exception"]


def test_where_a_task_serves_many_the_line_names_its_request() -> None:
    def line(name: str) -> str:
        _serving("another")
        return TextLines("decode", "d").format(_record(extra=of(name)))

    assert " router.request_path.request_handler [r-7]: attempt" in copy_context().run(line, "r-7")
    assert " router.request_path.request_handler ['r\\n7']: attempt" in copy_context().run(line, "r\n7"), (
        "no id forges a line"
    )


@pytest.mark.parametrize("sent", ["", "nonsense", "00-1234-5678-01", f"00-{TRACE[:-1]}g-00f067aa0ba902b7-01"])
def test_what_is_no_trace_is_not_logged_as_one(sent: str) -> None:
    def found() -> str:
        traceparent.set(sent)
        return trace_id()

    assert copy_context().run(found) == ""


def test_the_environment_goes_before_the_settings() -> None:
    settings = LogSettings(log_level="error")
    assert level_of(settings, {}) == logging.ERROR
    assert level_of(settings, {"TANDEM_LOG": "DEBUG"}) == logging.DEBUG
    with pytest.raises(StartError, match=r"TANDEM_LOG: unknown level 'bogus'; known are debug, info, warning, error"):
        level_of(settings, {"TANDEM_LOG": "bogus"})
    with pytest.raises(StartError, match="log_format"):
        RouterConfig.parse({"model": "m", "log_format": "xml"})


def test_libraries_say_no_less_than_warnings() -> None:
    program = (
        "import logging; from cluster.logs import set_up; from cluster.settings import LogSettings\n"
        "set_up('planner', 'p', LogSettings(log_level='debug', log_format='json'))\n"
        "for name in ('grpc._cython.cygrpc', 'asyncio', 'httpx', 'planner.runtime'):\n"
        "    logging.getLogger(name).debug(name)"
    )
    said = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stderr
    assert [json.loads(line)["message"] for line in said.splitlines()] == ["planner.runtime"]


def test_a_role_refuses_a_level_that_is_none() -> None:
    command = [sys.executable, "-m", "planner", "--set", "switch=true"]
    ended = subprocess.run(command, env={"TANDEM_LOG": "bogus"}, capture_output=True, text=True)
    assert (ended.returncode, ended.stderr.count("\n")) == (2, 1)
    assert ended.stderr.startswith("error: TANDEM_LOG: ")
