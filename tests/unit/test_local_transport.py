"""The in-process transport, and the arithmetic of spans that every transport shares."""

from typing import cast

import numpy as np
import pytest

from kvtransfer.errors import EndpointMismatch, PeerGone
from kvtransfer.local import LocalNetwork, LocalTransport
from kvtransfer.transport import (
    MAX_POSTED_BYTES,
    MAX_POSTED_BYTES_ON_GPU,
    READ_BYTES,
    READ_BYTES_ON_GPU,
    Pool,
    Read,
    Span,
    check_spans,
    max_blocks_per_read,
)
from kvtransfer.ucx.nixl_lane import Job, Lane, NixlPeer


def pool_of(fill: int, num_blocks: int = 8, block_bytes: int = 4) -> Pool:
    return Pool(np.full((num_blocks, block_bytes), fill, np.uint8))


def pair(eager: bool) -> tuple[LocalTransport, LocalTransport, bytes]:
    network = LocalNetwork()
    reader, source = LocalTransport(network, "reader", eager), LocalTransport(network, "source")
    reader.register(pool_of(0))
    return reader, source, source.register(pool_of(7))


def test_a_lazy_read_waits_for_its_step_and_reads_the_bytes_of_then() -> None:
    reader, source, endpoint = pair(eager=False)
    future = reader.read(reader.connect(endpoint), [Span(0, 0, 4)])
    source.pool.memory[0] = 9
    assert not future.done()
    assert reader.step()
    assert not reader.step()
    assert future.result(0) is None
    assert reader.pool.memory[0].tolist() == [9] * 4


def test_nobody_there() -> None:
    reader, source, endpoint = pair(eager=False)
    with pytest.raises(PeerGone):
        reader.connect(b"tandem-local:elsewhere")
    with pytest.raises(EndpointMismatch):
        reader.connect(b"tcp://somewhere")
    future = reader.read(reader.connect(endpoint), [Span(0, 0, 4)])
    source.close()
    reader.step()
    assert isinstance(future.exception(0), PeerGone)
    with pytest.raises(PeerGone):
        reader.connect(endpoint)


@pytest.mark.parametrize(
    "spans",
    [
        [],
        [Span(0, 0, 0)],
        [Span(-1, 0, 4)],
        [Span(0, -1, 4)],
        [Span(29, 0, 4)],
        [Span(0, 61, 4)],
        [Span(0, 0, 4), Span(30, 0, 4)],
    ],
)
def test_spans_outside_a_pool_are_refused(spans: list[Span]) -> None:
    with pytest.raises(ValueError, match=r"span|beyond|carries"):
        check_spans(spans, local_bytes=32, remote_bytes=64, max_bytes=64)


def test_spans_up_to_the_very_end_are_fine() -> None:
    check_spans([Span(28, 60, 4), Span(0, 0, 32)], local_bytes=32, remote_bytes=64, max_bytes=64)


def test_one_read_carries_at_most_a_window() -> None:
    assert max_blocks_per_read(4, 10) == 2
    assert max_blocks_per_read(10, 10) == 1
    with pytest.raises(ValueError, match="larger than one read"):
        max_blocks_per_read(11, 10)
    check_spans([Span(0, 0, 4), Span(8, 8, 6)], 32, 32, 10)
    with pytest.raises(ValueError, match="carries"):
        check_spans([Span(0, 0, 4), Span(8, 8, 7)], 32, 32, 10)


def test_the_size_of_reads_goes_by_the_memory_that_they_write() -> None:
    reader, _, endpoint = pair(eager=True)
    peer = reader.connect(endpoint)
    block = 512 << 10
    assert (reader.blocks_per_read(block, peer), reader.max_posted_bytes) == (READ_BYTES // block, MAX_POSTED_BYTES)
    with pytest.raises(ValueError, match="larger than one read"):
        reader.blocks_per_read(MAX_POSTED_BYTES + 1)
    reader.on_gpu = True
    assert reader.max_posted_bytes == MAX_POSTED_BYTES_ON_GPU
    assert reader.blocks_per_read(block, peer) == READ_BYTES_ON_GPU // block
    assert reader.blocks_per_read(MAX_POSTED_BYTES_ON_GPU) == 1


def test_a_lane_posts_at_most_its_window() -> None:
    lane = Lane(max_posted_bytes=10)
    jobs = [Job(cast(NixlPeer, None), (), num_bytes, "flow", None, Read()) for num_bytes in (4, 6, 1)]
    for job in jobs:
        lane.queued.put(job.flow, job)
    for _ in range(2):
        assert lane.has_room
        lane.add(lane.queued.pop())
    assert not lane.has_room
    lane.remove(jobs[0])
    assert lane.has_room
