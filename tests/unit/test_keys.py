"""Names of blocks: exact values, since router and workers of different versions must agree on them."""

from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcache.block_keys import (
    KEY_BYTES,
    block_keys,
    max_token,
    pack_tokens,
    root_key,
    split_keys,
    token_array,
    unpack_tokens,
)
from protos.decode_pb2 import DecodeRequest

ROOT = root_key(b"model", "")
tokens = st.lists(st.integers(0, 2**32 - 1), max_size=40)


def test_names_are_pinned() -> None:
    assert root_key(b"model", "").hex() == "ebc4b4abf8d58a42fbe33854a4114483"
    assert [key.hex() for key in block_keys(ROOT, [1, 2, 3, 4, 5, 6, 7, 8], 4)] == [
        "41767dd523ad66b6e52c2b04ed4bb018",
        "f9ed00f0633d077f60a9847e32658bb7",
    ]


def test_a_partial_block_has_no_name() -> None:
    assert block_keys(ROOT, [], 4) == []
    assert block_keys(ROOT, [1, 2, 3], 4) == []
    assert block_keys(ROOT, [1, 2, 3, 4, 5, 6, 7], 4) == block_keys(ROOT, [1, 2, 3, 4], 4)


def test_the_salt_and_the_model_change_every_name() -> None:
    chains = [block_keys(root_key(model, salt), [1] * 12, 4) for model in (b"a", b"b") for salt in ("", "tenant")]
    assert len({key for chain in chains for key in chain}) == 12


def test_equal_tokens_at_different_places_have_different_names() -> None:
    keys = block_keys(ROOT, [7, 7, 7, 7] * 3, 4)
    assert len(set(keys)) == 3


@given(tokens)
def test_joined_keys_split_again(token_ids: list[int]) -> None:
    keys = block_keys(ROOT, token_ids, 2)
    assert all(len(key) == KEY_BYTES for key in keys)
    assert split_keys(b"".join(keys)) == keys


@given(st.lists(st.integers(0, 2**32 - 1)))
def test_tokens_survive_being_packed(token_ids: list[int]) -> None:
    packed = pack_tokens(token_ids)
    assert len(packed) == 4 * len(token_ids)
    assert list(unpack_tokens(packed)) == token_ids
    with pytest.raises(ValueError, match="multiple"):
        unpack_tokens(packed + b"x")


@given(st.lists(st.integers(0, 2**32 - 1), max_size=50))
def test_tokens_of_a_message_are_those_of_a_list(token_ids: list[int]) -> None:
    message = DecodeRequest(prompt_token_ids=token_ids)
    for given_as in (token_ids, tuple(token_ids), array("I", token_ids), message.prompt_token_ids):
        assert token_array(given_as) == array("I", token_ids)
        if token_ids:
            assert max_token(given_as) == max(token_ids)
