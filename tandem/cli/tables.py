"""Tables that never cut names, however narrow the terminal, since cut names cannot be told apart."""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, JustifyMethod, RenderResult
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

PIPE_CELLS = 1000
"""Width for output that is no terminal; more than any table needs."""


@contextlib.contextmanager
def uncut(console: Console) -> Iterator[None]:
    """Print without a width limit within the block when the output is no terminal."""
    if console.is_terminal:
        yield
        return
    width, console.width = console.width, PIPE_CELLS
    try:
        yield
    finally:
        console.width = width


class NamesTable:
    """Table with columns of names, then others.

    Where it is too wide, text of the others wraps; then columns of `expendable` are dropped, empty ones first, in
    order. The dropped ones are listed below.
    """

    def __init__(
        self,
        names: Sequence[str],
        others: Sequence[str],
        rows: Sequence[Sequence[str]],
        expendable: Sequence[str] = (),
        text: Sequence[str] = (),
        **style: Any,
    ) -> None:
        """Create a table.

        `names` and `others` are headings; a row has a cell for each.

        `text`: headings of the others that are no figures. `style`: as Table takes it.
        """
        self._names = names
        self._headings = [*names, *others]
        self._rows = rows
        self._expendable = expendable
        self._left = {*names, *text}
        self._style = style

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        empty = {heading for heading in self._headings if not any(self._cells(heading))}
        order = sorted(self._expendable, key=lambda heading: heading not in empty)  # a stable sort
        gone = 0
        while not (table := self._fitting(order[:gone], console, options)) and gone < len(order):
            gone += 1
        yield table or self._table(self._least(order))
        if left_out := [heading for heading in order[:gone] if heading not in empty]:
            yield Text(f"in a wider window: {', '.join(left_out)}", style="dim")

    def _fitting(self, left_out: Sequence[str], console: Console, options: ConsoleOptions) -> Table | None:
        """Return the table with every column as wide as its longest word, or None where that does not fit.

        Remaining width goes to columns that lack least for their longest cell.
        """
        widths = self._least(left_out)
        wide = Measurement.get(console, options.update_width(PIPE_CELLS), self._table(widths)).minimum
        spare = options.max_width - wide
        if spare < 0:
            return None
        longest = {heading: max(map(cell_len, [heading, *self._cells(heading)])) for heading in widths}
        lacking = {heading: longest[heading] - width for heading, width in widths.items()}
        for heading in sorted(widths, key=lambda heading: lacking[heading]):
            added = min(spare, lacking[heading])
            widths[heading] += added
            spare -= added
        return self._table(widths)

    def _least(self, left_out: Sequence[str]) -> dict[str, int]:
        """Return the smallest width by heading; names stay on one line."""
        return {
            heading: max(
                cell_len(word)
                for cell in [*self._cells(heading), heading]
                for word in ([cell] if heading in self._names else cell.split(" "))
            )
            for heading in self._headings
            if heading not in left_out
        }

    def _table(self, widths: Mapping[str, int]) -> Table:
        table = Table(**self._style)
        for heading, width in widths.items():
            justify: JustifyMethod = "left" if heading in self._left else "right"
            table.add_column(heading, justify=justify, width=width, overflow="fold")
        for cells in zip(*map(self._cells, widths), strict=True):
            table.add_row(*map(Text, cells))
        return table

    def _cells(self, heading: str) -> list[str]:
        at = self._headings.index(heading)
        return [row[at] for row in self._rows]
