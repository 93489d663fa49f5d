"""Records of files and batches, one JSON file each. A record is written once and never changes."""

from typing import Literal

from pydantic import BaseModel, ConfigDict

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
