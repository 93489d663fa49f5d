import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from kvtransfer import fingerprint
from kvtransfer.fingerprint import fingerprint_blocks

HEADS = 2
BLOCK_BYTES = 64  # two heads of four words


def pool_of(num_blocks: int, seed: int = 1) -> NDArray[np.uint8]:
    return np.random.default_rng(seed).integers(0, 256, (num_blocks, BLOCK_BYTES), np.uint8)


def test_values_are_pinned() -> None:
    """Two workers of different versions compare them."""
    pool = np.arange(2 * BLOCK_BYTES, dtype=np.uint8).reshape(2, BLOCK_BYTES)
    assert fingerprint_blocks(pool, [0, 1], HEADS).tolist() == [
        [10005569699802608541, 8082003518944539549],
        [6158437338086470557, 4234871157228401565],
    ]


@pytest.mark.parametrize("words", [1, 4, 37, 511, 512, 513, 1024, 1500])
def test_compiled_and_by_numpy_they_are_the_same(words: int, monkeypatch: pytest.MonkeyPatch) -> None:
    pool = np.random.default_rng(words).integers(0, 256, (5, HEADS * words * 8), np.uint8)
    assert fingerprint.compiled() is not None, "this machine has a compiler"
    compiled = fingerprint_blocks(pool, [4, 0, 3], HEADS)
    monkeypatch.setattr(fingerprint, "compiled", lambda: None)
    assert np.array_equal(compiled, fingerprint_blocks(pool, [4, 0, 3], HEADS))


def test_zeros_do_not_fold_to_zero() -> None:
    assert fingerprint_blocks(np.zeros((1, BLOCK_BYTES), np.uint8), [0], HEADS).all()


def test_rows_follow_the_order_of_the_ids() -> None:
    pool = pool_of(3)
    apart = [fingerprint_blocks(pool, [block], HEADS)[0].tolist() for block in (2, 0, 2)]
    assert fingerprint_blocks(pool, [2, 0, 2], HEADS).tolist() == apart
    assert fingerprint_blocks(pool, [], HEADS).shape == (0, HEADS)


def test_the_definition() -> None:
    """The fast form equals `sum((mixed(word_i) + c_i) * m_i)`: linear in the mixed words, with odd multipliers."""
    zeros = np.zeros((1, BLOCK_BYTES), np.uint8)
    base = int(fingerprint_blocks(zeros, [0], HEADS)[0, 0])
    multipliers = []
    for word in range(4):
        one = zeros.copy()
        one.view(np.uint64)[0, word] = 1
        multipliers.append((int(fingerprint_blocks(one, [0], HEADS)[0, 0]) - base) % 2**64)
    assert all(multiplier % 2 for multiplier in multipliers)
    assert len(set(multipliers)) == 4
    pool = pool_of(1)
    words = pool.view(np.uint64)[0, :4].tolist()
    want = (base + sum((w ^ w >> 32) * m for w, m in zip(words, multipliers, strict=True))) % 2**64
    assert int(fingerprint_blocks(pool, [0], HEADS)[0, 0]) == want


@given(st.integers(0, BLOCK_BYTES - 1), st.integers(1, 255))
def test_any_changed_byte_shows_in_its_own_head_only(offset: int, flip: int) -> None:
    pool = pool_of(2)
    before = fingerprint_blocks(pool, [0, 1], HEADS)
    pool[1, offset] ^= flip
    changed = fingerprint_blocks(pool, [0, 1], HEADS) != before
    head = offset // (BLOCK_BYTES // HEADS)
    assert changed.tolist() == [[False, False], [head == 0, head == 1]]


@pytest.mark.parametrize("bit", range(64))
@pytest.mark.parametrize("level", [0, 1])
def test_a_line_that_is_stuck_shows(bit: int, level: int) -> None:
    """The same bit of every word: in a plain sum of products, changes of the topmost cancel out every other time."""
    for seed in range(20):
        pool = pool_of(1, seed)
        before = fingerprint_blocks(pool, [0], HEADS)
        words = pool.view(np.uint64)
        stuck = words | np.uint64(1 << bit) if level else words & ~np.uint64(1 << bit)
        changed = (stuck != words).reshape(HEADS, -1).any(axis=1)
        assert (fingerprint_blocks(stuck.view(np.uint8), [0], HEADS) != before).tolist() == [changed.tolist()]


@given(st.permutations(range(8)))
def test_swapped_words_show(order: list[int]) -> None:
    pool = pool_of(1)
    moved = pool.view(np.uint64)[:, order].copy().view(np.uint8)
    same = fingerprint_blocks(pool, [0], HEADS) == fingerprint_blocks(moved, [0], HEADS)
    assert bool(same.all()) == (order == list(range(8)))


@pytest.mark.parametrize("head", [0, 1])
def test_one_head_can_be_checked_alone(head: int) -> None:
    """A tensor-parallel rank holds its heads only, and must get the same numbers for them."""
    pool = pool_of(2)
    half = BLOCK_BYTES // HEADS
    part = np.ascontiguousarray(pool[:, head * half : (head + 1) * half])
    assert (
        fingerprint_blocks(part, [0, 1], 1)[:, 0].tolist() == fingerprint_blocks(pool, [0, 1], HEADS)[:, head].tolist()
    )
