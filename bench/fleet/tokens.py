"""Tokens of the null executor: a function of all tokens before each, so that every answer can be checked."""

FIRST, NUM = 100, 2000
"""Tokens that are sampled: so many from this one on."""
MODULUS = (1 << 61) - 1


def mixed(state: int, token_id: int) -> int:
    """Return the state of a chain of tokens with one more; an empty chain's is 0."""
    return (state * 1_000_003 + token_id + 1) % MODULUS
