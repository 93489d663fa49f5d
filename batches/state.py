"""States of a batch. Pure.

    validating ──▶ in_progress ──▶ finalizing ──▶ completed
        │              │               └────────▶ expired      (completion_window is over)
        │              └─▶ cancelling ──────────▶ cancelled
        ▼
      failed (the input is at fault)

A batch that has not been checked may be cancelled and expire too.

Records of files and batches, one JSON file each. A record is written once and never changes.
"""

import re
from enum import Enum, auto
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from cluster.errors import InvalidRequest

Outcome = Literal["completed", "cancelled", "expired"]
"""Ways in which a batch that was started ends."""


class Record(BaseModel):
    """Base class of records; fields of a newer router are ignored."""

    model_config = ConfigDict(frozen=True, extra="ignore")


class FileInfo(Record):
    """A stored file."""

    id: str
    tenant: str
    num_bytes: int
    created_at: float
    filename: str
    purpose: str
    expires_at: float | None = None
    """Time from which the file counts as deleted."""


class Made(Record):
    """A batch as it was asked for."""

    id: str
    tenant: str
    key: str
    """Name of the API key by which it was made; empty where none is needed."""
    endpoint: str
    input_file_id: str
    completion_window: str
    created_at: float
    expires_at: float
    metadata: dict[str, str] | None = None
    output_lasts_s: int | None = None
    """Seconds after which the output files expire."""


class Checked(Record):
    """A batch whose input is in order."""

    at: float
    num_lines: int


class Cancelled(Record):
    """A batch that a client cancelled."""

    at: float


class Decided(Record):
    """End of a batch's running, from which its outputs follow."""

    at: float
    outcome: Outcome
    log_bytes: dict[str, int]
    """Bytes of each log that count; later ones are of a router that had lost the batch."""


class Fault(Record):
    """A fault of an input."""

    code: str
    message: str
    line: int | None = None
    """Number of the line, from 1."""
    param: str | None = None


class Ended(Record):
    """The end of a batch."""

    at: float
    status: Literal["failed", "completed", "expired", "cancelled"]
    completed: int = 0
    failed: int = 0
    output_file_id: str | None = None
    error_file_id: str | None = None
    faults: tuple[Fault, ...] = ()


class Progress(Record):
    """Answers so far, for display; the only record that is replaced."""

    completed: int = 0
    failed: int = 0


class Facts(Record):
    """All records of a batch."""

    made: Made
    checked: Checked | None = None
    cancelled: Cancelled | None = None
    decided: Decided | None = None
    ended: Ended | None = None


MAX_WINDOW_S = 7 * 86_400
_WINDOW = re.compile(r"([1-9][0-9]{0,5})([hm])")
_UNIT_S = {"h": 3600, "m": 60}


class Step(Enum):
    """Next thing to do for a batch."""

    CHECK = auto()
    """Check the input."""
    ANSWER = auto()
    """Answer lines; when none is left, the batch is completed."""
    END_CANCELLED = auto()
    """Record that it was cancelled."""
    END_EXPIRED = auto()
    """Record that its time is over."""
    MAKE_OUTPUTS = auto()
    """Make the output files and record the end."""
    NOTHING = auto()


def next_step(facts: Facts, now: float) -> Step:
    if facts.ended is not None:
        return Step.NOTHING
    if facts.decided is not None:
        return Step.MAKE_OUTPUTS
    if facts.cancelled is not None:
        return Step.END_CANCELLED
    if now >= facts.made.expires_at:
        return Step.END_EXPIRED
    return Step.CHECK if facts.checked is None else Step.ANSWER


def status_of(facts: Facts) -> str:
    """Return the status in OpenAI's words."""
    if facts.ended is not None:
        return facts.ended.status
    if facts.decided is not None and facts.decided.outcome != "cancelled":
        return "finalizing"
    if facts.cancelled is not None:
        return "cancelling"
    return "validating" if facts.checked is None else "in_progress"


def batch_object(facts: Facts, progress: Progress) -> dict[str, Any]:
    """Return OpenAI's object of a batch; `progress` is used until its end."""
    made, ended = facts.made, facts.ended
    counted = progress if ended is None else ended
    is_final = facts.decided is not None and facts.decided.outcome != "cancelled"
    values: dict[str, Any] = {
        "id": made.id,
        "object": "batch",
        "endpoint": made.endpoint,
        "errors": None,
        "input_file_id": made.input_file_id,
        "completion_window": made.completion_window,
        "status": status_of(facts),
        "output_file_id": ended and ended.output_file_id,
        "error_file_id": ended and ended.error_file_id,
        "created_at": int(made.created_at),
        "in_progress_at": facts.checked and int(facts.checked.at),
        "expires_at": int(made.expires_at),
        "finalizing_at": int(facts.decided.at) if facts.decided is not None and is_final else None,
        "cancelling_at": facts.cancelled and int(facts.cancelled.at),
        "request_counts": {
            "total": facts.checked.num_lines if facts.checked is not None else 0,
            "completed": counted.completed,
            "failed": counted.failed,
        },
        "metadata": made.metadata,
    }
    values |= {f"{status}_at": None for status in ("completed", "failed", "expired", "cancelled")}
    if ended is not None:
        values[f"{ended.status}_at"] = int(ended.at)
        if ended.faults:
            values["errors"] = {"object": "list", "data": [_fault(fault) for fault in ended.faults]}
    return values


def window_s(completion_window: str) -> int:
    """Return the seconds of a window such as 24h or 30m.

    Raises InvalidRequest.
    """
    match = _WINDOW.fullmatch(completion_window)
    seconds = int(match[1]) * _UNIT_S[match[2]] if match else 0
    if not 0 < seconds <= MAX_WINDOW_S:
        longest = f"{MAX_WINDOW_S // 3600}h"
        raise InvalidRequest(
            "completion_window", f"must be 24h, or other hours or minutes such as 2h or 30m, up to {longest}"
        )
    return seconds


def _fault(fault: Fault) -> dict[str, Any]:
    return {"code": fault.code, "message": fault.message, "param": fault.param, "line": fault.line}
