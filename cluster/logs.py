"""Logging of every process: to standard error, as text or JSON, with the id of the request.

No prompt, completion or secret is ever logged.

Trace context of a request: W3C `traceparent` from gRPC metadata or HTTP headers.
"""

import json
import logging
import os
import sys
from collections.abc import Iterable, Mapping
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import Any

from cluster.errors import StartError
from cluster.settings import LogSettings

HEADER = "traceparent"
_HEX = frozenset("0123456789abcdef")
traceparent: ContextVar[str] = ContextVar(HEADER, default="")
"""Trace context of the request that the current task serves; empty where the client sent none."""


def from_metadata(metadata: Iterable[tuple[str, str | bytes]] | None) -> str:
    """Return the trace context in a gRPC call's metadata."""
    for name, value in metadata or ():
        if name == HEADER and isinstance(value, str):
            return value
    return ""


def from_headers(headers: Mapping[str, str]) -> str:
    """Return the trace context in HTTP headers, whose names are in lower case."""
    return headers.get(HEADER, "")


def trace_id() -> str:
    """Return the trace id of the current task's request; empty without a valid trace context."""
    version, _, rest = traceparent.get().partition("-")
    trace, _, rest = rest.partition("-")
    return trace if len(version) == 2 and len(trace) == 32 and rest and _HEX.issuperset(trace) else ""


VARIABLE = "TANDEM_LOG"
LEVELS = ("debug", "info", "warning", "error")
OURS = (
    "batches", "cluster", "decode_worker", "encode_worker", "engine", "kvcache", "kvtransfer", "loans", "planner",
    "prefill_worker", "preprocessor", "router", "sizing", "tandem", "tandem_connector", "worker", "workloads",
)  # fmt: skip
"""Packages whose loggers follow `log_level`; library loggers never log less than warnings."""
AWAITED = ("engine.model.hub",)
"""Loggers whose few `info` lines are logged at the default level too: somebody waits for what they tell of."""

request_id: ContextVar[str] = ContextVar("request_id", default="")
"""Id of the request that the current task serves; empty where it serves none."""


def set_up(role: str, name: str, settings: LogSettings) -> None:
    """Configure logging for a process.

    The environment variable TANDEM_LOG overrides `log_level`. Raises StartError.
    """
    level = level_of(settings, os.environ)
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter((JsonLines if settings.log_format == "json" else TextLines)(role, name))
    logging.basicConfig(handlers=[handler], level=max(level, logging.WARNING), force=True)
    for package in OURS:
        logging.getLogger(package).setLevel(level)
    for name in AWAITED:
        logging.getLogger(name).setLevel(logging.INFO if level == logging.WARNING else level)


def level_of(settings: LogSettings, environment: Mapping[str, str]) -> int:
    """Return the level as `logging` numbers it.

    Raises StartError for an unknown level in TANDEM_LOG.
    """
    wanted = environment.get(VARIABLE, "").strip().lower() or settings.log_level
    if wanted not in LEVELS:
        raise StartError(VARIABLE, f"unknown level {wanted!r}; known are {', '.join(LEVELS)}")
    return logging.getLevelNamesMapping()[wanted.upper()]


def of(name: str) -> dict[str, str]:
    """Return the `extra` of a log line about this request, where one task serves many requests."""
    return {"request_id": name}


def _request_id_of(record: logging.LogRecord) -> str:
    return str(getattr(record, "request_id", "") or request_id.get())


class TextLines(logging.Formatter):
    """Formatter of text lines: time, level, process, logger, and the request id in brackets."""

    def __init__(self, role: str, name: str) -> None:
        super().__init__("%(asctime)s %(levelname)s %(process_name)s %(name)s%(of_request)s: %(message)s")
        self._process = f"{role} {name}" if name != role else role

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802  # logging's
        of_request = _request_id_of(record)
        if not of_request.isprintable():  # the client chose this id, and a line break in it would forge a log line
            of_request = repr(of_request)
        record.process_name = self._process
        record.of_request = f" [{of_request}]" if of_request else ""
        return super().formatMessage(record)


class JsonLines(logging.Formatter):
    """Formatter of JSON lines, one object each.

    `request_id`, `trace_id` and `exception` are there only if set.
    """

    def __init__(self, role: str, name: str) -> None:
        super().__init__()
        self._process = {"role": role, "process": name}

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "ts": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            **self._process,
            "logger": record.name,
            "message": record.getMessage(),
            "request_id": _request_id_of(record),
            "trace_id": trace_id(),
            "exception": self.formatException(record.exc_info) if record.exc_info else "",
        }
        may_lack = ("request_id", "trace_id", "exception")
        return json.dumps({key: value for key, value in line.items() if value or key not in may_lack})
