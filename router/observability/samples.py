"""Samples of traffic for evaluations: some requests with their receipts, and clients' feedback on answers.

Off unless `samples_file` is set. One line of JSON each: `{"request": ...}` with the receipt, and `{"feedback": ...}`;
both have the request's id, and the tenant that asked or rated (with keys, the key's name too). Texts are kept only
where `sample_texts` is set, and with them thumbnails of pictures; otherwise their lengths.
"""

import random
import time
from typing import Any

from google.protobuf.json_format import MessageToDict

from cluster.errors import InvalidRequest, NotConfigured, Overloaded
from protos import inference_pb2 as pb
from router.config import RouterConfig
from router.models.media import ReadyMedia
from router.observability.json_lines import JsonLines
from router.prepared_request import PreparedRequest
from router.security.api_keys import Principal

MAX_TEXT_CHARS = 65_536
"""Longest comment or corrected text, in characters."""
MAX_UNWRITTEN = 1000
"""Lines that may wait to be written."""


class Samples:
    """Samples of one router."""

    def __init__(self, settings: RouterConfig, seed: int | None = None) -> None:
        """Open the file.

        Raises StartError where it cannot be written.
        """
        self._settings = settings
        self._chance = random.Random(seed)
        self._lines = JsonLines(settings.samples_file, "samples_file", MAX_UNWRITTEN)

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
                f"{MAX_UNWRITTEN} lines of samples_file wait to be written, the most that may", retry_after_s=1.0
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
