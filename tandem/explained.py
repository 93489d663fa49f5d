"""`tandem explain`: the router's candidates for a prompt, term by term."""

from collections.abc import Sequence
from typing import Any

from rich.console import Console

from protos import inference_pb2 as pb
from tandem.client import Target
from tandem.tables import NamesTable, uncut

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
_EXPENDABLE = ("source", "blocks", "delay", "read", "own queue", "queue", "tail", "transfer", "compute")
"""Where the terminal is narrow: TTFT and cost stay."""


async def show_explanation(
    console: Console, target: Target, prompt: str, sampling: pb.Sampling, most: int, **asked: Any
) -> None:
    """`asked`: of the model, as in Client.explain."""
    async with target.client() as client:
        explanation = await client.explain(prompt, sampling=sampling, **asked)
    console.print(f"model {explanation.model}: {explanation.model_reason}", markup=False)
    if explanation.models:
        with uncut(console):
            console.print(model_table(explanation.models))
    words = (
        f"{explanation.prompt_tokens} prompt tokens, {explanation.usable_blocks} blocks that may come from elsewhere"
    )
    console.print(words)
    if not explanation.candidates:
        console.print("no decode worker can start it now: it would wait")
        return
    with uncut(console):
        console.print(candidate_table(explanation.candidates[:most]))
    console.print(f"ms; {explanation.num_candidates} compared, the first would be chosen", style="dim")


def model_table(models: Sequence[pb.ModelCandidate]) -> NamesTable:
    """An estimated number of tokens has a ~."""
    rows = [
        (
            *(model.model, "yes" if model.fit else "no"),
            f"{'' if model.counted else '~'}{model.prompt_tokens}",
            f"{model.price:.6g}",
            f"{model.ttft_ms:.1f}" if model.HasField("ttft_ms") else "",
            model.verdict,
        )
        for model in models
    ]
    return NamesTable(("model", "fit"), ("tokens", "price", "TTFT ms", "verdict"), rows, text=["verdict"], box=None)


def candidate_table(candidates: Sequence[pb.PlacementCandidate]) -> NamesTable:
    """Milliseconds; a term of 0 is left blank, and so is who is not needed."""
    rows = []
    for candidate in candidates:
        holds = candidate.lender and not candidate.lender_computes
        lender = f"{candidate.lender} (holds)" if holds else candidate.lender
        terms = [getattr(candidate, field) for field in _TERMS.values()]
        row = (
            *(candidate.decode_worker, lender, candidate.source, str(candidate.blocks)),
            *(f"{term:.1f}" if term else "" for term in terms),
        )
        rows.append(row)
    return NamesTable(("decode", "lender", "source"), ("blocks", *_TERMS), rows, _EXPENDABLE, box=None)
