"""Block keys: names of KV blocks.

A block is named by the whole token chain that leads to it: `key_i = H(key_{i-1}, tokens_i)`. The root of a chain covers
all else that decides a block's bytes (weights, layout, dtype) and the cache salt. Router and workers compute the same
keys from the same tokens, so a prefix match is exact.
"""

import sys
from array import array
from collections.abc import Sequence
from hashlib import blake2b

import numpy as np

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


def block_keys(parent: BlockKey, token_ids: Sequence[int], block_tokens: int, first_token: int = 0) -> list[BlockKey]:
    """Return the keys of the full blocks of `token_ids[first_token:]`, whose chain continues `parent`.

    `first_token` must be a multiple of `block_tokens`. Tokens after the last full block have no key.
    """
    packed = array("I", token_ids[first_token:]).tobytes()
    width = 4 * block_tokens
    keys: list[BlockKey] = []
    for start in range(0, len(packed) - width + 1, width):
        parent = blake2b(packed[start : start + width], key=parent, digest_size=KEY_BYTES).digest()
        keys.append(parent)
    return keys


def token_array(token_ids: Sequence[int]) -> "array[int]":
    """Convert token ids to uint32, those of a protobuf message in bulk instead of one Python object each."""
    if isinstance(token_ids, list | tuple):
        return array("I", token_ids)
    return array("I", np.asarray(token_ids, np.uint32).tobytes())


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
