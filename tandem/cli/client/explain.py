"""`tandem explain`: the candidates of a prompt, or of a placed request, term by term."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from cluster.errors import UnknownRequest
from protos import inference_pb2 as pb
from tandem.cli.tables import NamesTable, uncut
from tandem.client import Target

_TERMS = {
    "read": "source_read_ms",
    "queue": "lender_queue_ms",
    "compute": "lender_compute_ms",
    "transfer": "transfer_ms",
    "own queue": "decode_queue_ms",
    "tail": "prompt_tail_ms",
    "TTFT": "ttft_ms",
    "delay": "delay_ms",
    "affinity": "affinity_ms",
    "cost": "cost_ms",
}
"""Heading and field of PlacementCandidate."""
_EXPENDABLE = (
    "affinity",
    "in flight",
    "source",
    "blocks",
    "delay",
    "read",
    "own queue",
    "queue",
    "tail",
    "transfer",
    "compute",
)
"""Columns that a narrow terminal drops; TTFT and cost stay."""


async def show_explanation(
    console: Console, target: Target, prompt: str, sampling: pb.Sampling, most: int, **options: Any
) -> None:
    """Show the candidates of a prompt.

    `options` has further options of Client.explain.
    """
    async with target.client() as client:
        explanation = await client.explain(prompt, sampling=sampling, **options)
    console.print(f"model {explanation.model}: {explanation.model_reason}", markup=False)
    if explanation.models:
        with uncut(console):
            console.print(model_table(explanation.models))
    words = (
        f"{explanation.prompt_tokens} prompt tokens, {explanation.usable_blocks} blocks that may come from elsewhere"
    )
    console.print(words)
    if not explanation.candidates:
        console.print("no decode worker can start the request now: it would wait")
        return
    with uncut(console):
        console.print(candidate_table(explanation.candidates[:most]))
    console.print(f"ms and MB; {explanation.num_candidates} compared, the first would be chosen", style="dim")
    console.print(reservation_of(explanation), markup=False)


async def show_decisions(console: Console, target: Target, request_id: str, most: int, log: Path | None = None) -> None:
    """Show how a request was placed, with the `most` cheapest candidates of each placement.

    Raises UnknownRequest.

    `log`: a router's records_file, read instead of calling the router.
    """
    if log is None:
        async with target.client() as client:
            past = await client.decisions(request_id)
    else:
        from router.observability.explained import to_response
        from router.observability.record_file import read_record

        with log.open() as lines:
            record = read_record(lines, request_id)
        if record is None:
            raise UnknownRequest(f"{log} has no line of request {request_id!r}", "request_id")
        past = to_response(record)
    if past.model:
        console.print(f"model {past.model}: {past.model_reason}", markup=False)
    if past.models:
        with uncut(console):
            console.print(model_table(past.models))
    for placement in past.placements:
        console.print(f"attempt {placement.attempt}, placed after {placement.placed_after_ms:.1f} ms", style="bold")
        console.print(placement.reason, markup=False)
        with uncut(console):
            console.print(candidate_table(placement.candidates[:most]))
        console.print(f"ms and MB; {placement.num_candidates} were compared, the first was chosen", style="dim")
        console.print(reservation_of(placement), markup=False)
        for line in came_of(placement):
            console.print(line, markup=False)
    if past.error:
        console.print(f"the request ended with: {past.error}", markup=False)
    elif not past.ended:
        console.print("the request is under way" if past.placements else "the request waits for a place")


def reservation_of(decided: pb.Explanation | pb.PlacementDecision) -> str:
    """Return for how much output blocks are reserved, and why."""
    return f"blocks reserved for {decided.reserved_output_tokens} output tokens: {decided.reservation}"


def came_of(placement: pb.PlacementDecision) -> list[str]:
    """Return the predicted values of a placement beside the actual ones."""
    chosen = placement.candidates[0] if placement.candidates else pb.PlacementCandidate()
    lines = []
    if placement.HasField("ttft_ms"):
        lines.append(f"first token: predicted after {chosen.ttft_ms:.1f} ms, came after {placement.ttft_ms:.1f} ms")
    if placement.HasField("hit_blocks"):
        of = f"of {placement.usable_blocks} usable blocks"
        lines.append(f"cached: predicted {chosen.hit_blocks} {of}, came to {placement.hit_blocks}")
    if placement.failure:
        lines.append(f"it did not end there: {placement.failure}")
    return lines


def model_table(models: Sequence[pb.ModelCandidate]) -> NamesTable:
    """Return the table of models; an estimated number of tokens has a ~."""
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
    """Return the table of candidates in milliseconds; terms of 0 and unused workers are blank.

    "in flight" has the megabytes of other requests that delay the transfer and the source's.
    """
    rows, further = [], sorted({name for candidate in candidates for name in candidate.further_ms})
    for candidate in candidates:
        holds = candidate.lender and not candidate.lender_computes
        lender = f"{candidate.lender} (holds)" if holds else candidate.lender
        terms = [getattr(candidate, field) for field in _TERMS.values()]
        terms += [candidate.further_ms.get(name, 0.0) for name in further]
        waiting = candidate.waiting_bytes + candidate.source_waiting_bytes
        row = (
            *(candidate.decode_worker, lender, candidate.source, str(candidate.blocks)),
            *(f"{term:.1f}" if term else "" for term in terms),
            f"{waiting / 1e6:.1f}" if waiting else "",
        )
        rows.append(row)
    return NamesTable(
        ("decode", "lender", "source"), ("blocks", *_TERMS, *further, "in flight"), rows, _EXPENDABLE, box=None
    )
