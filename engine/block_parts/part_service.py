"""Service of one rank's part of every block, for the engine process at the other end of a connection."""

import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from multiprocessing.connection import Connection

import numpy as np
from numpy.typing import NDArray

from engine.block_parts.messages import (
    HEARTBEAT_S,
    BlocksRead,
    CopyBlocks,
    Corrupt,
    Drop,
    Fingerprint,
    Fingerprinted,
    FromFollower,
    Gather,
    Heartbeat,
    RankReply,
    ReadBlocks,
    Withdraw,
)
from engine.block_parts.part_copies import PartCopies
from loans.reads.block_reads import BlockRead, LocalRank, OnQuiet
from loans.reads.corruption import Corruption

log = logging.getLogger(__name__)

FingerprintBlocks = Callable[[Sequence[int]], NDArray[np.uint64]]
"""Function that returns fingerprints of this rank's part of blocks, [blocks, its KV heads]. From any thread."""


class EngineLink:
    """The engine process as this rank sees it.

    Any thread may send.
    """

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self._lock = threading.Lock()

    def send(self, message: FromFollower) -> None:
        """Send a message; end this process if the engine process is gone."""
        try:
            with self._lock:
                self.connection.send(message)
        except OSError:
            os._exit(0)


def serve_part(
    engine: EngineLink,
    rank: LocalRank,
    copies: PartCopies,
    fingerprints: FingerprintBlocks,
    settle: Callable[[], None] = lambda: None,
) -> None:
    """Serve the engine process until it is gone.

    `settle` returns when all is written that steps write after their results. Raises EOFError or OSError at the end.
    """
    block_reads: dict[int, BlockRead] = {}
    hashing = ThreadPoolExecutor(1, "rank-fingerprints")

    def begin(number: int, start: Callable[[OnQuiet], BlockRead], endpoint: bytes = b"") -> None:
        block_read = block_reads[number] = start(partial(quiet, number, endpoint))
        if block_read.is_quiet:  # it may have been quiet before it was recorded
            block_reads.pop(number, None)

    def quiet(number: int, endpoint: bytes, fingerprints: tuple[bytes, ...] | None, peer_gone: bool) -> None:
        block_reads.pop(number, None)
        engine.send(BlocksRead(number, fingerprints, peer_gone, rank.lanes_used(endpoint)))

    def fingerprint(number: int, blocks: Sequence[int]) -> None:
        try:
            settle()
            engine.send(Fingerprinted(number, fingerprints(blocks)))
        except BaseException:
            log.exception("blocks cannot be fingerprinted")
            os._exit(1)  # nobody reads the future of this call

    heartbeat_at = time.monotonic()
    while True:
        if (now := time.monotonic()) >= heartbeat_at:
            stuck_s = {number: block_read.stuck_s() for number, block_read in list(block_reads.items())}
            engine.send(Heartbeat({number: seconds for number, seconds in stuck_s.items() if seconds >= HEARTBEAT_S}))
            heartbeat_at = now + HEARTBEAT_S
        if not engine.connection.poll(heartbeat_at - now):
            continue
        match engine.connection.recv():
            case ReadBlocks(number, endpoint, block_ids, blocks, flow):
                settle()
                begin(number, partial(rank.start_read, endpoint, block_ids, blocks, flow), endpoint)
            case CopyBlocks(number, places, blocks):
                settle()
                begin(number, partial(copies.start, places, blocks))
            case Fingerprint(number, blocks):
                hashing.submit(fingerprint, number, blocks)
            case Gather(blocks, None):
                engine.send(RankReply(contents=copies.parts(blocks)))
            case Gather(blocks, int(offset)):
                copies.gather(blocks, offset)
                engine.send(RankReply())
            case Withdraw(number):
                pending_read = block_reads.get(number)
                engine.send(RankReply(tuple(pending_read.withdraw()) if pending_read is not None else ()))
            case Drop(endpoint):
                rank.drop(endpoint)
            case Corrupt(num_blocks):
                rank.corruption = Corruption(copies.pool, num_blocks)
