"""Errors that leave a process, as types; `error_status.py` has what they are on the wire.

TandemError
├── StartError            a process cannot start: which setting is at fault, and why
└── ServiceError          a call failed; carries a gRPC code
    ├── InvalidRequest    INVALID_ARGUMENT: `field` is out of its limits
    ├── UnknownModel      NOT_FOUND
    ├── UnknownRequest    NOT_FOUND, with `field` request_id
    ├── Overloaded        RESOURCE_EXHAUSTED: no room now (`retry_after_s`), or ever (`permanent`)
    ├── Unavailable       UNAVAILABLE: nobody can serve it now; safe to retry
    │   └── Draining      this process was told to stop: another one can serve it
    ├── AlreadyExists      ALREADY_EXISTS: somebody else goes by that name
    ├── Unauthenticated   UNAUTHENTICATED: nobody knows who asks
    ├── Forbidden         PERMISSION_DENIED: who asks may not
    ├── Incompatible      FAILED_PRECONDITION: two processes do not fit together
    ├── NotConfigured          UNIMPLEMENTED: a setting, which the message names, is not set
    └── DeadlineExceeded  DEADLINE_EXCEEDED
"""


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

    code: str = "INTERNAL"
    """The name of a gRPC status code."""

    def __init__(self, message: str, field: str = "") -> None:
        super().__init__(f"{field}: {message}" if field else message)
        self.message = message
        self.field = field


class InvalidRequest(ServiceError):
    """`field` is out of its limits, which the message names."""

    code = "INVALID_ARGUMENT"

    def __init__(self, field: str, message: str) -> None:
        super().__init__(message, field)


class UnknownModel(ServiceError):
    """No such model is served here."""

    code = "NOT_FOUND"


class UnknownRequest(ServiceError):
    """Nobody here knows anything of such a request, or not any more."""

    code = "NOT_FOUND"


class Overloaded(ServiceError):
    """No room: now, or (`permanent`) ever. `retry_after_s`: when there may be, where that is known. `limit`: which of
    whose limits was reached, such as ("tenant:a", "requests_per_s: 5"), where it is one that somebody set."""

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
    """Nobody can serve it now; safe to retry."""

    code = "UNAVAILABLE"


class Draining(Unavailable):
    """This process was told to stop: another one can serve it now."""


class AlreadyExists(ServiceError):
    """Somebody else goes by that name."""

    code = "ALREADY_EXISTS"


class Unauthenticated(ServiceError):
    """Nobody knows who asks."""

    code = "UNAUTHENTICATED"


class Forbidden(ServiceError):
    """Who asks may not."""

    code = "PERMISSION_DENIED"


class Incompatible(ServiceError):
    """Two processes do not fit together."""

    code = "FAILED_PRECONDITION"


class NotConfigured(ServiceError):
    """This router has no such thing: a setting, which the message names, is not set."""

    code = "UNIMPLEMENTED"


class DeadlineExceeded(ServiceError):
    """The call's deadline passed."""

    code = "DEADLINE_EXCEEDED"
