"""Receipts in words."""

from rich.console import Console
from rich.table import Table
from rich.text import Text

from protos import inference_pb2 as pb


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
