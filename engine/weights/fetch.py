"""The borrowing side of a start from a peer: weight files that arrive in memory, in order, while the engine starts.

A thread reads, a second one computes the model's own fingerprint over the bytes. Tensors may be taken as soon as their
bytes are there; whether these were the right ones is known at the end, and `confirm` says so.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

from engine.host.memory import huge_memory
from engine.weights.offer import WeightsOffer, layout_of
from kvtransfer.errors import TransferError
from kvtransfer.transport import READ_BYTES, Pool, Read, Span, Transport

log = logging.getLogger(__name__)

NUM_QUEUED = 16
"""Reads that are queued at a time; the transport posts 8 MiB of them."""


class WeightsLost(Exception):
    """Weights that a peer cannot provide, or that are not what it said."""


class WeightsFetch:
    """One fetch of a peer's weights."""

    def __init__(
        self,
        offer: WeightsOffer,
        digest: "blake2b",
        open_transport: Callable[[], Transport],
        silence_s: float,
    ) -> None:
        """Start the fetch.

        `digest` has taken in what comes before the files. The peer is given up when a read takes `silence_s`.
        """
        self.offer = offer
        self._digest = digest
        self._open_transport = open_transport
        self._silence_s = silence_s
        self._changed = threading.Condition()
        self._arrived = 0
        """Bytes from the beginning of `memory` that are there."""
        self.failure = ""
        """First reason why it failed; empty while it did not."""
        self.taken = False
        """Whether the model was loaded from it."""
        self._fingerprint = b""
        """Fingerprint of all bytes; empty until all of them went through the digest."""
        self.offsets, self._num_bytes = layout_of([file.num_bytes for file in offer.files])
        self.memory: NDArray[np.uint8] = huge_memory(self._num_bytes)
        """Memory that the files arrive in, laid out as `offsets`, until it is released."""
        for run in (self._read, self._hash):
            threading.Thread(target=run, name=f"weights{run.__name__}", daemon=True).start()

    def wait_for(self, end: int) -> None:
        """Wait until all bytes before `end` are there. Raises WeightsLost."""
        with self._changed:
            self._changed.wait_for(lambda: self.failure or self._arrived >= end)
            if self.failure:
                raise WeightsLost(self.failure)

    def confirm(self) -> bytes:
        """Wait for the fingerprint of all bytes and return it. Raises WeightsLost where it is not the offered one."""
        with self._changed:
            self._changed.wait_for(lambda: self.failure or self._fingerprint)
            if self.failure:
                raise WeightsLost(self.failure)
        return self._fingerprint

    def release(self) -> None:
        """Let the memory go, after every tensor was taken."""
        self.memory = np.empty(0, np.uint8)

    def give_up(self, reason: str) -> None:
        """Fail everyone who waits; the first reason counts."""
        with self._changed:
            self.failure = self.failure or reason
            self._changed.notify_all()

    # ------------------------------------------------------------------ on threads

    def _read(self) -> None:
        began_at = time.monotonic()
        try:
            transport = self._open_transport()
        except TransferError as error:
            self.give_up(str(error))
            return
        try:
            transport.register(Pool(self.memory.reshape(1, -1)))
            peer = transport.connect(self.offer.endpoint)
            queued: deque[tuple[int, Read]] = deque()
            for span in self._spans():
                queued.append((span.local_offset + span.length, transport.read(peer, [span])))
                if len(queued) == NUM_QUEUED:
                    self._settle(*queued.popleft())
            while queued:
                self._settle(*queued.popleft())
            seconds = time.monotonic() - began_at
            log.info("%d MB of weights in %.2f s over %s", self._num_bytes // 10**6, seconds, ", ".join(peer.lanes))
        except TimeoutError:
            self.give_up(f"no byte for {self._silence_s:g} s")
        except Exception as error:  # whatever it is, nobody may wait for ever; the disk is there
            self.give_up(str(error) or type(error).__name__)
        finally:
            transport.close()  # only now is it certain that no read writes into the memory any more

    def _spans(self) -> Iterator[Span]:
        for begin in range(0, self._num_bytes, READ_BYTES):
            if self.failure:
                return
            yield Span(begin, begin, min(READ_BYTES, self._num_bytes - begin))

    def _settle(self, end: int, read: Read) -> None:
        read.result(self._silence_s)
        with self._changed:
            self._arrived = end
            self._changed.notify_all()

    def _hash(self) -> None:
        try:
            for file, offset in zip(self.offer.files, self.offsets, strict=True):
                self._digest.update(file.name.encode())
                for begin in range(0, file.num_bytes, READ_BYTES):
                    end = min(begin + READ_BYTES, file.num_bytes)
                    self.wait_for(offset + end)
                    self._digest.update(self.memory[offset + begin : offset + end].data)
        except WeightsLost:
            return
        if (fingerprint := self._digest.digest()) != self.offer.fingerprint:
            self.give_up("the bytes that arrived have another fingerprint")
            return
        with self._changed:
            self._fingerprint = fingerprint
            self._changed.notify_all()
