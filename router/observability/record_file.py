"""File of requests' records and clients' feedback, as JSON lines, for evaluations and for `tandem explain --log`.

Each line has one key. `{"request": ...}` is a request at its end: its record, with the receipt. `{"feedback": ...}` is
what a client says of an answer, with its author. With `record_placements`, `{"placed": ...}` has all inputs of a
placement. Prompts and outputs are written only with `record_texts`, and with them thumbnails of pictures.

A thread writes the lines; those beyond its speed are dropped.
"""

import asyncio
import json
import logging
import os
import random
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TextIO

from google.protobuf.json_format import MessageToDict

from cluster.errors import InvalidRequest, NotConfigured, Overloaded, StartError
from protos import inference_pb2 as pb
from router.config import RouterConfig
from router.models.media import ReadyMedia
from router.observability.records import Placement, Refused, RequestRecord
from router.placement.snapshots import read_recorded, recorded
from router.prepared_request import PreparedRequest
from router.security.api_keys import Principal

log = logging.getLogger(__name__)
MAX_UNWRITTEN = 1000
"""Lines that may wait to be written."""
MAX_UNWRITTEN_PLACED = 100
"""Lines of placements among them; one of a fleet of a hundred has half a megabyte."""
MAX_TEXT_CHARS = 65_536
"""Longest comment or corrected text, in characters."""


class RecordFile:
    """Record file of one router; without `records_file` nothing is written."""

    def __init__(self, config: RouterConfig) -> None:
        """Check the file, which is opened for each line.

        Raises StartError where it cannot be written.
        """
        self._path = config.records_file
        self._share = config.record_share
        self._chance = random.Random()
        self._keeps_placements = self._path is not None and config.record_placements
        self._keeps_texts = self._path is not None and config.record_texts
        self._thread = ThreadPoolExecutor(1, "records_file")
        self._lock = threading.Lock()
        self._num_unwritten = 0
        if self._path is not None:
            try:
                _open_private(self._path).close()
            except OSError as error:
                raise StartError("records_file", f"cannot write {self._path}: {error.strerror}") from None

    def draw(self) -> bool:
        """Return whether `record_share` takes a request that has just arrived."""
        return self._path is not None and self._chance.random() < self._share

    def keeps_texts(self, is_drawn: bool) -> bool:
        """Return whether texts of a request are written, and thumbnails of its pictures made."""
        return is_drawn and self._keeps_texts

    def placed(self, record: RequestRecord, placement: Placement) -> None:
        """Write a placement's inputs."""
        placement_snapshot = placement.placement_snapshot
        if placement_snapshot is None or not self._keeps_placements:
            return
        head = _head(record) | {"attempt": placement.attempt, "placed_after_ms": placement.placed_after_s * 1e3}
        decision = placement.decision
        self._write(lambda: {"placed": head | recorded(decision, placement_snapshot)}, MAX_UNWRITTEN_PLACED)

    def ended(self, record: RequestRecord, texts: Callable[[], dict[str, Any]] | None) -> None:
        """Write a request at its end; `texts` makes the keys with its prompt and output, on the thread."""
        if self._path is None or not record.request_id:
            return
        line = _head(record) | {
            "session_id": record.session_id,
            "error": _without_quotes(record.refusal),
            "prompt_tokens": record.num_prompt_tokens,
            "completion_tokens": record.num_output_tokens,
            "ttft_ms": record.ttft_s * 1e3,
            "total_ms": (record.ended_at - record.arrived_at) * 1e3,
            "placements": [
                {
                    "attempt": placement.attempt,
                    "ttft_ms": None if placement.ttft_s is None else placement.ttft_s * 1e3,
                    "hit_blocks": placement.hit_blocks,
                    "failure": placement.failure,
                }
                for placement in record.placements
            ],
        }
        finish = record.finish

        def whole() -> dict[str, Any]:
            if finish is not None:
                line["receipt"] = MessageToDict(finish.receipt, preserving_proto_field_name=True)
            return {"request": line if texts is None else line | texts()}

        self._write(whole)

    def feedback(self, feedback: pb.FeedbackRequest, principal: Principal) -> None:
        """Write feedback with its author, since request ids are the clients' own and not known here.

        Raises InvalidRequest, NotConfigured without a file, and Overloaded while too many lines wait to be written.
        """
        if self._path is None:
            raise NotConfigured("records_file is not set: this router keeps no feedback")
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
        author = {"tenant": principal.tenant or "", "key": principal.name}
        line = values | author | {"at": time.time()}
        if not self._write(lambda: {"feedback": line}):
            raise Overloaded(
                f"{MAX_UNWRITTEN} lines of records_file wait to be written, the most that may", retry_after_s=1.0
            )

    async def close(self) -> None:
        """Close the writer when all is written."""
        await asyncio.to_thread(self._thread.shutdown)

    def _write(self, line: Callable[[], dict[str, Any]], max_unwritten: int = MAX_UNWRITTEN) -> bool:
        """Queue a line, which is made on the thread; return False when it is dropped."""
        with self._lock:
            if self._num_unwritten >= max_unwritten:
                return False
            self._num_unwritten += 1
        self._thread.submit(self._append, line)
        return True

    def _append(self, line: Callable[[], dict[str, Any]]) -> None:
        assert self._path is not None
        try:
            with _open_private(self._path) as file:
                file.write(json.dumps(line(), separators=(",", ":")) + "\n")
        except OSError as error:
            log.error("a line of records_file is lost: %s: %s", self._path, error.strerror)
        except Exception:  # otherwise the error would be lost, and the count wrong for ever
            log.exception("a line of records_file is lost")
        with self._lock:
            self._num_unwritten -= 1


def texts_of(prepared: PreparedRequest, messages: Sequence[bytes]) -> dict[str, Any]:
    """Return prompt, media and outputs of a request; `messages` are those its client received."""
    request = prepared.request
    prompt = pb.GenerateRequest(
        text=request.text, messages=request.messages, token_ids=request.token_ids, media=request.media
    )
    texts: dict[str, Any] = {"prompt": MessageToDict(prompt, preserving_proto_field_name=True)}
    if prepared.media is not None:  # the request has their places and kinds only
        texts["media"] = _media(prepared.media)
        texts["items"] = [{"identifier": item.identifier.hex(), "tokens": item.length} for item in prepared.items]
    responses = [pb.GenerateResponse.FromString(message) for message in messages]
    texts["output"] = ["".join(r.text for r in responses if r.index == i) for i in range(prepared.sampling.n)]
    return texts


def _media(media: ReadyMedia) -> list[dict[str, Any]]:
    """Return the facts of each medium, and the thumbnails of pictures that have one."""
    values: list[dict[str, Any]] = [{"kind": facts.kind, "bytes": facts.num_bytes} for facts in media.asked.facts]
    pictures = (each for each in values if each["kind"] == "image")
    for picture, thumbnail in zip(pictures, media.thumbnails, strict=False):
        if thumbnail:
            picture["thumbnail"] = thumbnail
    return values


def _open_private(path: Path) -> TextIO:
    """Open a file to append to it, readable by its owner only: lines may hold prompts.

    Raises OSError.
    """
    return open(path, "a", opener=lambda name, flags: os.open(name, flags, 0o600))


def _without_quotes(refusal: Refused | None) -> str:
    """Return an error without the text of invalid requests, which may quote them."""
    if refusal is not None and refusal.is_invalid:
        return f"{refusal.code}: {refusal.field}"
    return "" if refusal is None else f"{refusal.code}: {refusal.text}"


def _head(record: RequestRecord) -> dict[str, Any]:
    return {
        "request_id": record.request_id,
        "at": time.time(),
        "model": record.model,
        "model_reason": record.model_reason,
        "tenant": record.tenant,
    }


def read_record(lines: Iterable[str], request_id: str) -> RequestRecord | None:
    """Read the last request of an id from the lines of a file, or None.

    Other and truncated lines are skipped.
    """
    record: RequestRecord | None = None
    for line in lines:
        if (read := _read(line)) is None or read[1]["request_id"] != request_id:
            continue
        kind, values = read
        if record is None or record.ended:  # another request of that id
            record = RequestRecord(
                *(request_id, values["tenant"], values["at"]),
                model=values["model"],
                model_reason=values["model_reason"],
            )
        if kind == "placed":
            decision, placement_snapshot = read_recorded(values)
            placed_after_s = values["placed_after_ms"] / 1e3
            record.placements.append(Placement(values["attempt"], placed_after_s, decision, placement_snapshot))
            continue
        record.ended = True
        record.refusal = Refused("", "", values["error"], is_invalid=False) if values["error"] else None
        if len(record.placements) == len(values["placements"]):  # otherwise lines were dropped
            for placement, outcome in zip(record.placements, values["placements"], strict=True):
                placement.ttft_s = None if outcome["ttft_ms"] is None else outcome["ttft_ms"] / 1e3
                placement.hit_blocks, placement.failure = outcome["hit_blocks"], outcome["failure"]
    return record


def _read(line: str) -> tuple[str, dict[str, Any]] | None:
    try:
        ((kind, values),) = json.loads(line).items()
        return (kind, values) if kind in ("placed", "request") and "request_id" in values else None
    except (ValueError, AttributeError, TypeError):
        return None
