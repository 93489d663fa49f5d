"""Engines of one host tell each other early, over real processes: what is lent is read though a front stands still."""

import os
import random
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engine.lending.early import NAME_BYTES
from engine.worker.early_socket import PREFIX, EarlySocket
from support.processes import LENDER_ALWAYS, Stream, assert_equal_answers, finished, lending, pause, running

VOCAB, BLOCK = 600, 16
SIM: dict[str, Any] = {"engine": "sim", "sim_step_ms": 20.0, "max_prefill_tokens": 32, "kv_memory_mib": 4}


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


def test_words_between_sockets() -> None:
    one, other = EarlySocket(), EarlySocket()
    try:
        assert one.name != other.name
        assert other.take() == []
        one.send(other.name, b"first")
        one.send(other.name, b"second")
        one.send(bytes(NAME_BYTES), b"to nobody")
        assert other.take() == [b"first", b"second"]
        assert one.take() == other.take() == []
        assert f"@{PREFIX[1:].decode()}{other.name.hex()}" in Path("/proc/net/unix").read_text()
        for _ in range(100_000):  # more than anybody keeps: what is too much is lost, and nobody waits
            one.send(other.name, b"word")
        assert 0 < len(other.take()) < 100_000
        other.close()
        one.send(other.name, b"to one that is gone")
    finally:
        one.close()
        other.close()
