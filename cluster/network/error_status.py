"""Errors of `errors.py` as gRPC statuses whose details name the field."""

from collections.abc import Iterable
from typing import Any

import grpc
from google.protobuf import any_pb2, duration_pb2
from google.protobuf.message import Message
from google.rpc import code_pb2, error_details_pb2, status_pb2
from grpc_status import rpc_status

from cluster.errors import (
    AlreadyExists,
    DeadlineExceeded,
    Draining,
    Forbidden,
    Incompatible,
    InvalidRequest,
    NotConfigured,
    Overloaded,
    RevisionGone,
    ServiceError,
    Unauthenticated,
    Unavailable,
    UnknownBlob,
    UnknownModel,
    UnknownRequest,
)

_KINDS: dict[str, type[ServiceError]] = {
    kind.code: kind
    for kind in (
        UnknownModel,
        Unavailable,
        AlreadyExists,
        Unauthenticated,
        Forbidden,
        Incompatible,
        RevisionGone,
        NotConfigured,
        DeadlineExceeded,
    )
}
PERMANENT = "PERMANENT"
DRAINING = "DRAINING"
DOMAIN = "tandem"
MAX_MESSAGE_CHARS = 1024
MAX_FIELD_CHARS = 256
"""Longest message and field of a status: gRPC replaces a status whose trailers exceed 8 KiB by one of its own."""
MAX_RETRY_AFTER_S = 1e9
"""Largest retry delay that a status can express, in seconds."""


def to_status(error: ServiceError) -> "rpc_status._Status":
    """Return the status for `context.abort_with_status`: code, message, and details naming the field."""
    return rpc_status.to_status(to_proto(error))


def end_call(context: Any, error: ServiceError) -> None:
    """Give a call the status of an error; its handler must return then.

    `abort_with_status` would keep the handler's stack, and with it the request, until a collection of garbage.
    """
    status = to_status(error)
    context.set_trailing_metadata(status.trailing_metadata)
    context.set_code(status.code)
    context.set_details(status.details)


def to_proto(error: ServiceError) -> status_pb2.Status:
    """Return the same status as a message, for use inside other messages."""
    message, field = _shortened(error.message, MAX_MESSAGE_CHARS), _shortened(error.field, MAX_FIELD_CHARS)
    code = code_pb2.Code.Value(error.code)
    status = status_pb2.Status(code=code, message=f"{field}: {message}" if field else message)
    if field:
        violation = error_details_pb2.BadRequest.FieldViolation(field=field, description=message)
        _add(status, error_details_pb2.BadRequest(field_violations=[violation]))
    if isinstance(error, Overloaded) and error.permanent:
        _add(status, error_details_pb2.ErrorInfo(reason=PERMANENT, domain=DOMAIN))
    if isinstance(error, Overloaded) and error.retry_after_s is not None:
        delay = duration_pb2.Duration()
        delay.FromNanoseconds(round(min(error.retry_after_s, MAX_RETRY_AFTER_S) * 1e9))
        _add(status, error_details_pb2.RetryInfo(retry_delay=delay))
    if isinstance(error, Overloaded) and error.limit is not None:
        subject, description = error.limit
        subject, description = _shortened(subject, MAX_FIELD_CHARS), _shortened(description, MAX_FIELD_CHARS)
        reached = error_details_pb2.QuotaFailure.Violation(subject=subject, description=description)
        _add(status, error_details_pb2.QuotaFailure(violations=[reached]))
    if isinstance(error, Draining):
        _add(status, error_details_pb2.ErrorInfo(reason=DRAINING, domain=DOMAIN))
    return status


def from_rpc_error(error: grpc.aio.AioRpcError) -> ServiceError:
    """Return the typed error behind a failed call, with its field where the details name one."""
    return _typed(error.code().name, error.details() or error.code().name, _details(error))


def from_proto(status: status_pb2.Status) -> ServiceError:
    """Return the typed error that `to_proto` encoded; an unknown code becomes UNKNOWN."""
    code = code_pb2.Code.Name(status.code) if status.code in code_pb2.Code.values() else "UNKNOWN"
    return _typed(code, status.message, status.details)


def _typed(code: str, message: str, details: Iterable[any_pb2.Any]) -> ServiceError:
    field, permanent, draining = "", False, False
    retry_after_s: float | None = None
    limit: tuple[str, str] | None = None
    for detail in details:
        bad, info, retry = error_details_pb2.BadRequest(), error_details_pb2.ErrorInfo(), error_details_pb2.RetryInfo()
        quota = error_details_pb2.QuotaFailure()
        if detail.Unpack(bad) and bad.field_violations:
            field, message = bad.field_violations[0].field, bad.field_violations[0].description
        elif detail.Unpack(info):
            permanent |= info.reason == PERMANENT
            draining |= info.reason == DRAINING
        elif detail.Unpack(retry):
            retry_after_s = retry.retry_delay.ToNanoseconds() / 1e9
        elif detail.Unpack(quota) and quota.violations:
            limit = quota.violations[0].subject, quota.violations[0].description
    if code == "INVALID_ARGUMENT":
        return InvalidRequest(field, message)
    if code == "RESOURCE_EXHAUSTED":
        return Overloaded(message, field, permanent, retry_after_s, limit)
    if code == "CANCELLED":  # a server drops calls so that it never accepted; who cancels a call itself reads no status
        return Unavailable("the server dropped the call before it accepted it", field)
    kind = Draining if draining else _KINDS.get(code)
    if kind is UnknownModel:
        kind = {"request_id": UnknownRequest, "identifiers": UnknownBlob}.get(field, UnknownModel)
    if kind is not None:
        return kind(message, field)
    unknown = ServiceError(message, field)
    unknown.code = code
    return unknown


def _details(error: grpc.aio.AioRpcError) -> list[any_pb2.Any]:
    for key, value in error.trailing_metadata() or ():
        if key == rpc_status.GRPC_DETAILS_METADATA_KEY:
            status = status_pb2.Status()
            status.ParseFromString(value if isinstance(value, bytes) else value.encode())
            return list(status.details)
    return []


def _shortened(text: str, limit: int) -> str:
    """Return the text with characters that a trailer can hold, shortened to `limit` of them."""
    text = text.encode("utf-8", "replace").decode()
    return text if len(text) <= limit else f"{text[: limit - 4]} ..."


def _add(status: status_pb2.Status, detail: Message) -> None:
    packed = any_pb2.Any()
    packed.Pack(detail)
    status.details.append(packed)
