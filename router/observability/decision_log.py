"""Log of placement decisions and their outcomes in a file, for more requests than a router remembers.

Off unless `decisions_file` is set. One line of JSON per placement, with all its inputs, and one per request at its end;
both have the request's id. No prompts and no outputs are written.
"""

import json
import time
import zlib
from collections.abc import Iterable
from typing import Any

from google.protobuf.json_format import MessageToDict

from protos import inference_pb2 as pb
from router.config import RouterConfig
from router.observability.decision_history import Entry, Placement, Refused
from router.observability.json_lines import JsonLines
from router.placement.snapshots.decision_codec import read_recorded, recorded

MAX_UNWRITTEN = 100
"""Lines that may wait to be written; one of a fleet of a hundred has half a megabyte."""


class DecisionLog:
    """Decision log of one router."""

    def __init__(self, config: RouterConfig) -> None:
        """Open the file.

        Raises StartError where it cannot be written.
        """
        self._share = config.decision_share if config.decisions_file is not None else 0.0
        self._lines = JsonLines(config.decisions_file, "decisions_file", MAX_UNWRITTEN)

    @property
    def on(self) -> bool:
        return self._share > 0

    def placed(self, entry: Entry, placement: Placement) -> None:
        placement_snapshot = placement.placement_snapshot
        if placement_snapshot is None or not self._wanted(entry):
            return
        head = _head(entry) | {"attempt": placement.attempt, "placed_after_ms": placement.placed_after_s * 1e3}
        decision = placement.decision
        self._lines.write(lambda: {"placed": head | recorded(decision, placement_snapshot)})

    def ended(self, entry: Entry, finish: pb.Finish | None) -> None:
        """Log the end of a request; `finish` ended its stream well."""
        if not self._wanted(entry):
            return
        line = _head(entry) | {
            "error": _said(entry.refusal),
            "placements": [
                {
                    "attempt": placement.attempt,
                    "ttft_ms": None if placement.ttft_s is None else placement.ttft_s * 1e3,
                    "hit_blocks": placement.hit_blocks,
                    "failure": placement.failure,
                }
                for placement in entry.placements
            ],
        }
        if finish is not None:
            line["receipt"] = MessageToDict(finish.receipt, preserving_proto_field_name=True)
        self._lines.write(lambda: {"ended": line})

    async def close(self) -> None:
        """Close the file when all is written."""
        await self._lines.close()

    def _wanted(self, entry: Entry) -> bool:
        """Return whether to log a request, the same answer for all its lines."""
        return self.on and entry.request_id != "" and zlib.crc32(entry.request_id.encode()) < self._share * 2**32


def _said(refusal: Refused | None) -> str:
    """Return an error without the text of invalid requests, which may quote them."""
    if refusal is not None and refusal.is_invalid:
        return f"{refusal.code}: {refusal.field}"
    return "" if refusal is None else f"{refusal.code}: {refusal.text}"


def _head(entry: Entry) -> dict[str, Any]:
    return {
        "request_id": entry.request_id,
        "at": time.time(),
        "model": entry.model,
        "model_reason": entry.model_reason,
        "tenant": entry.tenant,
    }


def read_decisions(lines: Iterable[str], request_id: str) -> Entry | None:
    """Read a request from a file, or None.

    Foreign and truncated lines are skipped.
    """
    entry: Entry | None = None
    for line in lines:
        if (read := _read(line)) is None or read[1]["request_id"] != request_id:
            continue
        kind, values = read
        if entry is None or entry.ended:  # another request of that id
            entry = Entry(request_id, values["tenant"], values["at"], values["model"], values["model_reason"])
        if kind == "placed":
            decision, placement_snapshot = read_recorded(values)
            entry.placements.append(
                Placement(values["attempt"], values["placed_after_ms"] / 1e3, decision, placement_snapshot)
            )
            continue
        entry.ended = True
        entry.refusal = Refused("", "", values["error"], is_invalid=False) if values["error"] else None
        if len(entry.placements) == len(values["placements"]):  # otherwise lines were dropped
            for placement, became in zip(entry.placements, values["placements"], strict=True):
                placement.ttft_s = None if became["ttft_ms"] is None else became["ttft_ms"] / 1e3
                placement.hit_blocks, placement.failure = became["hit_blocks"], became["failure"]
    return entry


def _read(line: str) -> tuple[str, dict[str, Any]] | None:
    try:
        ((kind, values),) = json.loads(line).items()
        return (kind, values) if kind in ("placed", "ended") and "request_id" in values else None
    except (ValueError, AttributeError, TypeError):
        return None
