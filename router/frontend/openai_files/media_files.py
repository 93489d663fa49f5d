"""Uploaded files as pictures, sounds and videos of requests."""

import mimetypes
from collections.abc import Sequence

from cluster.errors import InvalidRequest, NotConfigured, Unavailable
from protos import inference_pb2 as pb
from router.admission.arrivals import Arrival
from router.batches.service import Batches
from router.batches.storage.file_store import StoredFile
from router.frontend.http.body.media import GivenMedium
from router.frontend.http.errors import Caller, HttpRefusal
from router.models.media import sources_of
from router.validation import MEDIA_KINDS


class UploadedMedia:
    """Files of the files API that requests name; a caller reads those that its paths show."""

    def __init__(self, max_bytes: int) -> None:
        """Create it; `max_bytes` is the largest size of one request's files together."""
        self._max_bytes = max_bytes
        self.batches: Batches | None = None
        """Files and batches, once they are open; None without `batches_folder`."""

    async def load(
        self, request: pb.GenerateRequest, media: Sequence[GivenMedium], caller: Caller, arrival: Arrival
    ) -> None:
        """Read the files that the request's last media name; their bytes count as those of its body.

        Raises InvalidRequest, HttpRefusal for an unknown file, NotConfigured and Unavailable.
        """
        if not any(each.file_id for each in media):
            return
        num_bytes = 0
        for source, given in zip(sources_of(request)[-len(media) :], media, strict=True):
            if not given.file_id:
                continue
            file = await self._find(given, caller)
            num_bytes += file.info.num_bytes
            if num_bytes > self._max_bytes:
                reason = f"files of a request may have {self._max_bytes} bytes at most together (max_body_mib)"
                raise HttpRefusal(413, "request_too_large", reason, given.path)
            source.medium.kind = source.medium.kind or _kind(file, given)
            arrival.hold(file.info.num_bytes)
            source.medium.data = await self._content(file, given, caller)

    async def _find(self, given: GivenMedium, caller: Caller) -> StoredFile:
        if self.batches is None:
            raise NotConfigured("batches_folder is not set: this router serves no files", given.path)
        sees = None if caller.principal.operator else caller.tenant
        find = self.batches.files.find
        file: StoredFile | None = await self.batches.threads.fair(caller.tenant, find, given.file_id, sees)
        if file is None:
            raise HttpRefusal(404, "not_found", f"unknown file {given.file_id[:80]!r}", given.path)
        return file

    async def _content(self, file: StoredFile, given: GivenMedium, caller: Caller) -> bytes:
        assert self.batches is not None, "the file was found"
        try:
            return await self.batches.threads.fair(caller.tenant, file.content.read_bytes)
        except OSError as error:
            raise Unavailable(f"the file cannot be read: {error.strerror}", given.path) from None


def _kind(file: StoredFile, given: GivenMedium) -> str:
    """Return what a file is, by its name; one without a known ending counts as a picture."""
    guessed, _ = mimetypes.guess_type(file.info.filename)
    kind = (guessed or "image/").partition("/")[0]
    if kind not in MEDIA_KINDS:
        raise InvalidRequest(given.path, f"must be a picture, a sound or a video, not {guessed}")
    return kind
