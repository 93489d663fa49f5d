"""Engines of one host use the fast path between real processes: a read starts although a front stands still."""

import os
import random
import select
import signal
import socket
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from engine.process.fast_path_socket import MAX_AT_ONCE, PREFIX, FastPathSocket
from loans.fast_path import KEY_BYTES, MAX_WORD_BYTES, NAME_BYTES
from support.processes import LENDER_ALWAYS, Stream, assert_equal_answers, finished, lending, pause, running

VOCAB, BLOCK = 600, 16
SIM: dict[str, Any] = {"engine": "sim", "sim_step_ms": 40.0, "max_prefill_tokens": 32, "kv_memory_mib": 4}


@pytest.fixture(scope="module")
def model(sim_model: Callable[..., Path]) -> Path:
    return sim_model(VOCAB)


async def test_a_loan_goes_on_while_the_lenders_front_stands_still(model: Path, cluster_of: Any, audit: Any) -> None:
    """Its engine computes and announces; by its front nothing would come."""
    prompt = random.Random(1).choices(range(VOCAB), k=75 * BLOCK + 1)
    async with running(cluster_of(model, router=LENDER_ALWAYS, **SIM)) as (cluster, client):
        undisturbed = await finished([Stream(client, prompt, 5, cache_salt="undisturbed")])
        stream = Stream(client, prompt, 5, cache_salt="disturbed")
        (lender,) = cluster.prefill
        await lending(lender, num_loans=1, num_blocks=10)
        await pause(lender.pid)
        try:
            assert not stream.token_ids
            assert_equal_answers(await finished([stream]), undisturbed)
        finally:
            os.kill(lender.pid, signal.SIGCONT)
        kv = stream.receipt.kv
        assert (kv.moved_blocks, kv.lender_computed_blocks, kv.loan_failure) == (75, 75, "")
        await audit([worker.address for worker in cluster.workers])


@pytest.fixture
def sockets() -> Iterator[tuple[FastPathSocket, FastPathSocket]]:
    one, other = FastPathSocket(), FastPathSocket()
    yield one, other
    one.close()
    other.close()


def test_words_between_sockets(sockets: tuple[FastPathSocket, FastPathSocket]) -> None:
    one, other = sockets
    assert one.name != other.name
    assert one.key != other.key
    assert other.take() == []
    longest = other.key + bytes(MAX_WORD_BYTES - KEY_BYTES)
    for word in (other.key + b"first", longest):
        one.send(other.name, word)
    one.send(bytes(NAME_BYTES), b"to nobody")
    assert other.take() == [other.key + b"first", longest]
    assert one.take() == other.take() == []
    other.close()
    one.send(other.name, other.key + b"to one that is gone")


def test_what_is_too_much_is_lost_and_nobody_waits(sockets: tuple[FastPathSocket, FastPathSocket]) -> None:
    one, other = sockets
    words = [other.key + b"%d" % number for number in range(10_000)]
    for word in words:
        one.send(other.name, word)
    taken = other.take()
    assert taken == words[: len(taken)]
    assert 0 < len(taken) <= MAX_AT_ONCE


def test_who_does_not_know_the_key_is_not_heard(sockets: tuple[FastPathSocket, FastPathSocket]) -> None:
    """Nor is the engine woken, and what comes along is let go of where it was sent."""
    one, other = sockets
    address = next(
        line.split()[-1]
        for line in Path("/proc/net/unix").read_text().splitlines()
        if line.endswith(f"@{PREFIX[1:].decode()}{other.name.hex()}")
    )
    mine, theirs = socket.socketpair()
    with mine, theirs, socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as stranger:
        almost = other.key[:-1] + bytes([other.key[-1] ^ 1])
        for word in (b"", b"x", other.key[:7], almost, almost + bytes(1000), bytes(100)):
            stranger.sendto(word, "\0" + address[1:])
            along = (socket.SOL_SOCKET, socket.SCM_RIGHTS, struct.pack("@i", theirs.fileno()))
            stranger.sendmsg([word], [along], 0, "\0" + address[1:])
        theirs.close()
        mine.settimeout(10)
        assert mine.recv(1) == b"", "nobody has the other end any more"
        assert select.select([other], [], [], 0) == ([], [], [])
    one.send(other.name, other.key + b"word")
    assert other.take() == [other.key + b"word"]
