"""`tandem explain`: the router's candidates for a prompt, term by term."""

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from protos import inference_pb2 as pb
from tandem.client import Client

_TERMS = {
    "read": "source_read_ms",
    "queue": "lender_queue_ms",
    "compute": "lender_compute_ms",
    "transfer": "transfer_ms",
    "own queue": "decode_queue_ms",
    "tail": "prompt_tail_ms",
    "TTFT": "ttft_ms",
    "delay": "delay_ms",
    "cost": "cost_ms",
}
"""Heading, and field of PlacementCandidate."""


async def show_explanation(console: Console, address: str, prompt: str, sampling: pb.Sampling, most: int) -> None:
    async with Client(address) as client:
        explanation = await client.explain(prompt, sampling=sampling)
    words = (
        f"{explanation.prompt_tokens} prompt tokens, {explanation.usable_blocks} blocks that may come from elsewhere"
    )
    console.print(words)
    if not explanation.candidates:
        console.print("no decode worker can start it now: it would wait")
        return
    console.print(candidate_table(explanation.candidates[:most]))
    console.print(f"ms; {explanation.num_candidates} compared, the first would be chosen", style="dim")


def candidate_table(candidates: Sequence[pb.PlacementCandidate]) -> Table:
    """Milliseconds; a term of 0 is left blank."""
    table = Table("decode", "lender", "source", box=None)
    for heading in ("blocks", *_TERMS):
        table.add_column(heading, justify="right")
    for candidate in candidates:
        holds = candidate.lender and not candidate.lender_computes
        lender = f"{candidate.lender} (holds)" if holds else candidate.lender
        terms = [getattr(candidate, field) for field in _TERMS.values()]
        table.add_row(
            *(candidate.decode_worker, lender or "-", candidate.source or "-", str(candidate.blocks)),
            *(f"{term:.1f}" if term else "" for term in terms),
        )
    return table
