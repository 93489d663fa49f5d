"""Files of JSON lines, written on a thread: placement decisions with their outcomes, and samples of traffic.

Lines beyond the thread's speed are dropped and counted.

Decisions are logged where `decisions_file` is set, for more requests than a router remembers: one line per placement,
with all its inputs, and one per request at its end; both have the request's id. No prompts and no outputs are written.

Samples, for evaluations, are written where `samples_file` is set: `{"request": ...}` with the receipt, and
`{"feedback": ...}` of clients on answers; both have the request's id, and the tenant that asked or rated (with keys,
the key's name too). Texts are kept only where `sample_texts` is set, and with them thumbnails of pictures; otherwise
their lengths.
"""

import asyncio
import json
import logging
import os
import random
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TextIO

from google.protobuf.json_format import MessageToDict

from cluster.errors import InvalidRequest, NotConfigured, Overloaded, StartError
from protos import inference_pb2 as pb
from router.config import RouterConfig
from router.models.media import ReadyMedia
from router.observability.recent_requests import Entry, Placement, Refused
from router.placement.snapshots import read_recorded, recorded
from router.prepared_request import PreparedRequest
from router.security.api_keys import Principal

log = logging.getLogger(__name__)


class JsonLines:
    """File opened for each line: to rotate it, move it away.

    Without a path nothing is written.
    """

    def __init__(self, path: Path | None, setting: str, most_unwritten: int) -> None:
        """Check the file.

        Raises StartError naming the setting where it cannot be written.
        """
        self._path = path
        self._setting = setting
        self._most_unwritten = most_unwritten
        self._thread = ThreadPoolExecutor(1, setting)
        self._lock = threading.Lock()
        self._unwritten = 0
        if path is not None:
            try:
                _open_private(path).close()
            except OSError as error:
                raise StartError(setting, f"cannot write {path}: {error.strerror}") from None

    def write(self, line: Callable[[], dict[str, Any]]) -> bool:
        """Queue a line; `line` is called on the thread.

        Returns False when the line is dropped.
        """
        with self._lock:
            if self._unwritten >= self._most_unwritten:
                return False
            self._unwritten += 1
        self._thread.submit(self._append, line)
        return True

    async def close(self) -> None:
        """Close the writer when all is written."""
        await asyncio.to_thread(self._thread.shutdown)

    def _append(self, line: Callable[[], dict[str, Any]]) -> None:
        assert self._path is not None
        try:
            with _open_private(self._path) as file:
                file.write(json.dumps(line(), separators=(",", ":")) + "\n")
        except OSError as error:
            log.error("a line of %s is lost: %s: %s", self._setting, self._path, error.strerror)
        except Exception:  # otherwise the error would be lost, and the count wrong for ever
            log.exception("a line of %s is lost", self._setting)
        with self._lock:
            self._unwritten -= 1


def _open_private(path: Path) -> TextIO:
    """Open a file to append to it, readable by its owner only: lines may hold prompts.

    Raises OSError.
    """
    return open(path, "a", opener=lambda name, flags: os.open(name, flags, 0o600))


MAX_UNWRITTEN_DECISIONS = 100
"""Lines that may wait to be written; one of a fleet of a hundred has half a megabyte."""


class DecisionLog:
    """Decision log of one router."""

    def __init__(self, config: RouterConfig) -> None:
        """Open the file.

        Raises StartError where it cannot be written.
        """
        self.on = config.decisions_file is not None
        self._lines = JsonLines(config.decisions_file, "decisions_file", MAX_UNWRITTEN_DECISIONS)

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
        return self.on and entry.request_id != ""


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


MAX_TEXT_CHARS = 65_536
"""Longest comment or corrected text, in characters."""
MAX_UNWRITTEN_SAMPLES = 1000
"""Lines that may wait to be written."""


class Samples:
    """Samples of one router."""

    def __init__(self, settings: RouterConfig, seed: int | None = None) -> None:
        """Open the file.

        Raises StartError where it cannot be written.
        """
        self._settings = settings
        self._chance = random.Random(seed)
        self._lines = JsonLines(settings.samples_file, "samples_file", MAX_UNWRITTEN_SAMPLES)

    def wanted(self) -> bool:
        """Return whether to sample a request that has just arrived."""
        settings = self._settings
        return settings.samples_file is not None and self._chance.random() < settings.sample_share

    def served(self, prepared: PreparedRequest, messages: list[bytes]) -> None:
        """Write a successful request; `messages` are those its client received."""
        request, finish = prepared.request, prepared.finish
        assert finish is not None
        line: dict[str, Any] = {
            "request_id": prepared.request_id,
            "at": time.time(),
            "model": prepared.model.name,
            "tenant": request.tenant,
            "session_id": request.session_id,
            "prompt_tokens": len(prepared.prompt),
            "completion_tokens": prepared.num_output_tokens,
            "receipt": MessageToDict(finish.receipt, preserving_proto_field_name=True),
        }
        if self._settings.sample_texts:
            responses = [pb.GenerateResponse.FromString(message) for message in messages]
            line["prompt"] = MessageToDict(
                pb.GenerateRequest(
                    text=request.text, messages=request.messages, token_ids=request.token_ids, media=request.media
                ),
                preserving_proto_field_name=True,
            )
            if prepared.media is not None:  # the request has their places and kinds only
                line["media"] = _media(prepared.media)
                line["items"] = [
                    {"identifier": item.identifier.hex(), "tokens": item.length} for item in prepared.items
                ]
            line["output"] = ["".join(r.text for r in responses if r.index == i) for i in range(prepared.sampling.n)]
        self._lines.write(lambda: {"request": line})

    @property
    def keeps_texts(self) -> bool:
        return self._settings.sample_texts

    def feedback(self, feedback: pb.FeedbackRequest, principal: Principal) -> None:
        """Write feedback with its author, since request ids are the clients' own and not known here.

        Raises InvalidRequest, NotConfigured without a file, and Overloaded while too many lines wait to be written.
        """
        if self._settings.samples_file is None:
            raise NotConfigured("samples_file is not set: this router keeps no feedback")
        if not feedback.request_id:
            raise InvalidRequest("request_id", "is empty")
        if feedback.HasField("rating") and not -1 <= feedback.rating <= 1:
            raise InvalidRequest("rating", f"must be in [-1, 1], not {feedback.rating}")
        for field in ("request_id", "corrected_text", "comment"):
            if len(getattr(feedback, field)) > MAX_TEXT_CHARS:
                raise InvalidRequest(field, f"is longer than {MAX_TEXT_CHARS} characters")
        if not (feedback.HasField("rating") or feedback.corrected_text or feedback.comment):
            raise InvalidRequest("rating", "one of rating, corrected_text and comment must be set")
        values = MessageToDict(feedback, preserving_proto_field_name=True)
        who = {"tenant": principal.tenant or "", "key": principal.name}
        line = values | who | {"at": time.time()}
        if not self._lines.write(lambda: {"feedback": line}):
            raise Overloaded(
                f"{MAX_UNWRITTEN_SAMPLES} lines of samples_file wait to be written, the most that may",
                retry_after_s=1.0,
            )

    async def close(self) -> None:
        """Close the file when all is written."""
        await self._lines.close()


def _media(media: ReadyMedia) -> list[dict[str, Any]]:
    """Return the facts of each medium, and the thumbnails of pictures that have one."""
    told: list[dict[str, Any]] = [{"kind": facts.kind, "bytes": facts.num_bytes} for facts in media.asked.facts]
    pictures = (each for each in told if each["kind"] == "image")
    for picture, thumbnail in zip(pictures, media.thumbnails, strict=False):
        if thumbnail:
            picture["thumbnail"] = thumbnail
    return told
