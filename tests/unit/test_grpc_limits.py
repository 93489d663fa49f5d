"""Channel arguments: gRPC ignores one that it does not know, so that a limit of its own would stay."""

from pathlib import Path

import pytest
from grpc._cython import cygrpc

from cluster.network import rpc

OPTIONS = [*rpc.KEEPALIVE, *rpc.ALLOW_PINGS, *rpc.SIZES, *rpc.PENDING]


@pytest.mark.parametrize("name", sorted({name for name, _ in OPTIONS} | {"grpc.max_connection_age_ms"}))
def test_every_channel_argument_is_one_of_grpc(name: str) -> None:
    assert name.encode() + b"\0" in Path(cygrpc.__file__).read_bytes()


def test_no_call_waits_long_enough_to_be_dropped() -> None:
    """By default gRPC ends a call that was not accepted for 30 s with a bare CANCELLED."""
    assert dict(rpc.PENDING)["grpc.server_max_unrequested_time_in_server"] >= 3600
