"""Requests of routers on this worker, each a channel of a router's connection.

Tokens are collected until a frame can be sent, so a router that reads slowly gets fewer, larger messages.
"""

import asyncio
import logging
from collections.abc import Callable

from google.protobuf.message import DecodeError

from cluster.errors import DeadlineExceeded, InvalidRequest, ServiceError
from cluster.logs import of
from cluster.network.error_status import to_proto
from cluster.network.mux import FULL_PART_BYTES, Channel
from protos import decode_pb2 as pb
from protos import mux_pb2
from worker.requests.decode_attempt import DecodeAttempt

log = logging.getLogger(__name__)

Begin = Callable[[pb.DecodeRequest, Callable[[], object]], DecodeAttempt]
"""Factory of attempts. Raises ServiceError."""


def serve_request(begin: Begin, channel: Channel, opening: bytes) -> None:
    """Serve a request that a router placed here, until it is over or the router or the connection ends its channel."""
    request = pb.DecodeRequest()
    try:
        request.ParseFromString(opening)
        attempt = begin(request, channel.ready)
    except ServiceError as refusal:
        channel.end(_status(refusal))
    except DecodeError as error:
        channel.end(_status(InvalidRequest("request", f"is not a valid message: {error}")))
    except Exception as error:
        channel.end(_status(_bug(error, request.request_id)))
    else:
        served = _ServedRequest(request, attempt)
        channel.take_from(served.add_to)
        channel.on_end = served.close


class _ServedRequest:
    """A request whose attempt has begun."""

    def __init__(self, request: pb.DecodeRequest, attempt: DecodeAttempt) -> None:
        self._request_id = request.request_id
        self._attempt = attempt
        self._timer: asyncio.TimerHandle | None = None
        if request.timeout_ms > 0:
            failure = DeadlineExceeded("the deadline passed before the request was done")
            self._timer = asyncio.get_running_loop().call_later(request.timeout_ms / 1e3, attempt.fail, failure)

    def add_to(self, part: mux_pb2.Part) -> bool:
        """Move messages into a part of a frame, up to its size limit; return whether there may be more."""
        failure: ServiceError | None
        try:
            num_bytes = 0
            for response in self._attempt.take():
                raw = response.SerializeToString()
                part.messages.append(raw)
                num_bytes += len(raw)
                if num_bytes >= FULL_PART_BYTES:
                    return True
            if not self._attempt.over:
                return False
            failure = self._attempt.failure
        except Exception as error:
            failure = _bug(error, self._request_id)
        part.ended, part.status = True, _status(failure)
        self.close()
        return False

    def close(self, _: bytes = b"") -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._attempt.close()


def _bug(error: Exception, request_id: str) -> ServiceError:
    """Log an error that ends this request only, not all those of its router, and return it as one of the service."""
    log.error("a request failed", exc_info=error, extra=of(request_id))
    return ServiceError(f"the decode worker failed: {error!r}")


def _status(failure: ServiceError | None) -> bytes:
    return b"" if failure is None else to_proto(failure).SerializeToString()
