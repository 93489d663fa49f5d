"""What a lender's engine says to the borrower's engine at once, where they can reach each other.

What is said of a loan goes from the lender's engine to its front, by the Lend stream to the borrower's front, and from
there to its engine. Engines of one host and network namespace say it a second time, in one hop, and the borrower's
need not wait for the first.

    lender's engine ── front ══ Lend stream, the lease ══ front ── borrower's engine
           └───────────────────── early word ─────────────────────────────┘

Nothing is owned by it: a loan lives and ends by the lease, and whatever is said early is said there too. So an early
word may get lost or come late; it counts only if it is the very next thing to be said of the loan, and the lease must
say the same after it, message by message, or the loan is over, if it still lives then. Who may say it is who knows the
loan's secret, which only the lender has been told.
"""

import os
import struct
from abc import ABC, abstractmethod
from collections import OrderedDict
from hashlib import blake2b

from engine.messages import LendReady, LendStarting, LoanBlocks, LoanStarted

VERSION = 1
"""Of what a word looks like: engines of another one do not find each other."""
NAME_BYTES = DIGEST_BYTES = 16
KEY_BYTES = 8
SECRET_BYTES = KEY_BYTES + 8
ADDRESS_BYTES = NAME_BYTES + SECRET_BYTES
"""Of where a loan's early words go: whose link, and the loan's secret, of which the first half is the link's key."""
MAX_WORD_BYTES = 64 << 10
MAX_BLOCKS_BYTES = MAX_WORD_BYTES - 64
"""What is longer is said by the lease alone."""
MAX_ENDPOINTS = 1024
"""Of lenders; one that is forgotten is known again with its next loan."""
_STARTING = struct.Struct("<IId")
_READY = struct.Struct("<III?")
_IS_STARTING, _IS_READY = b"s", b"r"

Word = LoanStarted | LoanBlocks


class FastPathLink(ABC):
    """How words get to other engines, and theirs to this one. Any of them may be lost, and anybody may write here."""

    name: bytes
    """NAME_BYTES of this engine's own."""
    key: bytes
    """KEY_BYTES with which every word to this engine begins."""

    @abstractmethod
    def send(self, name: bytes, word: bytes) -> None:
        """To the engine of that name, if it can be reached without waiting."""

    @abstractmethod
    def take(self) -> list[bytes]:
        """What has come."""


class FastPath:
    """Of one engine, as a lender and as a borrower. Without a link nothing is said early."""

    def __init__(self, link: FastPathLink | None) -> None:
        self._link = link
        self._own_digest = b""
        self._loans: dict[bytes, str] = {}
        """Ids of loans taken, by secret."""
        self._secrets: dict[str, bytes] = {}
        self._endpoints: OrderedDict[bytes, bytes] = OrderedDict()
        """Of lenders, by digest: a word has no room for the whole."""

    # ------------------------------------------------------------------ the lender's side

    def lends_from(self, endpoint: bytes) -> None:
        """What this engine's front says it is."""
        self._own_digest = _digest(endpoint)

    def tell(self, address: bytes, said: LendStarting | LendReady) -> None:
        """The borrower at `address`, the OpenLoan's; to nobody if that is empty."""
        if self._link is None or not address:
            return
        match said:
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
        """The address for words of this loan, until `forget`; empty without a link."""
        if self._link is None:
            return b""
        secret = self._link.key + os.urandom(SECRET_BYTES - KEY_BYTES)
        self._loans[secret], self._secrets[loan_id] = loan_id, secret
        return self._link.name + secret

    def forget(self, loan_id: str) -> None:
        if (secret := self._secrets.pop(loan_id, None)) is not None:
            del self._loans[secret]

    def met(self, endpoint: bytes) -> None:
        """A lender, by its lease."""
        if self._link is not None:
            digest = _digest(endpoint)
            self._endpoints[digest] = endpoint
            self._endpoints.move_to_end(digest)
            if len(self._endpoints) > MAX_ENDPOINTS:
                self._endpoints.popitem(last=False)

    def take(self) -> list[Word]:
        """What was said of loans that are expected, by lenders that were met. Whether it is next is not known."""
        if self._link is None:
            return []
        words = (self._parse(word) for word in self._link.take())
        return [word for word in words if word is not None]

    def _parse(self, word: bytes) -> Word | None:
        """None for what is not for a loan of ours, or makes no sense."""
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
