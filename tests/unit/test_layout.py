import pytest

from kvcache.layout import KvLayout

LAYOUT = KvLayout(layers=2, kv_heads=3, head_dim=8, block_tokens=4, dtype="bfloat16")


def test_sizes() -> None:
    assert LAYOUT.head_bytes == 2 * 2 * 4 * 8 * 2
    assert LAYOUT.block_bytes == 3 * 256


@pytest.mark.parametrize(("num_tokens", "blocks"), [(0, 0), (1, 1), (4, 1), (5, 2), (8, 2)])
def test_blocks_for_tokens(num_tokens: int, blocks: int) -> None:
    assert LAYOUT.blocks_for(num_tokens) == blocks


def test_everything_that_decides_the_bytes_changes_the_fingerprint() -> None:
    others = [
        KvLayout(1, 3, 8, 4, "bfloat16"),
        KvLayout(2, 2, 8, 4, "bfloat16"),
        KvLayout(2, 3, 16, 4, "bfloat16"),
        KvLayout(2, 3, 8, 8, "bfloat16"),
        KvLayout(2, 3, 8, 4, "float16"),
    ]
    prints = {layout.fingerprint(b"w") for layout in [LAYOUT, *others]} | {LAYOUT.fingerprint(b"v")}
    assert len(prints) == 7
    assert all(len(fingerprint) == 32 for fingerprint in prints)
