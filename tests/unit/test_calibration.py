"""What is fitted to receipts is what made them: of clusters in virtual time, whose machines are known."""

import json
import math
from dataclasses import replace
from itertools import islice
from pathlib import Path

import pytest

from engine.backends.sim.settings import StepTiming, StepWork
from sizing.calibrate import AssumedRates, calibrate
from sizing.calibration import Calibration, Jittered
from sizing.cluster.cluster import SimCluster
from support.virtual_cluster import TIMING, cluster_spec
from workloads.profiles import poisson, profile_named, requests_of
from workloads.request import BadSetup, Outcome, TraceRequest
from workloads.traces.reading import served_of
from workloads.traces.receipts import ServedRequest, write_served

REQUESTS = 250


def logged(outcome: Outcome) -> ServedRequest:
    outcome.receipt.request_id = "r"
    request = outcome.request
    return ServedRequest(
        request.arrival_s,
        request.input_tokens,
        outcome.num_emitted,
        request.hash_tokens,
        request.hash_ids,
        outcome.ttft_s,
        outcome.itl_s,
        outcome.receipt,
    )


def served(num_prefill: int, num_decode: int, seed: int = 0) -> list[ServedRequest]:
    requests: list[TraceRequest] = list(
        islice(requests_of(profile_named("short-chat"), poisson(8, seed), seed, context=2000), REQUESTS)
    )
    outcomes: list[Outcome] = []
    SimCluster(cluster_spec(num_prefill, num_decode, num_blocks=2000), outcomes.append).run(requests)
    return [logged(outcome) for outcome in sorted(outcomes, key=lambda outcome: outcome.request.number)]


def test_the_timing_of_both_roles_is_found_again() -> None:
    found = calibrate(served(2, 2), num_blocks=2000, prefill_chunk=256, decode_chunk=64)
    assert found.prefill is not None
    for fitted in (found.prefill, found.decode):
        assert fitted.step_s == pytest.approx(TIMING.step_s, rel=0.15)
        # A prompt's tokens and its pairs go together, so that one may be taken for the other: their sum is what counts.
        for tokens in (64, 400):
            pairs = tokens * (tokens + 1) / 2
            known = TIMING.prompt_token_s * tokens + TIMING.prompt_pair_s * pairs
            assert fitted.prompt_token_s * tokens + fitted.prompt_pair_s * pairs == pytest.approx(known, rel=0.2)
    assert found.decode.stream_s * 5 + found.decode.kv_token_s * 3000 == pytest.approx(
        TIMING.stream_s * 5 + TIMING.kv_token_s * 3000, rel=0.2
    )
    assert found.message_s == pytest.approx(0.0005, rel=0.05)
    assert (found.block_tokens, found.block_bytes) == (16, 2 * 1024 * 2 * 2 * 16)
    assert all(fit.error < 0.1 for fit in found.fits.values())


def test_what_an_aggregated_cluster_cannot_say_of_transfers_is_asked_for() -> None:
    log = served(0, 1)
    with pytest.raises(BadSetup, match=r"block_bytes: no KV moved .* set --block-bytes or --model"):
        calibrate(log, decode_chunk=64)
    with pytest.raises(BadSetup, match=r"nic_gbps: fewer than 8 transfers .* set --nic-gbps or --gpu"):
        calibrate(log, decode_chunk=64, assumed=AssumedRates(block_bytes=1 << 20))
    found = calibrate(log, decode_chunk=64, assumed=AssumedRates(kv_token_bytes=131_072.0, nic_bytes_per_s=25e9))
    assert found.prefill is None
    assert found.timing("prefill") == found.timing("decode")
    assert (found.block_bytes, found.nic_bytes_per_s) == (16 * 131_072, 25e9)
    assert found.num_blocks == (256 << 20) // found.block_bytes
    assert found.not_measured.keys() == {"block_bytes", "nic_bytes_per_s", "prefill", "num_blocks"}
    assert found.caveat.startswith("not measured: bytes of a block: given; links: given; steps of prefill workers")


@pytest.mark.parametrize("given", [{"block_bytes": 0}, {"nic_bytes_per_s": math.nan}, {"nic_bytes_per_s": -1.0}])
def test_what_is_given_must_be_above_0(given: dict[str, float]) -> None:
    with pytest.raises(BadSetup, match="is not above 0"):
        AssumedRates(**given)  # type: ignore[arg-type]


def test_receipts_of_no_use_are_passed_over() -> None:
    log = served(2, 2)
    for each, (start_ms, duration_ms) in zip(log, [(0.0, -1.0), (math.nan, 1.0), (0.0, math.inf)], strict=False):
        each.receipt.stages[0].start_ms, each.receipt.stages[0].duration_ms = start_ms, duration_ms
    log[3].receipt.ClearField("kv")
    assert calibrate(log, 2000, 256, 64) == calibrate(log[4:], 2000, 256, 64)
    for each in log:
        each.receipt.ClearField("kv")
    with pytest.raises(BadSetup, match="log: 0 undisturbed"):
        calibrate(log)


def test_jitter_is_one_on_average_and_the_same_again() -> None:
    uniform_decode, jittered = StepTiming(0.01, stream_s=0.001), Jittered(StepTiming(0.01, stream_s=0.001), 0.3)
    works = [StepWork(streams=streams, context_tokens=tokens) for streams in range(1, 9) for tokens in range(1000)]
    ratios = sorted(jittered.seconds_of(work) / uniform_decode.seconds_of(work) for work in works)
    assert sum(ratios) / len(ratios) == pytest.approx(1.0, rel=0.02)
    assert ratios[len(ratios) // 10] == pytest.approx(math.exp(-0.3 * 1.2816 - 0.045), rel=0.05)
    assert ratios[-len(ratios) // 10] == pytest.approx(math.exp(0.3 * 1.2816 - 0.045), rel=0.05)
    assert [jittered.seconds_of(work) for work in works[:9]] == [jittered.seconds_of(work) for work in works[:9]]
    assert Jittered(uniform_decode, 0.0).seconds_of(works[5]) == uniform_decode.seconds_of(works[5])


def test_disturbed_requests_are_not_learnt_from() -> None:
    log = served(2, 2)
    clean = calibrate(log, prefill_chunk=256, decode_chunk=64)
    slow = []
    for each in log[:60]:
        receipt = type(each.receipt)()
        receipt.CopyFrom(each.receipt)
        receipt.kv.loan_failure = "the lender died"
        for stage in receipt.stages:
            stage.duration_ms *= 50
        slow.append(replace(each, receipt=receipt))
    assert calibrate([*log, *slow], prefill_chunk=256, decode_chunk=64) == clean


def test_a_log_that_says_too_little() -> None:
    with pytest.raises(BadSetup, match="log: 2 undisturbed requests"):
        calibrate(served(2, 2)[:2])


def test_it_survives_its_file_and_so_does_the_log(tmp_path: Path) -> None:
    log = served(2, 2)
    with (tmp_path / "log").open("w") as file:
        for each in log:
            write_served(file, each)
    found = calibrate(served_of(tmp_path / "log"), 2000, 256, 64)
    assert found == calibrate(log, 2000, 256, 64)
    found.write(tmp_path / "found")
    assert Calibration.read(tmp_path / "found") == found
    assert isinstance(found.decode, StepTiming)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"num_blocks": 0}, "num_blocks"),
        ({"blocks": 3}, "blocks"),
        ({"decode": {"step_s": "x"}}, "decode.step_s"),
        ({"decode": {"step_s": -1}}, "step_s is -1, not 0 to 3600 s"),
        ({"prefill": {"step_s": 1e400}}, "step_s is inf"),
        ({"message_s": 1e400}, "message_s"),
        ({"nic_bytes_per_s": 0}, "nic_bytes_per_s"),
    ],
)
def test_a_wrong_file_is_refused_by_field(tmp_path: Path, change: dict[str, object], said: str) -> None:
    calibrate(served(2, 2)).write(tmp_path / "file")
    content = json.loads((tmp_path / "file").read_text())
    (tmp_path / "file").write_text(json.dumps(content | change))
    with pytest.raises(BadSetup, match=said):
        Calibration.read(tmp_path / "file")
    with pytest.raises(BadSetup, match="No such file"):
        Calibration.read(tmp_path / "none")
