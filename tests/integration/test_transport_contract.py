"""The contract's tests (`kvtransfer/contract/suite.py`) with every transport of this repository."""

from collections.abc import Iterator

import pytest

from kvtransfer.contract.suite import *  # noqa: F403
from kvtransfer.contract.worlds import BLOCK, World
from kvtransfer.fingerprint import Folding
from kvtransfer.transport import Span
from support.transport_worlds import LocalWorld, NixlWorld, UcxxWorld


@pytest.fixture(params=["local", "nixl", "nixl-mapped", "nixl-itself", "ucxx", "ucxx-tcp"])
def world(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    made: World
    if request.param == "local":
        made = LocalWorld()
    elif request.param == "nixl":
        made = NixlWorld(request.getfixturevalue("lenders"))
    elif request.param == "nixl-mapped":
        made = NixlWorld(request.getfixturevalue("file_lenders"), LENDER_IN_FILE="1")
    elif request.param == "nixl-itself":  # as from another host, or another container
        monkeypatch.setattr("kvtransfer.nixl.attach", lambda *_: None)
        made = NixlWorld(request.getfixturevalue("lenders"))
    elif request.param == "ucxx":
        made = UcxxWorld(request.getfixturevalue("ucxx_lenders"))
    else:
        monkeypatch.setenv("UCX_TLS", "tcp")
        made = UcxxWorld(request.getfixturevalue("ucxx_tcp_lenders"), UCX_TLS="tcp")
    yield made
    made.close()


def test_lanes_are_named_as_ucx_names_them(world: World) -> None:
    peer = world.reader.connect(world.lender(0).endpoint)
    world.done(world.reader.read(peer, [Span(0, 0, BLOCK)]))
    assert all(lane.endswith(("/memory", "/lo")) or lane.startswith(("tcp", "rc", "dc", "ud")) for lane in peer.lanes)


def test_only_a_read_of_mapped_or_attached_memory_tells_fingerprints(world: World) -> None:
    peer = world.reader.connect(world.lender(0).endpoint)
    read = world.reader.read(peer, [Span(0, 0, BLOCK)], None, Folding(BLOCK // 4 // 8))
    world.done(read)
    assert (read.result() is not None) is (getattr(peer, "attached", None) is not None)
