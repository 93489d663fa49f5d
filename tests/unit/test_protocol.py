"""Whoever changes the internal protocols says so."""

from hashlib import sha256

from cluster.network.rpc import PROTOCOL
from protos import decode_pb2, encode_pb2, items_pb2, loans_pb2, membership_pb2, mux_pb2, preprocess_pb2

SCHEMA = {1: "ff37ef08fc8e7d04", 2: "1131a5db612fed70", 3: "6e4182b99d94f5b6", 4: "ecf9788c18007a2d"}


def test_another_schema_is_another_version() -> None:
    """Where a process of before would understand the new one all the same, say a field that it may overlook, the digest
    is all that changes here; else raise cluster.network.rpc.PROTOCOL, and add a line."""
    digest = sha256()
    for module in (decode_pb2, encode_pb2, items_pb2, loans_pb2, membership_pb2, mux_pb2, preprocess_pb2):
        digest.update(module.DESCRIPTOR.serialized_pb)
    assert SCHEMA[PROTOCOL] == digest.hexdigest()[:16]
