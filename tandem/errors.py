"""Errors that the client and the commands raise; `cluster/errors.py` says which gRPC status each has."""

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
    StartError,
    TandemError,
    Unauthenticated,
    Unavailable,
    UnknownModel,
    UnknownRequest,
)

__all__ = [
    "AlreadyExists",
    "DeadlineExceeded",
    "Draining",
    "Forbidden",
    "Incompatible",
    "InvalidRequest",
    "NotConfigured",
    "Overloaded",
    "RevisionGone",
    "ServiceError",
    "StartError",
    "TandemError",
    "Unauthenticated",
    "Unavailable",
    "UnknownModel",
    "UnknownRequest",
]
