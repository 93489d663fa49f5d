"""Messages of loans as bytes of `protos/loans.proto`."""

from collections.abc import Iterable, Iterator, Sequence

from google.protobuf.message import DecodeError

from cluster.network.mux import ProtocolError
from kvcache.block_keys import KEY_BYTES, BlockKey, pack_tokens, unpack_tokens
from kvcache.item_messages import item_messages, read_items
from loans.messages import Blocks, Lent, Peer, PlacementMark, Release, Started, Want
from protos import loans_pb2 as pb

VERSION = 1
"""Version of the messages between engines. Routers pair engines of one version only."""
MAX_FINGERPRINT_BYTES = 4 << 20
"""Bytes of fingerprints in one message; a longer announcement is several messages."""


def holder_of(peer: Peer) -> pb.Holder:
    return pb.Holder(worker_id=peer.worker_id, loan_address=peer.address, incarnation=peer.incarnation)


def peer_of(holder: pb.Holder) -> Peer:
    """Undo `holder_of`."""
    return Peer(holder.worker_id, holder.loan_address, holder.incarnation)


def pack_keys(keys: Iterable[BlockKey]) -> bytes:
    return b"".join(keys)


def unpack_keys(packed: bytes) -> list[BlockKey]:
    """Undo `pack_keys`. Raises ValueError."""
    if len(packed) % KEY_BYTES:
        raise ValueError(f"{len(packed)} bytes are not a whole number of keys of {KEY_BYTES}")
    return [packed[at : at + KEY_BYTES] for at in range(0, len(packed), KEY_BYTES)]


def pack_want(want: Want) -> bytes:
    message = pb.Want(
        request_id=want.request_id,
        keys=pack_keys(want.keys),
        first_block=want.first_block,
        may_compute=want.may_compute,
        token_ids=pack_tokens(want.token_ids),
        root=want.root,
        adapter=want.adapter,
        priority=want.priority,
        router_id=want.mark.router_id,
        placement_sequence=want.mark.sequence,
        source=None if want.source is None else holder_of(want.source),
        reads_store=want.reads_store,
        items=item_messages(want.items),
        only_counts=want.only_counts,
    )
    return message.SerializeToString()


def unpack_want(payload: bytes) -> Want:
    """Undo `pack_want`. Raises ProtocolError."""
    try:
        message = pb.Want.FromString(payload)
        keys, token_ids = unpack_keys(message.keys), unpack_tokens(message.token_ids)
    except (DecodeError, ValueError) as error:
        raise ProtocolError(f"a want is not valid: {error}") from error
    return Want(
        message.request_id,
        keys,
        message.first_block,
        message.may_compute,
        token_ids,
        message.root,
        message.priority,
        message.adapter,
        PlacementMark(message.router_id, message.placement_sequence),
        peer_of(message.source) if message.HasField("source") else None,
        message.reads_store,
        read_items(message.items),
        message.only_counts,
    )


def pack_lent(message: Lent) -> Iterator[bytes]:
    """Yield a lender's message, in parts below the size limit."""
    if isinstance(message, Started):
        yield pb.Lent(started=pb.Started(**message._asdict())).SerializeToString()
        return
    first, block_ids, fingerprints, fetched = message
    width = len(fingerprints) // len(block_ids)
    step = max(1, MAX_FINGERPRINT_BYTES // width) if width else len(block_ids)
    for at in range(0, len(block_ids), step):
        part = fingerprints[at * width : (at + step) * width]
        blocks = pb.Blocks(first=first + at, block_ids=block_ids[at : at + step], fingerprints=part, fetched=fetched)
        yield pb.Lent(blocks=blocks).SerializeToString()


def unpack_lent(payload: bytes) -> Lent:
    """Undo `pack_lent` for one part. Raises ProtocolError."""
    try:
        message = pb.Lent.FromString(payload)
    except DecodeError as error:
        raise ProtocolError(f"a lender's message is not valid: {error}") from error
    match message.WhichOneof("message"):
        case "started":
            started = message.started
            return Started(started.end_block, started.cached_end_block, started.queued_ms, started.num_waiting)
        case "blocks":
            blocks = message.blocks
            return Blocks(blocks.first, tuple(blocks.block_ids), blocks.fingerprints, blocks.fetched)
    raise ProtocolError("a lender's message is empty")


def pack_release(first: int, count: int) -> bytes:
    return pb.Release(first=first, count=count).SerializeToString()


def unpack_releases(payloads: Sequence[bytes]) -> Iterator[Release]:
    """Undo `pack_release`. Raises ProtocolError."""
    for payload in payloads:
        try:
            message = pb.Release.FromString(payload)
        except DecodeError as error:
            raise ProtocolError(f"a release is not valid: {error}") from error
        yield Release(message.first, message.count)
