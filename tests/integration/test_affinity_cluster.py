"""The affinity hint over a real cluster, as `explain` shows it."""

from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from support.processes import Stream, running, until
from tandem.cli.client.explain import candidate_table

PROMPT = list(range(1, 13))
"""Shorter than a block, so no cache event says anything about it."""


@pytest.mark.parametrize("field", ["session_id", "prompt_cache_key"])
async def test_a_session_goes_back_to_its_worker(model: Path, cluster_of: Any, field: str) -> None:
    """Also where ties go to another worker, and `explain` names the term."""
    router = {"learn_rates": False}
    cluster = cluster_of(model, prefill=0, decode=2, router=router, engine="sim", sim_step_ms=1.0)
    async with running(cluster) as (_, client):
        first, other = "decode-0", "decode-1"  # ties go to the first

        async def quiet() -> bool:
            return all(not each.delay_ms for each in (await client.explain(token_ids=PROMPT)).candidates)

        async def busy() -> bool:
            return (await client.explain(token_ids=PROMPT)).candidates[0].decode_worker == other

        await until(quiet, "the router has heard that nothing runs")
        stream = Stream(client, PROMPT, 2000)
        await until(busy, "the first is busy")
        begun = await Stream(client, PROMPT, 2, **{field: "talk"}).task
        assert begun.receipt.placement.decode_worker == other
        stream.task.cancel()
        await until(quiet, "the router has heard that nothing runs")
        explanation = await client.explain(token_ids=PROMPT, **{field: "talk"})
        preferred, unlike = explanation.candidates
        assert (preferred.decode_worker, unlike.decode_worker) == (other, first)
        assert 0 < preferred.affinity_ms <= 0.05 * (preferred.ttft_ms + preferred.delay_ms)
        assert preferred.cost_ms == pytest.approx(preferred.ttft_ms + preferred.delay_ms - preferred.affinity_ms)
        assert unlike.affinity_ms == 0
        again = await Stream(client, PROMPT, 2, **{field: "talk"}).task
        assert again.receipt.placement.decode_worker == other
        assert "served the last request of this session" in again.receipt.placement.reason
        console = Console(width=200, record=True)
        console.print(candidate_table(explanation.candidates))
        assert "affinity" in console.export_text()
