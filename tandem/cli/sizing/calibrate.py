"""Output of `tandem calibrate`: a calibration in words."""

from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

from sizing.calibration import Calibration


def show_calibration(console: Console, calibration: Calibration, path: Path) -> None:
    table = Table(box=box.SIMPLE_HEAD, title="what a step takes", title_justify="left")
    for heading in ("", "us each", "us a prompt token", "ns a pair", "us a stream", "ns a token of context", "off by"):
        table.add_column(heading, justify="right" if heading else "left")
    for role, timing in (("prefill", calibration.prefill), ("decode", calibration.decode)):
        if timing is not None:
            each, pair = 1e6 * timing.prompt_token_s, 1e9 * timing.prompt_pair_s
            terms = (1e6 * timing.step_s, each, pair, 1e6 * timing.stream_s, 1e9 * timing.kv_token_s)
            fit = calibration.fits[role]
            table.add_row(role, *(f"{value:.4g}" for value in terms), f"{fit.error:.0%} of {fit.rows}")
    console.print(table)
    console.print(
        f"a message {1e6 * calibration.message_s:.0f} us, a read {1e6 * calibration.read_latency_s:.0f} us and "
        f"{calibration.nic_bytes_per_s / 1e9:.3g} GB/s, blocks of {calibration.block_tokens} tokens "
        f"and {calibration.block_bytes:,} bytes"
    )
    if calibration.caveat:
        console.print(calibration.caveat, style="yellow")
    console.print(f"calibration: {path}")
