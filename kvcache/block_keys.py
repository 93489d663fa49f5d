"""Block keys: names of KV blocks.

A block is named by the whole token chain that leads to it: `key_i = H(key_{i-1}, tokens_i)`, and by the pictures,
sounds and videos among these tokens. The root of a chain covers all else that decides a block's bytes (weights, layout,
dtype) and the cache salt. Router and workers compute the same keys from the same tokens, so a prefix match is exact.
"""

import sys
from array import array
from bisect import bisect_right
from collections.abc import Sequence
from hashlib import blake2b

import numpy as np

from kvcache.items import Item

BlockKey = bytes
KEY_BYTES = 16
ADAPTER_BYTES = 16
"""Length of an adapter's fingerprint."""


def root_key(model_fingerprint: bytes, cache_salt: str, adapter: bytes = b"") -> BlockKey:
    """Return the parent of the first block of every chain of this model, salt and adapter.

    `adapter`: fingerprint of a LoRA adapter, empty for none.
    """
    salt, key = cache_salt.encode(), model_fingerprint[:64]
    return blake2b(salt, key=key, person=adapter, digest_size=KEY_BYTES).digest()


def resume_name(key: BlockKey) -> BlockKey:
    """Return the name under which a worker of a model with several KV groups announces that a chain can go on here.

    Such a worker holds all that a request needs which continues after the block `key`, not only this block.
    """
    return blake2b(key, digest_size=KEY_BYTES, person=b"resumable").digest()


def block_keys(
    parent: BlockKey, token_ids: Sequence[int], block_tokens: int, items: Sequence[Item] = (), position: int = 0
) -> list[BlockKey]:
    """Return the keys of the full blocks of `token_ids`, whose chain continues `parent`.

    Tokens after the last full block have no key. `items`: those of the whole chain, in order of their places, of which
    `token_ids[0]` is number `position`. All tokens of an item are equal, so the key of a block that holds a part of one
    covers which item it is and where it begins.
    """
    packed = array("I", token_ids).tobytes()
    width = 4 * block_tokens
    if items:
        return _keys_with_items(parent, packed, block_tokens, items, position)
    keys: list[BlockKey] = []
    for start in range(0, len(packed) - width + 1, width):
        parent = blake2b(packed[start : start + width], key=parent, digest_size=KEY_BYTES).digest()
        keys.append(parent)
    return keys


def _keys_with_items(
    parent: BlockKey, packed: bytes, block_tokens: int, items: Sequence[Item], position: int
) -> list[BlockKey]:
    """Return the keys of full blocks some of which may hold parts of items.

    A block's key is the hash of its tokens and, for each of its items, of the identifier and the distance from the
    block's first token to the item's. The `person` of this hash differs from that of a block of text, so that no text
    is taken for an item.
    """
    width = 4 * block_tokens
    ends = [item.end for item in items]
    keys: list[BlockKey] = []
    for start in range(0, len(packed) - width + 1, width):
        first = position + start // 4
        hashed = blake2b(packed[start : start + width], key=parent, digest_size=KEY_BYTES)
        at = bisect_right(ends, first)
        if at < len(items) and items[at].offset < first + block_tokens:
            hashed = blake2b(packed[start : start + width], key=parent, digest_size=KEY_BYTES, person=b"items")
            while at < len(items) and items[at].offset < first + block_tokens:
                hashed.update(items[at].identifier + (items[at].offset - first).to_bytes(8, "little", signed=True))
                at += 1
        parent = hashed.digest()
        keys.append(parent)
    return keys


def token_array(token_ids: Sequence[int]) -> "array[int]":
    """Convert token ids to uint32, those of a protobuf message in bulk instead of one Python object each."""
    if isinstance(token_ids, list | tuple):
        return array("I", token_ids)
    return array("I", np.asarray(token_ids, np.uint32).tobytes())


def token_digest(token_ids: Sequence[int]) -> bytes:
    """Return a digest of tokens, 16 bytes, by which two processes see that they read a prompt alike."""
    return blake2b(token_array(token_ids).tobytes(), digest_size=16).digest()


def max_token(token_ids: Sequence[int]) -> int:
    """Return the largest token id, as fast as `token_array`.

    There must be one.
    """
    return max(token_ids) if isinstance(token_ids, list | tuple) else int(np.asarray(token_ids, np.uint32).max())


def pack_tokens(token_ids: Sequence[int]) -> bytes:
    """Pack token ids as little-endian uint32."""
    packed = array("I", token_ids)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def unpack_tokens(packed: bytes) -> "array[int]":
    """Undo `pack_tokens`.

    Raises ValueError for bytes of another length.
    """
    tokens = array("I")
    tokens.frombytes(packed)
    if sys.byteorder == "big":
        tokens.byteswap()
    return tokens


def split_keys(joined: bytes) -> list[BlockKey]:
    """Undo `b"".join(keys)`."""
    return [joined[i : i + KEY_BYTES] for i in range(0, len(joined), KEY_BYTES)]
