"""Azure's CSV: `TIMESTAMP,ContextTokens,GeneratedTokens`.

Times are `2023-11-16 18:15:46.6805900` in UTC, or with a zone, `2024-05-10 00:00:00.009930+00:00`.
"""

import re
from collections.abc import Sequence
from datetime import UTC, datetime

from simulator.errors import shown
from simulator.traces.row import BadRow, Row, tokens_of

_TIME = re.compile(r"(?P<second>[0-9][^.]{0,30}?)(\.(?P<fraction>[0-9]{1,30}))?(?P<zone>Z|[+-][0-9]{2}:?[0-9]{2})?")
COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")


def read_row(header: Sequence[str], cells: Sequence[str]) -> Row:
    """Read a row.

    Raises BadRow.
    """
    if len(cells) != len(header):
        raise BadRow(f"has {len(cells)} columns, the first line {len(header)}")
    named = dict(zip(header, cells, strict=True))
    counts = {name: _whole(name, named[name]) for name in COLUMNS[1:]}
    return Row(_seconds(named["TIMESTAMP"]), tokens_of(counts, "ContextTokens"), tokens_of(counts, "GeneratedTokens"))


def _whole(name: str, cell: str) -> int:
    try:
        return int(cell)
    except ValueError:
        raise BadRow(f"{name} is {shown(cell)}, not a whole number") from None


def _seconds(cell: str) -> float:
    match = _TIME.fullmatch(cell.strip())
    try:
        if match is None:
            raise ValueError
        at = datetime.fromisoformat(match["second"] + (match["zone"] or ""))
        at = at if at.tzinfo else at.replace(tzinfo=UTC)
        return at.timestamp() + (float(f"0.{match['fraction']}") if match["fraction"] else 0.0)
    except (ValueError, OverflowError):
        raise BadRow(f"TIMESTAMP is {shown(cell)}, not a time such as 2023-11-16 18:15:46.6805900") from None
