"""Mooncake's JSON lines: `{"timestamp": ms, "input_length": n, "output_length": n, "hash_ids": [...]}`."""

from typing import Any

from workloads.traces.columns import Row, hash_ids_of, seconds_of, tokens_of

HASH_TOKENS = 512


def read_row(values: dict[str, Any]) -> Row:
    """Read a row.

    Raises BadRow.
    """
    input_tokens = tokens_of(values, "input_length")
    return Row(
        at_s=seconds_of(values, "timestamp", 1e-3),
        input_tokens=input_tokens,
        output_tokens=tokens_of(values, "output_length"),
        hash_ids=hash_ids_of(values, "hash_ids", input_tokens, HASH_TOKENS),
        hash_tokens=HASH_TOKENS,
    )
