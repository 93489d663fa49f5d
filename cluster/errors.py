"""Typed errors that leave a process.

`error_status.py` defines them as gRPC statuses.

    TandemError
    ├── StartError            a process cannot start: names the setting and the reason
    └── ServiceError          a call failed; carries a gRPC code
        ├── InvalidRequest    INVALID_ARGUMENT: `field` is out of its limits
        ├── UnknownModel      NOT_FOUND
        ├── UnknownRequest    NOT_FOUND, with `field` request_id
        ├── UnknownBlob       NOT_FOUND, with `field` identifiers
        ├── Overloaded        RESOURCE_EXHAUSTED: no capacity now (`retry_after_s`), or ever (`permanent`)
        ├── Unavailable       UNAVAILABLE: no process can serve it now; safe to retry
        │   └── Draining      this process is stopping; another one can serve it
        ├── AlreadyExists     ALREADY_EXISTS: another process has that name
        ├── Unauthenticated   UNAUTHENTICATED: missing or unknown credentials
        ├── Forbidden         PERMISSION_DENIED: the caller may not do this
        ├── Incompatible      FAILED_PRECONDITION: two processes do not fit together
        ├── RevisionGone      ABORTED: the model that began the answer is gone; a new request gets its successor
        ├── NotConfigured     UNIMPLEMENTED: a setting, which the message names, is not set
        └── DeadlineExceeded  DEADLINE_EXCEEDED
"""


class TandemError(Exception):
    """Base class of all errors caused by the environment or the caller, not by a bug."""


class StartError(TandemError):
    """An invalid setting: `field` of the configuration is at fault, for `reason`."""

    def __init__(self, field: str, reason: str) -> None:
        super().__init__(f"{field}: {reason}")
        self.field = field
        self.reason = reason

    def __reduce__(self) -> tuple[type["StartError"], tuple[str, str]]:
        """Pickle as a plain StartError, whatever arguments a subclass takes."""
        return StartError, (self.field, self.reason)


class ServiceError(TandemError):
    """A failed call.

    `field` is empty when no single field is at fault.
    """

    code: str = "INTERNAL"
    """Name of a gRPC status code."""
    refused_for: str = ""
    """Reason by which a router counts its refusal; empty for other failures."""

    def __init__(self, message: str, field: str = "") -> None:
        super().__init__(f"{field}: {message}" if field else message)
        self.message = message
        self.field = field


class InvalidRequest(ServiceError):
    """A request whose `field` is out of its limits, which the message names."""

    code = "INVALID_ARGUMENT"

    def __init__(self, field: str, message: str) -> None:
        super().__init__(message, field)


class UnknownModel(ServiceError):
    """A request for a model that is not served here."""

    code = "NOT_FOUND"


class UnknownRequest(ServiceError):
    """A request id that this process does not know, or no longer."""

    code = "NOT_FOUND"


class UnknownBlob(ServiceError):
    """An item whose blob this preprocessor does not have, or no longer."""

    code = "NOT_FOUND"

    def __init__(self, message: str, field: str = "identifiers") -> None:
        super().__init__(message, field)


class Overloaded(ServiceError):
    """A refusal for lack of capacity, now or (`permanent`) ever.

    `retry_after_s` is set where the time of free capacity can be predicted. `limit` names the exceeded limit, such as
    ("tenant:a", "requests_per_s: 5"), where an operator set one.
    """

    code = "RESOURCE_EXHAUSTED"

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
    """A refusal because no process can serve the call now; safe to retry."""

    code = "UNAVAILABLE"


class Draining(Unavailable):
    """A refusal because this process is stopping; another one can serve the call."""


class AlreadyExists(ServiceError):
    """A refusal because another process already has that name."""

    code = "ALREADY_EXISTS"


class Unauthenticated(ServiceError):
    """A call with missing or unknown credentials."""

    code = "UNAUTHENTICATED"


class Forbidden(ServiceError):
    """A call that the caller is not allowed to make."""

    code = "PERMISSION_DENIED"


class Incompatible(ServiceError):
    """A mismatch between two processes, such as other weights or another protocol version."""

    code = "FAILED_PRECONDITION"


class RevisionGone(ServiceError):
    """A stream whose revision of the model no worker has any more, so that nobody can continue it."""

    code = "ABORTED"


class NotConfigured(ServiceError):
    """A call for a feature whose setting, named in the message, is not set."""

    code = "UNIMPLEMENTED"


class DeadlineExceeded(ServiceError):
    """A call whose deadline passed."""

    code = "DEADLINE_EXCEEDED"
