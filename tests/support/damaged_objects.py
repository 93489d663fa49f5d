"""Damage to a stored block, drawn at random, as by a broken disk, a dying writer or an attacker without the secret."""

import random


def damaged(stored: bytes, others: list[bytes], rng: random.Random) -> bytes:
    """Return other bytes in place of `stored`; `others` are objects of other blocks, models and layouts."""
    match rng.randrange(7):
        case 0:  # one bit, anywhere
            changed = bytearray(stored)
            changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
            return bytes(changed)
        case 1:  # one byte of the header
            changed = bytearray(stored)
            at = rng.randrange(min(256, len(changed)))
            changed[at] = (changed[at] + rng.randrange(1, 256)) % 256
            return bytes(changed)
        case 2:  # torn: the rest was never written
            at = rng.randrange(len(stored))
            return stored[:at] + bytes(len(stored) - at)
        case 3:  # truncated
            return stored[: rng.randrange(len(stored))]
        case 4:  # longer
            return stored + rng.randbytes(rng.randrange(1, 100))
        case 5:  # another object
            return rng.choice(others)
        case _:  # the head of one object, the rest of another
            other, at = rng.choice(others), rng.randrange(len(stored))
            return stored[:at] + other[at:]
