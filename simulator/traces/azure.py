"""Azure's CSV: `TIMESTAMP,ContextTokens,GeneratedTokens`, times as `2023-11-16 18:15:46.6805900`."""

from collections.abc import Sequence
from datetime import UTC, datetime

from simulator.traces.row import BadRow, Row, tokens_of

COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")


def read_row(header: Sequence[str], cells: Sequence[str]) -> Row:
    """Raises BadRow."""
    if len(cells) != len(header):
        raise BadRow(f"has {len(cells)} columns, the first line {len(header)}")
    named = dict(zip(header, cells, strict=True))
    counts = {name: _whole(name, named[name]) for name in COLUMNS[1:]}
    return Row(_seconds(named["TIMESTAMP"]), tokens_of(counts, "ContextTokens"), tokens_of(counts, "GeneratedTokens"))


def _whole(name: str, cell: str) -> int:
    try:
        return int(cell)
    except ValueError:
        raise BadRow(f"{name} is {cell!r}, not a whole number") from None


def _seconds(cell: str) -> float:
    head, _, fraction = cell.strip().partition(".")
    try:
        seconds = datetime.fromisoformat(head).replace(tzinfo=UTC).timestamp()
        return seconds + (int(fraction[:9]) / 10 ** len(fraction[:9]) if fraction else 0.0)
    except (ValueError, OverflowError):
        raise BadRow(f"TIMESTAMP is {cell!r}, not a time such as 2023-11-16 18:15:46.6805900") from None
