"""Layout of the batches folder, and names in it. Pure.

FOLDER/tenant-NAME/files/file-ID.data, .json        a file, visible while it has its record
FOLDER/tenant-NAME/batches/batch_ID/*.json          records of a batch (`records.py`)
                                   input.jsonl      second name of its input: it outlives the file's deletion
                                   answers-N.jsonl  logs, one for each router that had the batch
                                   lock             held by the router that runs it
"""

import hashlib
import re
import secrets
from pathlib import Path
from urllib.parse import quote

MAX_NAME_CHARS = 200
"""Longest tenant name that is used as it is; file systems allow 255 bytes."""
FILE_PREFIX, BATCH_PREFIX = "file-", "batch_"
_ID = re.compile(r"(file-|batch_)[0-9a-f]{32}")


def tenant_folder(root: Path, tenant: str) -> Path:
    name = quote(tenant, safe="")
    if len(name) > MAX_NAME_CHARS:
        name = f"#{hashlib.sha256(tenant.encode()).hexdigest()}"  # quoted names have no such sign
    return root / f"tenant-{name}"


def tenant_folders(root: Path) -> list[Path]:
    return [path for path in root.iterdir() if path.name.startswith("tenant-")]


def new_id(prefix: str, now: float) -> str:
    """Return an id nobody can guess; ids sort by time."""
    return f"{prefix}{_time_part(now)}{secrets.token_hex(10)}"


def derived_id(prefix: str, at: float, *parts: str) -> str:
    """Return the same id for the same arguments."""
    return f"{prefix}{_time_part(at)}{hashlib.sha256(' '.join(parts).encode()).hexdigest()[:20]}"


def is_id(text: str, prefix: str) -> bool:
    """Return whether a text may be an id: only then it is used in a path."""
    return text.startswith(prefix) and _ID.fullmatch(text) is not None


def _time_part(at: float) -> str:
    return f"{int(at * 1000) & (1 << 48) - 1:012x}"
