"""What a planner makes of what routers say."""

import random

from hypothesis import given
from hypothesis import strategies as st

from cluster.metrics import LATENCY_S
from planner.estimates import Counters, Observation, PoolObservation, Tallies, counters_of, missed, observe
from protos import inference_pb2 as pb
from router.placement.fleet.finished_streams import Latencies, TrafficCounters


def finish(prompt: int, lent_blocks: int, own_tokens: int, output: int, decode_ms: float) -> pb.Finish:
    kv = pb.KvReceipt(block_tokens=16, lender_computed_blocks=lent_blocks, computed_tokens=own_tokens)
    stages = [pb.Stage(name="decode", duration_ms=decode_ms)]
    usage = pb.Usage(prompt_tokens=prompt, completion_tokens=output)
    return pb.Finish(receipt=pb.Receipt(kv=kv, stages=stages), usage=usage)


def worker(name: str, role: str, **load: int) -> pb.WorkerStatus:
    return pb.WorkerStatus(worker_id=name, role=role, has_reported=True, num_blocks=100, **load)  # type: ignore[arg-type]


def test_traffic_is_counted_exactly() -> None:
    traffic = TrafficCounters()
    traffic.arrived(100)
    traffic.arrived(60)
    traffic.first_token(0.5)
    traffic.finished(finish(100, lent_blocks=5, own_tokens=20, output=11, decode_ms=400))
    traffic.finished(finish(60, lent_blocks=0, own_tokens=60, output=1, decode_ms=0))  # one token has no gaps
    said = traffic.to_proto(waiting_tokens=7)
    assert (said.arrived, said.arrived_tokens, said.waiting_tokens) == (2, 160, 7)
    assert (said.ended_tokens, said.lent_tokens, said.own_tokens) == (160, 80, 80)
    assert (sum(said.ttft.counts), said.ttft.sum_s) == (1, 0.5)
    assert (sum(said.itl.counts), round(said.itl.sum_s, 9)) == (1, 0.04)
    status = pb.ModelStatus(traffic=said, refused={"queue_full": 3})
    counters = counters_of(status, ttft_s=0.4, itl_s=0.1)
    assert (counters.first_tokens, counters.ttft_missed, counters.streams, counters.itl_missed) == (1, 1, 1, 0)
    assert counters.refused == 3


@given(seconds=st.lists(st.floats(0, 1000), max_size=30), limit_s=st.sampled_from(LATENCY_S))
def test_what_missed_a_limit_that_is_a_bound_is_exact(seconds: list[float], limit_s: float) -> None:
    latencies = Latencies()
    for each in seconds:
        latencies.add(each)
    assert missed(latencies.to_proto(), limit_s) == sum(each > limit_s for each in seconds)


def test_within_a_bucket_misses_go_by_its_part() -> None:
    latencies = Latencies()
    for _ in range(8):
        latencies.add(1.2)  # between 1.0 and 1.5
    assert missed(latencies.to_proto(), 1.25) == 4
    assert missed(latencies.to_proto(), 10_000.0) == 0


def test_workers_are_the_same_to_all_routers_and_lines_are_their_own() -> None:
    decode = worker("d", "decode", running=3, available_blocks=40, queued_prefill_tokens=0)
    lender = worker("p", "prefill", queued_prefill_tokens=500, available_blocks=90)
    leaving = worker("q", "prefill", queued_prefill_tokens=9)
    leaving.draining = True
    silent = pb.WorkerStatus(worker_id="s", role="decode", num_blocks=100)
    said = [
        pb.ModelStatus(
            workers=[decode, lender, leaving, silent], waiting=count, traffic=pb.Traffic(waiting_tokens=100 * count)
        )
        for count in (1, 2)
    ]
    assert observe(5.0, said, {"decode": 2}, Counters(arrived=4)) == Observation(
        5.0,
        PoolObservation(serving=1, busy=1, queued_tokens=500, num_blocks=100, used_blocks=10),
        PoolObservation(serving=1, starting=2, running=3, num_blocks=100, used_blocks=60),
        waiting=3,
        waiting_tokens=300,
        counters=Counters(arrived=4),
    )


@given(seed=st.integers(0, 1000))
def test_each_arrival_counts_once_whatever_routers_answer_or_start_again(seed: int) -> None:
    """Of those that came after a router was first heard; what a router that starts again had not told is lost."""
    rng, tallies = random.Random(seed), Tallies()
    starts, counts, told, expected = [0, 0, 0], [5, 0, 9], [None, None, None], 0
    for _ in range(60):
        router = rng.randrange(3)
        match rng.randrange(4):
            case 0 | 1:
                counts[router] += rng.randrange(5)
            case 2:
                if told[router] is not None:
                    expected += counts[router] - told[router]
                told[router] = counts[router]  # type: ignore[call-overload]
                tallies.record(f"{router}/{starts[router]}", Counters(arrived=counts[router]))
            case _:
                if rng.random() < 0.2:
                    starts[router] += 1
                    counts[router], told[router] = 0, None
    assert tallies.total.arrived == expected
