"""Tables that never cut names, however narrow the terminal, since cut names cannot be told apart.

Receipts in words.
"""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, JustifyMethod, RenderResult
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from protos import inference_pb2 as pb

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


def show_receipt(console: Console, finish: pb.Finish | None, wanted: bool) -> None:
    """Print a receipt if it is wanted and there."""
    if wanted and finish is not None:
        console.print(describe(finish.receipt))
        console.print(stage_table(finish.receipt))


def describe(receipt: pb.Receipt, ttft_ms: float | None = None, itl_ms: float | None = None) -> Text:
    """Return two or three lines; `ttft_ms` and `itl_ms` are the client's measurements."""
    kv, placement = receipt.kv, receipt.placement
    pair = placement.decode_worker + (f" <- {placement.lender}" if placement.lender else " alone")
    text = Text()
    text.append(f"{receipt.request_id}  {pair}", style="bold")
    if ttft_ms is not None and itl_ms is not None:
        text.append(f"  TTFT {ttft_ms:.1f} ms  inter-token {itl_ms:.1f} ms")
    text.append(
        f"\n  blocks: {kv.reused_blocks} reused, {kv.restored_blocks} restored, {kv.store_blocks} from the store,"
        f" {kv.moved_blocks} moved,"
        f" {kv.computed_blocks} computed"
        f" ({kv.computed_tokens} tokens)"
    )
    if kv.moved_blocks:
        over = " ".join([kv.transport, *kv.ucx_transports])
        text.append(f"; {format_bytes(kv.moved_bytes)} over {over}, {kv.verified_blocks}/{kv.moved_blocks} verified")
    if kv.pinned_blocks:
        text.append(f"; {kv.pinned_blocks} blocks of the prompt stay")
    if kv.pins_gave_way:
        text.append(f"; {kv.pins_gave_way} blocks that stayed before gave way to other requests", style="yellow")
    if kv.preemptions:
        text.append(f"; preempted {kv.preemptions} times, {kv.recomputed_tokens} tokens computed again", style="yellow")
    if kv.mismatched_blocks:
        text.append(f"; {kv.mismatched_blocks} ARRIVED CORRUPTED and were not used", style="bold red")
    if kv.restore_failure:
        text.append(f"; restoring ended early: {kv.restore_failure}", style="yellow")
    if kv.store_failure:
        text.append(f"; fetching from the store ended early: {kv.store_failure}", style="yellow")
    if kv.hedged_blocks:
        text.append(f"; {kv.hedged_blocks} computed while the lender was silent", style="yellow")
    if kv.loan_failure:
        text.append(f"; the loan ended early: {kv.loan_failure}", style="yellow")
    if receipt.HasField("speculation"):
        drafted = receipt.speculation
        text.append(f"; {drafted.accepted_tokens} of {drafted.draft_tokens} guessed tokens were right")
    text.append(f"\n  why: {placement.reason}", style="dim")
    text.append(f"\n  model: {receipt.model}, {receipt.model_reason}", style="dim")
    if receipt.HasField("price"):
        price = receipt.price
        text.append(f"\n  price: {price.input + price.output:.6g} ({price.input:.6g} in, {price.output:.6g} out)")
    return text


def stage_table(receipt: pb.Receipt) -> Table:
    """Return the table of stages."""
    table = Table(title=f"where the time of {receipt.request_id} went", title_justify="left")
    table.add_column("stage")
    table.add_column("where")
    table.add_column("from ms", justify="right")
    table.add_column("took ms", justify="right")
    for stage in receipt.stages:
        table.add_row(stage.name, stage.where, f"{stage.start_ms:.1f}", f"{stage.duration_ms:.1f}")
    return table


def format_bytes(count: int) -> str:
    return f"{count / 1024:.0f} KiB" if count < 1 << 20 else f"{count / (1 << 20):.1f} MiB"
