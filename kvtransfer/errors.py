"""Errors of transfers.

TransferError
├── PeerGone              the peer's process ended or its connection broke
├── EndpointMismatch      the endpoint is of another transport, pool geometry or version
└── TransportUnavailable  the transport cannot run in this process
    └── TransportRefused  it would run, but over other lanes than demanded
"""


class TransferError(Exception):
    """A failed read; its destination holds unknown bytes."""


class PeerGone(TransferError):
    """A peer that no longer exists."""


class EndpointMismatch(TransferError):
    """A peer's endpoint that cannot be used with this pool."""


class TransportUnavailable(TransferError):
    """A transport whose library is missing or does not start."""


class TransportRefused(TransportUnavailable):
    """Demanded lanes that are not available: `wanted` were demanded, `found` would be used."""

    def __init__(self, wanted: tuple[str, ...], found: tuple[str, ...], why: str = "") -> None:
        seen = f"found {', '.join(found)}" if found else "found none"
        super().__init__(f"strict_lanes demands {', '.join(wanted)}; {seen}" + (f" ({why})" if why else ""))
        self.wanted = wanted
        self.found = found
