"""What endpoints of processes say: refused where it is wrong, and where it is right, how their memory is read."""

import json
from base64 import b64decode, b64encode
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from kvtransfer.contract.worlds import BLOCK, TIMEOUT_S, ProcessLender
from kvtransfer.cross_memory import ATTACHED, MAPPED
from kvtransfer.errors import EndpointMismatch, TransferError
from kvtransfer.nixl import SMALL_BYTES, NixlTransport
from kvtransfer.transport import Pool, Span
from support.transport_worlds import NixlWorld, UcxxWorld


@pytest.fixture(scope="module")
def nixl_world(lenders: list[ProcessLender]) -> Iterator[NixlWorld]:
    """One for all tests that only try to connect."""
    made = NixlWorld(lenders)
    yield made
    made.close()


@pytest.fixture(scope="module")
def ucxx_world(ucxx_lenders: list[ProcessLender]) -> Iterator[UcxxWorld]:
    """One for all tests that only try to connect."""
    made = UcxxWorld(ucxx_lenders)
    yield made
    made.close()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *[(name, None) for name in ("format", "base", "bytes", "metadata")],
        *[("base", value) for value in ("12", -1, 0, 1.5, True, [], 1 << 64)],
        *[("bytes", value) for value in ("12", -1, 0, 1.5, True, {}, (1 << 63) - 1)],
        *[("metadata", value) for value in (1, "not base64!", "", "AAAA", [])],
        ("format", ["tandem-nixl-1"]),
        *[
            ("process", value)
            for value in (1, [], {}, {"host": "here", "pid": -1, "secret_at": 1, "secret": "00" * 16})
        ],
        *[("file", value) for value in (1, [], {}, {"descriptor": -1, "secret": "00" * 16})],
    ],
)
def test_an_endpoint_of_nixl_with_a_bad_field(
    nixl_world: NixlWorld, file_lenders: list[ProcessLender], field: str, value: Any
) -> None:
    good = file_lenders[0].endpoint
    fields = json.loads(good)
    del fields[field]
    if value is not None:
        fields[field] = value
    if field == "metadata":
        del fields["process"]  # NIXL reads its metadata only of peers whose memory this process cannot reach
    with pytest.raises(EndpointMismatch):
        nixl_world.reader.connect(json.dumps(fields).encode())
    nixl_world.done(nixl_world.reader.read(nixl_world.reader.connect(good), [Span(0, 0, BLOCK)]))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *[(name, None) for name in ("format", "host", "port", "bytes", "incarnation", "secret")],
        *[("host", value) for value in (1, "", "localhost", "256.1.1.1", "127.0.0.1:1", [])],
        *[("port", value) for value in ("12", -1, 0, 1.5, True, 1 << 16)],
        *[("bytes", value) for value in ("12", -1, 0, 1.5, True, {}, 1 << 63)],
        *[(name, value) for name in ("incarnation", "secret") for value in (1, "", "zz", "00")],
        ("format", ["tandem-ucxx-1"]),
    ],
)
def test_an_endpoint_of_ucxx_with_a_bad_field(
    ucxx_world: UcxxWorld, ucxx_lenders: list[ProcessLender], field: str, value: Any
) -> None:
    fields = json.loads(ucxx_lenders[0].endpoint)
    fields.pop(field)
    if value is not None:
        fields[field] = value
    with pytest.raises(EndpointMismatch):
        ucxx_world.reader.connect(json.dumps(fields).encode())
    ucxx_world.done(ucxx_world.reader.read(ucxx_world.reader.connect(ucxx_lenders[0].endpoint), [Span(0, 0, BLOCK)]))


@pytest.mark.parametrize("share", [0.01, 0.1, 0.5, 0.9, 0.999])
def test_metadata_of_nixl_cut_short_is_refused(
    nixl_world: NixlWorld, lenders: list[ProcessLender], share: float
) -> None:
    fields = json.loads(lenders[0].endpoint)
    metadata = b64decode(fields["metadata"])
    del fields["process"]
    fields["metadata"] = b64encode(metadata[: int(share * len(metadata))]).decode()
    with pytest.raises(EndpointMismatch):
        nixl_world.reader.connect(json.dumps(fields).encode())


@pytest.fixture
def reader() -> Iterator[NixlTransport]:
    """One with a pool of a block."""
    made = NixlTransport("within-the-host")
    made.register(Pool(np.zeros((1, BLOCK), np.uint8)))
    yield made
    made.close()


def test_nixl_never_hears_of_a_peer_whose_memory_is_read_without_it(
    lenders: list[ProcessLender], reader: NixlTransport
) -> None:
    """A lender would poll a whole core until each borrower's UCX has answered its connection."""
    fields = json.loads(lenders[0].endpoint)
    del fields["process"]
    for endpoint, is_told in [(lenders[0].endpoint, False), (json.dumps(fields).encode(), True)]:
        peer = reader.connect(endpoint)
        reader.read(peer, [Span(0, 0, BLOCK)]).result(TIMEOUT_S)
        assert reader.agent.check_remote_metadata(peer.name) is is_told
        reader.drop(peer)
    reader.connect(lenders[0].endpoint)


def test_lanes_within_one_host(
    lenders: list[ProcessLender], file_lenders: list[ProcessLender], reader: NixlTransport
) -> None:
    """What may be mapped is; a file that is another one by now is nobody's, and its process is read without it."""
    fields = json.loads(file_lenders[1].endpoint)
    fields["file"]["secret"] = "00" * 16
    another = json.dumps(fields).encode()
    for endpoint, lane in [(lenders[0].endpoint, ATTACHED), (file_lenders[0].endpoint, MAPPED), (another, ATTACHED)]:
        peer = reader.connect(endpoint)
        reader.read(peer, [Span(0, 0, BLOCK)]).result(TIMEOUT_S)
        assert peer.lanes == (lane,)


@pytest.mark.parametrize("num_bytes", [BLOCK, 2 * SMALL_BYTES], ids=["on the caller's thread", "on the transport's"])
def test_a_read_that_breaks_in_an_unexpected_way_fails_alone(
    lenders: list[ProcessLender], num_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read(*_: object) -> None:
        raise MemoryError("no memory")

    reader = NixlTransport("breaking")
    reader.register(Pool(np.zeros((1, 2 * SMALL_BYTES), np.uint8)))
    big = ProcessLender(5, 2 * SMALL_BYTES)
    try:
        broken, other = reader.connect(big.endpoint), reader.connect(lenders[0].endpoint)
        monkeypatch.setattr(broken.attached, "read", read)
        with pytest.raises(TransferError, match="no memory"):
            reader.read(broken, [Span(0, 0, num_bytes)]).result(TIMEOUT_S)
        reader.read(other, [Span(0, 0, BLOCK)]).result(TIMEOUT_S)
    finally:
        reader.close()
        big.kill()
