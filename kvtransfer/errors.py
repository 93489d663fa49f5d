"""What can go wrong with a transfer.

TransferError
├── PeerGone            the peer's process ended or its connection broke
├── EndpointMismatch    the endpoint is of another transport, pool geometry or version
└── TransportUnavailable  the transport cannot run in this process
    └── TransportRefused  it would run, but over other lanes than were demanded
"""


class TransferError(Exception):
    """A read failed; nothing is known of the bytes in its destination."""


class PeerGone(TransferError):
    """The peer is no longer there."""


class EndpointMismatch(TransferError):
    """The peer's endpoint cannot be used with this pool."""


class TransportUnavailable(TransferError):
    """The transport's library is missing or does not start here."""


class TransportRefused(TransportUnavailable):
    """`wanted` lanes were demanded; those `found` are others, or none."""

    def __init__(self, wanted: tuple[str, ...], found: tuple[str, ...], why: str = "") -> None:
        seen = f"found {', '.join(found)}" if found else "found none"
        super().__init__(f"strict_lanes demands {', '.join(wanted)}; {seen}" + (f" ({why})" if why else ""))
        self.wanted = wanted
        self.found = found
