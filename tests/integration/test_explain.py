"""`Explain` over a real cluster: it says what placement then does."""

import json
import random
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from cluster.errors import InvalidRequest, ServiceError, UnknownRequest
from protos import inference_pb2 as pb
from router.observability.explained import to_response
from router.observability.record_file import read_record
from router.placement.snapshots import decided_again, read_recorded
from router.security.api_keys import PREFIX, hash_of
from support.api_keys import keys_file
from support.processes import LENDER_ALWAYS, Stream, kill_worker, named, running, until
from tandem.cli.client.explain import came_of, candidate_table, show_decisions
from tandem.client import Client, Target

BLOCK = 16


async def test_the_first_candidate_is_where_the_request_goes(
    model: Path, cluster_of: Any, ask: Any, audit: Any
) -> None:
    router = {"learn_rates": False}
    cluster = cluster_of(model, prefill=1, decode=2, router=router, engine="sim", sim_step_ms=2.0)
    async with cluster, Client(cluster.address) as client:
        await client.wait_for_workers(1, 2, 120)
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


SIM: dict[str, Any] = {"engine": "sim", "sim_step_ms": 4.0, "kv_memory_mib": 4}


async def test_a_decision_can_be_asked_for_afterwards(model: Path, cluster_of: Any) -> None:
    """One that went well, one whose worker died, one that was refused, one under way, and none."""
    tenants = {"none": {"tokens_per_minute": 1}}
    router = {"decode_prefill_tokens_per_s": 100.0, "tenants": tenants}
    async with running(cluster_of(model, decode=2, router=router, **SIM)) as (cluster, client):
        prompt = random.Random(1).choices(range(1000), k=20 * BLOCK)
        for number in range(2):
            stream = await Stream(client, prompt, 5, request_id=f"well-{number}").task
            receipt, past = stream.receipt, await client.decisions(f"well-{number}")
            (placement,) = past.placements
            chosen = placement.candidates[0]
            assert (chosen.decode_worker, chosen.lender) == (receipt.placement.decode_worker, receipt.placement.lender)
            assert chosen.ttft_ms == pytest.approx(receipt.placement.predicted_ttft_ms)
            assert chosen.hit_blocks == receipt.placement.predicted_hit_blocks
            assert placement.num_candidates == len(placement.candidates) == receipt.placement.candidates
            assert placement.reason == receipt.placement.reason
            assert placement.ttft_ms > 0
            assert (placement.attempt, placement.failure, past.error, past.ended) == (1, "", "", True)
        assert placement.hit_blocks >= 19, "the second time it is cached"

        dies = Stream(client, prompt, 400, request_id="dies")
        await dies.reached(5)
        under_way = await client.decisions("dies")
        assert (len(under_way.placements), under_way.ended) == (1, False)
        victim = named(cluster, under_way.placements[0].candidates[0].decode_worker)
        kill_worker(victim)
        await dies.task
        past = await client.decisions("dies")
        first, second = past.placements
        assert [first.attempt, second.attempt] == [1, 2] == [1, dies.receipt.placement.attempt]
        assert "decode" in first.failure
        assert second.candidates[0].decode_worker == dies.receipt.placement.decode_worker
        assert any("did not end there" in line for line in came_of(first))

        for count, options in ((5, {"tenant": "none"}), (-1, {})):
            with pytest.raises(ServiceError) as refused:
                await Stream(client, prompt, count, request_id="refused", **options).task
            assert (await client.decisions("refused")).error == str(refused.value)

        with pytest.raises(UnknownRequest, match="not among the last requests"):
            await client.decisions("never")
        with pytest.raises(InvalidRequest):
            await client.decisions("")


async def test_decisions_are_written_down_and_made_again(model: Path, cluster_of: Any, tmp_path: Path) -> None:
    """What a client said is not in the file."""
    log = tmp_path / "records.jsonl"
    tenants = {"none": {"tokens_per_minute": 1}}
    router = {"records_file": str(log), "record_placements": True, "tenants": tenants} | LENDER_ALWAYS
    async with running(cluster_of(model, router=router, **SIM)) as (_, client):
        prompt = random.Random(1).choices(range(1000), k=20 * BLOCK)
        served = await Stream(client, prompt, 5, request_id="served").task
        for count, options in ((5, {"tenant": "none"}), (-1, {})):
            with pytest.raises(ServiceError):
                await Stream(client, prompt, count, request_id="refused", **options).task
    lines = log.read_text().splitlines()
    assert [next(iter(json.loads(line))) for line in lines] == ["placed", "request", "request", "request"]
    assert str(prompt[0]) + "," + str(prompt[1]) not in log.read_text()
    decision, placement_snapshot = read_recorded(json.loads(lines[0])["placed"])
    assert decided_again(placement_snapshot) == decision
    assert decision.decode_id == served.receipt.placement.decode_worker
    record = read_record(["not ours", "[]", *lines, lines[0][:50]], "served")
    assert record is not None
    (placement,) = to_response(record).placements
    assert placement.candidates[0].lender == served.receipt.placement.lender == "prefill-0"
    assert (placement.ttft_ms > 0, placement.HasField("hit_blocks")) == (True, True)
    refused = read_record(lines, "refused")
    assert refused is not None
    answer = to_response(refused)
    assert (answer.error, len(answer.placements)) == ("INVALID_ARGUMENT: sampling.max_tokens", 0)
    console = Console(width=160, record=True)
    await show_decisions(console, Target("nobody:1"), "served", 10, log)
    assert "first token: predicted after" in console.export_text()


async def test_each_tenant_asks_for_its_own_decisions_and_operators_for_all(
    model: Path, cluster_of: Any, tmp_path: Path
) -> None:
    texts = {name: f"{PREFIX}{name * 43}" for name in ("a", "b", "o")}
    keys: list[dict[str, Any]] = [{"name": n, "sha256": hash_of(text), "tenant": n} for n, text in texts.items()]
    keys[2]["operator"] = True
    router = {"api_keys_file": keys_file(tmp_path, *keys), "internal_port": 0}
    async with (
        cluster_of(model, router=router, **SIM) as cluster,
        Client(cluster.address, api_key=texts["a"]) as one,
        Client(cluster.address, api_key=texts["b"]) as other,
        Client(cluster.address, api_key=texts["o"]) as operator,
    ):
        await Stream(one, [1, 2, 3], 2, request_id="mine").task
        assert (await one.decisions("mine")).tenant == "a"
        assert (await operator.decisions("mine")).tenant == "a"
        with pytest.raises(UnknownRequest):
            await other.decisions("mine")
