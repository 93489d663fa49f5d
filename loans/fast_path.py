"""Fast-path announcements: from a lender's engine to the borrower's engine directly, where they can reach each other.

An announcement of a loan goes from the lender's engine to its front, over the Lend stream to the borrower's front, and
from there to its engine. Engines of one host and network namespace send it a second time, in one hop, and the
borrower's engine need not wait for the first.

    lender's engine ── front ══ Lend stream, the lease ══ front ── borrower's engine
           └──────────────── fast-path announcement ─────────────────────┘

A fast-path announcement owns nothing: a loan lives and ends by the lease, which repeats every announcement. So a
fast-path announcement may be lost or late. It counts only if it is exactly the next message of its loan, and the lease
must repeat it, message by message; otherwise the loan ends. A sender must know the loan's secret, which only the lender
was given.
"""

import os
import struct
from abc import ABC, abstractmethod
from collections import OrderedDict
from hashlib import blake2b

from engine.messages.from_engine import LendReady, LendStarting
from engine.messages.to_engine import LoanBlocks, LoanStarted

VERSION = 1
"""Version of the datagram format; engines of different versions do not find each other."""
NAME_BYTES = DIGEST_BYTES = 16
KEY_BYTES = 8
SECRET_BYTES = KEY_BYTES + 8
ADDRESS_BYTES = NAME_BYTES + SECRET_BYTES
"""Size of a loan's address: the borrower's link name and the loan's secret, whose first half is the link's key."""
MAX_WORD_BYTES = 64 << 10
MAX_BLOCKS_BYTES = MAX_WORD_BYTES - 64
"""Largest announcement sent this way; longer ones go by the lease alone."""
MAX_ENDPOINTS = 1024
"""Lender endpoints that are remembered; a forgotten one is learned again with its next loan."""
_STARTING = struct.Struct("<IId")
_READY = struct.Struct("<III?")
_IS_STARTING, _IS_READY = b"s", b"r"

Word = LoanStarted | LoanBlocks


class FastPathLink(ABC):
    """Datagram link between engines.

    Any datagram may be lost, and any process may send one here.
    """

    name: bytes
    """Name of this engine's link, NAME_BYTES long."""
    key: bytes
    """Key of KEY_BYTES with which every datagram to this engine begins."""

    @abstractmethod
    def send(self, name: bytes, word: bytes) -> None:
        """Send to the engine of that name if this is possible without waiting."""

    @abstractmethod
    def take(self) -> list[bytes]:
        """Return the datagrams that arrived."""


class FastPath:
    """Fast path of one engine, as lender and borrower.

    Without a link nothing is sent.
    """

    def __init__(self, link: FastPathLink | None) -> None:
        self._link = link
        self._own_digest = b""
        self._loans: dict[bytes, str] = {}
        """Ids of loans taken, by secret."""
        self._secrets: dict[str, bytes] = {}
        self._endpoints: OrderedDict[bytes, bytes] = OrderedDict()
        """Lenders' endpoints by digest, since a datagram has no room for the whole."""

    # ------------------------------------------------------------------ the lender's side

    def lends_from(self, endpoint: bytes) -> None:
        """Set the endpoint that this engine's front announces."""
        self._own_digest = _digest(endpoint)

    def announce(self, address: bytes, message: LendStarting | LendReady) -> None:
        """Send an announcement to the borrower at `address`, as OpenLoan gave it; to no engine if it is empty."""
        if self._link is None or not address:
            return
        match message:
            case LendStarting(_, end, cached_end, queued_ms):
                word = _IS_STARTING + self._own_digest + _STARTING.pack(end, cached_end, queued_ms)
            case LendReady(_, first, block_ids, fingerprints, fetched):
                count = len(block_ids)
                if 4 * count + len(fingerprints) > MAX_BLOCKS_BYTES:
                    return
                ids = struct.pack(f"<{count}I", *block_ids)
                word = _IS_READY + _READY.pack(first, count, len(fingerprints), fetched) + ids + fingerprints
        self._link.send(address[:NAME_BYTES], address[NAME_BYTES:] + word)

    # ------------------------------------------------------------------ the borrower's side

    def expect(self, loan_id: str) -> bytes:
        """Return the address for announcements of this loan, valid until `forget`; empty without a link."""
        if self._link is None:
            return b""
        secret = self._link.key + os.urandom(SECRET_BYTES - KEY_BYTES)
        self._loans[secret], self._secrets[loan_id] = loan_id, secret
        return self._link.name + secret

    def forget(self, loan_id: str) -> None:
        if (secret := self._secrets.pop(loan_id, None)) is not None:
            del self._loans[secret]

    def met(self, endpoint: bytes) -> None:
        """Learn a lender's endpoint from its lease."""
        if self._link is not None:
            digest = _digest(endpoint)
            self._endpoints[digest] = endpoint
            self._endpoints.move_to_end(digest)
            if len(self._endpoints) > MAX_ENDPOINTS:
                self._endpoints.popitem(last=False)

    def take(self) -> list[Word]:
        """Return announcements of expected loans by known lenders.

        The caller checks that each is the next message.
        """
        if self._link is None:
            return []
        words = (self._parse(word) for word in self._link.take())
        return [word for word in words if word is not None]

    def _parse(self, word: bytes) -> Word | None:
        """Parse a datagram; None when it is not for a loan of this engine or is malformed."""
        if (loan_id := self._loans.get(word[:SECRET_BYTES])) is None:
            return None
        kind, rest = word[SECRET_BYTES : SECRET_BYTES + 1], word[SECRET_BYTES + 1 :]
        try:
            if kind == _IS_STARTING:
                end, cached_end, queued_ms = _STARTING.unpack(rest[DIGEST_BYTES:])
                endpoint = self._endpoints.get(rest[:DIGEST_BYTES])
                return None if endpoint is None else LoanStarted(loan_id, endpoint, end, cached_end, queued_ms)
            if kind == _IS_READY:
                first, count, num_bytes, fetched = _READY.unpack_from(rest)
                ids = struct.unpack_from(f"<{count}I", rest, _READY.size)
                fingerprints = rest[_READY.size + 4 * count :]
                if len(fingerprints) == num_bytes:
                    return LoanBlocks(loan_id, first, ids, fingerprints, fetched)
        except struct.error:
            return None
        return None


def _digest(endpoint: bytes) -> bytes:
    return blake2b(endpoint, digest_size=DIGEST_BYTES).digest()
