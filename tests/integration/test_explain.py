"""`Explain` over a real cluster: it says what placement then does."""

import random
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from cluster.errors import InvalidRequest
from protos import inference_pb2 as pb
from support.processes import until
from tandem.client import Client
from tandem.explained import candidate_table

BLOCK = 16


async def test_the_first_candidate_is_where_the_request_goes(
    model: Path, cluster_of: Any, ask: Any, audit: Any
) -> None:
    router = {"learn_rates": False}
    cluster = cluster_of(model, prefill=1, decode=2, router=router, engine="sim", sim_step_ms=2.0)
    async with cluster, Client(cluster.address) as client:
        await client.wait_for_workers(1, 2, 30)
        prompt = random.Random(1).choices(range(1000), k=20 * BLOCK)
        for _ in range(2):  # cold, and with caches
            await audit([worker.address for worker in cluster.workers], settle_s=0)

            async def quiet() -> bool:
                """The router has heard that nothing runs."""
                candidates = (await client.explain(token_ids=prompt)).candidates
                return all(candidate.delay_ms == candidate.decode_queue_ms == 0 for candidate in candidates)

            await until(quiet, "the router has heard that nothing runs")
            explanation = await client.explain(token_ids=prompt)
            answer = await ask(client, prompt)
            first, placement = explanation.candidates[0], answer.placement
            assert (first.decode_worker, first.lender, first.source) == (
                *(placement.decode_worker, placement.lender),
                placement.source,
            )
            assert first.ttft_ms == pytest.approx(placement.predicted_ttft_ms)
            assert explanation.num_candidates == len(explanation.candidates) == placement.candidates
        assert explanation.prompt_tokens == 20 * BLOCK
        assert explanation.usable_blocks == 19
        console = Console(width=160, record=True)
        console.print(candidate_table(explanation.candidates))
        shown = console.export_text()
        assert f"{first.cost_ms:.1f}" in shown
        assert first.decode_worker in shown
        with pytest.raises(InvalidRequest) as caught:
            await client.explain(token_ids=prompt, sampling=pb.Sampling(top_p=2.0))
        assert caught.value.field == "sampling.top_p"
