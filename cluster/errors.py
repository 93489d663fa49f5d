"""Errors that leave a process, as types here and as gRPC statuses on the wire.

TandemError
├── StartError            a process cannot start: which setting is at fault, and why
└── ServiceError          a call failed; carries a gRPC code
    ├── InvalidRequest    INVALID_ARGUMENT: `field` is out of its limits
    ├── UnknownModel      NOT_FOUND
    ├── UnknownRequest    NOT_FOUND, with `field` request_id
    ├── Overloaded        RESOURCE_EXHAUSTED: no room now (`retry_after_s`), or ever (`permanent`)
    ├── Unavailable       UNAVAILABLE: nobody can serve it now; safe to retry
    │   └── Draining      this process was told to stop: another one can serve it
    ├── AlreadyThere      ALREADY_EXISTS: somebody else goes by that name
    ├── Unauthenticated   UNAUTHENTICATED: nobody knows who asks
    ├── Forbidden         PERMISSION_DENIED: who asks may not
    ├── Incompatible      FAILED_PRECONDITION: two processes do not fit together
    ├── NotSetUp          UNIMPLEMENTED: a setting, which the message names, is not set
    └── DeadlineExceeded  DEADLINE_EXCEEDED
"""

from collections.abc import Iterable

import grpc
from google.protobuf import any_pb2, duration_pb2
from google.protobuf.message import Message
from google.rpc import code_pb2, error_details_pb2, status_pb2
from grpc_status import rpc_status


class TandemError(Exception):
    """Anything Tandem itself raises for what the world did."""


class StartError(TandemError):
    """`field` of the configuration is at fault, for `reason`."""

    def __init__(self, field: str, reason: str) -> None:
        super().__init__(f"{field}: {reason}")
        self.field = field
        self.reason = reason

    def __reduce__(self) -> tuple[type["StartError"], tuple[str, str]]:
        """Travels between processes as a plain StartError, whatever its subclass takes to be made."""
        return StartError, (self.field, self.reason)


class ServiceError(TandemError):
    """A failed call. `field` is empty when no single field is at fault."""

    code: grpc.StatusCode = grpc.StatusCode.INTERNAL

    def __init__(self, message: str, field: str = "") -> None:
        super().__init__(f"{field}: {message}" if field else message)
        self.message = message
        self.field = field


class InvalidRequest(ServiceError):
    """`field` is out of its limits, which the message names."""

    code = grpc.StatusCode.INVALID_ARGUMENT

    def __init__(self, field: str, message: str) -> None:
        super().__init__(message, field)


class UnknownModel(ServiceError):
    """No such model is served here."""

    code = grpc.StatusCode.NOT_FOUND


class UnknownRequest(ServiceError):
    """Nobody here knows anything of such a request, or not any more."""

    code = grpc.StatusCode.NOT_FOUND


class Overloaded(ServiceError):
    """No room: now, or (`permanent`) ever. `retry_after_s`: when there may be, where that is known. `limit`: which of
    whose limits was reached, such as ("tenant:a", "requests_per_s: 5"), where it is one that somebody set."""

    code = grpc.StatusCode.RESOURCE_EXHAUSTED

    def __init__(
        self,
        message: str,
        field: str = "",
        permanent: bool = False,
        retry_after_s: float | None = None,
        limit: tuple[str, str] | None = None,
    ) -> None:
        super().__init__(message, field)
        self.permanent = permanent
        self.retry_after_s = retry_after_s
        self.limit = limit


class Unavailable(ServiceError):
    """Nobody can serve it now; safe to retry."""

    code = grpc.StatusCode.UNAVAILABLE


class Draining(Unavailable):
    """This process was told to stop: another one can serve it now."""


class AlreadyThere(ServiceError):
    """Somebody else goes by that name."""

    code = grpc.StatusCode.ALREADY_EXISTS


class Unauthenticated(ServiceError):
    """Nobody knows who asks."""

    code = grpc.StatusCode.UNAUTHENTICATED


class Forbidden(ServiceError):
    """Who asks may not."""

    code = grpc.StatusCode.PERMISSION_DENIED


class Incompatible(ServiceError):
    """Two processes do not fit together."""

    code = grpc.StatusCode.FAILED_PRECONDITION


class NotSetUp(ServiceError):
    """This router has no such thing: a setting, which the message names, is not set."""

    code = grpc.StatusCode.UNIMPLEMENTED


class DeadlineExceeded(ServiceError):
    """The call's deadline passed."""

    code = grpc.StatusCode.DEADLINE_EXCEEDED


_KINDS: dict[grpc.StatusCode, type[ServiceError]] = {
    kind.code: kind
    for kind in (
        UnknownModel,
        Unavailable,
        AlreadyThere,
        Unauthenticated,
        Forbidden,
        Incompatible,
        NotSetUp,
        DeadlineExceeded,
    )
}
PERMANENT = "PERMANENT"
DRAINING = "DRAINING"
DOMAIN = "tandem"
MAX_RETRY_AFTER_S = 1e9
"""What a status can say."""


def to_status(error: ServiceError) -> "rpc_status._Status":
    """What a servicer passes to `context.abort_with_status`: code, message, and details naming the field."""
    return rpc_status.to_status(to_proto(error))


def to_proto(error: ServiceError) -> status_pb2.Status:
    """The same, where a status is part of a message."""
    status = status_pb2.Status(code=_CODES[error.code], message=str(error))
    if error.field:
        violation = error_details_pb2.BadRequest.FieldViolation(field=error.field, description=error.message)
        _add(status, error_details_pb2.BadRequest(field_violations=[violation]))
    if isinstance(error, Overloaded) and error.permanent:
        _add(status, error_details_pb2.ErrorInfo(reason=PERMANENT, domain=DOMAIN))
    if isinstance(error, Overloaded) and error.retry_after_s is not None:
        delay = duration_pb2.Duration()
        delay.FromNanoseconds(round(min(error.retry_after_s, MAX_RETRY_AFTER_S) * 1e9))
        _add(status, error_details_pb2.RetryInfo(retry_delay=delay))
    if isinstance(error, Overloaded) and error.limit is not None:
        subject, description = error.limit
        reached = error_details_pb2.QuotaFailure.Violation(subject=subject, description=description)
        _add(status, error_details_pb2.QuotaFailure(violations=[reached]))
    if isinstance(error, Draining):
        _add(status, error_details_pb2.ErrorInfo(reason=DRAINING, domain=DOMAIN))
    return status


def from_rpc_error(error: grpc.aio.AioRpcError) -> ServiceError:
    """The typed error behind a failed call, with its field where the details name one."""
    return _typed(error.code(), error.details() or error.code().name, _details(error))


def from_proto(status: status_pb2.Status) -> ServiceError:
    """The same, of what `to_proto` made."""
    return _typed(_CODE_OF[status.code], status.message, status.details)


def _typed(code: grpc.StatusCode, message: str, details: Iterable[any_pb2.Any]) -> ServiceError:
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
    if code is grpc.StatusCode.INVALID_ARGUMENT:
        return InvalidRequest(field, message)
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED:
        return Overloaded(message, field, permanent, retry_after_s, limit)
    kind = Draining if draining else _KINDS.get(code)
    if kind is UnknownModel and field == "request_id":
        kind = UnknownRequest
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


def _add(status: status_pb2.Status, detail: Message) -> None:
    packed = any_pb2.Any()
    packed.Pack(detail)
    status.details.append(packed)


_CODES = {
    code: code_pb2.Code.Value(code.name)
    for code in grpc.StatusCode
    if code.name in code_pb2.Code.DESCRIPTOR.values_by_name
}
_CODE_OF = {number: code for code, number in _CODES.items()}
