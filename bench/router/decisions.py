"""Duration of the router's decisions and index updates, in process and on one core.

Fleet and index are the real ones, fed with serialised events as workers send them: 64 prefill and 64 decode workers.
Prompts are equally often cached on no worker, on four workers, or on all of them up to some point.
"""

import os
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from rich.console import Console
from rich.progress import Progress, TimeElapsedColumn

from bench.support.report import Bar, percentile
from kvcache.block_keys import KEY_BYTES, BlockKey, split_keys
from protos import membership_pb2 as pb
from router.placement.demand import Demand
from router.placement.fleet.fleet import Fleet
from router.placement.fleet.worker_records import WorkerRecord
from router.placement.rates import Priors, session_of

NUM_PREFILL = NUM_DECODE = 64
BLOCK_TOKENS, BLOCK_BYTES = 16, 192 << 10
PROMPT_TOKENS = 8192
CHAIN_BLOCKS = PROMPT_TOKENS // BLOCK_TOKENS
NUM_BLOCKS = 1_000_000
COPIES = 4
"""Workers that hold each chain; beside the chains there is a system prompt that all hold."""
SYSTEM_BLOCKS = 128
EVENT_BLOCKS = 32
"""Blocks of an event: a chunk of 512 tokens."""
IN_FLIGHT = 128
NUM_SESSIONS = 256
"""Sessions of the requests, most of which have been served before."""
ROUNDS = 2000
PRIORS = Priors(4000, 1000, 1e9, 0.003, 0.001, 0.001)


def hello(number: int, store: str) -> pb.Hello:
    decodes = number >= NUM_PREFILL
    return pb.Hello(
        worker_id=f"{'decode' if decodes else 'prefill'}-{number:03}",
        role=pb.ROLE_DECODE if decodes else pb.ROLE_PREFILL,
        model_fingerprint=b"model",
        block_tokens=BLOCK_TOKENS,
        num_blocks=65536,
        block_bytes=BLOCK_BYTES,
        reserve_output_tokens=256,
        store=store,
    )


def report(seeds: random.Random) -> pb.LoadReport:
    return pb.LoadReport(
        running=seeds.randrange(64),
        queued_prefill_tokens=seeds.randrange(0, 16384, 256),
        available_blocks=seeds.randrange(32768),
        num_blocks=65536,
    )


def make_fleet(seeds: random.Random, store: str) -> tuple[Fleet, list[WorkerRecord]]:
    fleet = Fleet("router", PRIORS)
    workers = [fleet.joined(hello(number, store)) for number in range(NUM_PREFILL + NUM_DECODE)]
    for worker in workers:
        fleet.reported(worker, report(seeds))
        fleet.cache_changed(worker, pb.CacheEvents(snapshot=True))
    return fleet, workers


def make_events(
    seeds: random.Random, chains: Sequence[bytes], sequences: list[int]
) -> tuple[list[tuple[int, bytes]], int]:
    """Return (worker, serialised message) for stored chains, and their number of keys.

    Advances each worker's sequence.
    """
    events, num_keys, width = [], 0, EVENT_BLOCKS * KEY_BYTES
    for chain in chains:
        for worker in seeds.sample(range(len(sequences)), COPIES):
            for at in range(0, len(chain), width):
                event = pb.CacheEvent(parent=chain[max(0, at - KEY_BYTES) : at], stored=chain[at : at + width])
                events.append((worker, message(sequences, worker, event)))
            num_keys += len(chain) // KEY_BYTES
    return events, num_keys


def message(sequences: list[int], worker: int, event: pb.CacheEvent) -> bytes:
    changed = pb.CacheEvents(sequence=sequences[worker], events=[event])
    sequences[worker] += 1
    return pb.WorkerMessage(cache=changed).SerializeToString()


def apply(fleet: Fleet, workers: Sequence[WorkerRecord], events: Sequence[tuple[int, bytes]]) -> float:
    """Apply the events and return the seconds taken."""
    started_at = time.perf_counter()
    for worker, serialised in events:
        assert fleet.cache_changed(workers[worker], pb.WorkerMessage.FromString(serialised).cache)
    return time.perf_counter() - started_at


def resident_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def measure_index(
    progress: Progress, store: str = ""
) -> tuple[dict[str, Any], Fleet, list[WorkerRecord], list[bytes], bytes]:
    """Measure the index while it grows; with a `store`, every block is in it, too."""
    seeds = random.Random(1)
    system = seeds.randbytes(SYSTEM_BLOCKS * KEY_BYTES)
    chains = [seeds.randbytes(CHAIN_BLOCKS * KEY_BYTES) for _ in range(NUM_BLOCKS // CHAIN_BLOCKS)]
    fleet, workers = make_fleet(seeds, store)
    num_blocks, num_keys, seconds = SYSTEM_BLOCKS + len(chains) * CHAIN_BLOCKS, 0, 0.0
    sequences = [0] * len(workers)
    task = progress.add_task("index", total=len(chains))
    before = resident_bytes()
    for worker in range(len(workers)):
        apply(fleet, workers, [(worker, message(sequences, worker, pb.CacheEvent(stored=system)))])
    for start in range(0, len(chains), 16):  # made in slices, so that only the index grows
        part = chains[start : start + 16]
        events, keys = make_events(seeds, part, sequences)
        seconds, num_keys = seconds + apply(fleet, workers, events), num_keys + keys
        if store:
            shared = [(0, message(sequences, 0, pb.CacheEvent(stored=chain, shared=True))) for chain in part]
            apply(fleet, workers, shared)
        progress.advance(task, len(part))
    figures: dict[str, Any] = {
        "blocks": num_blocks,
        "stored": {"keys": num_keys, "keys_per_s": num_keys / seconds},
        "bytes_per_block": (resident_bytes() - before) / num_blocks,
    }
    figures |= measure_churn(seeds, fleet, workers, chains)
    return figures, fleet, workers, chains, system


def measure_churn(
    seeds: random.Random, fleet: Fleet, workers: list[WorkerRecord], chains: list[bytes]
) -> dict[str, dict[str, float]]:
    """Measure evictions and stores at full size, and the removal of a worker with the slowest event after it."""
    churn, num_keys = [], 0
    sequences = [worker.next_cache_sequence or 0 for worker in workers]
    width = EVENT_BLOCKS * KEY_BYTES
    for _ in range(10_000):
        worker, out, into = seeds.randrange(len(workers)), seeds.choice(chains), seeds.randbytes(width)
        at = seeds.randrange(0, len(out), width)
        event = pb.CacheEvent(stored=into, removed=out[at : at + width])
        churn.append((worker, message(sequences, worker, event)))
        num_keys += 2 * EVENT_BLOCKS
    seconds = apply(fleet, workers, churn)
    started_at = time.perf_counter()
    gone = workers[0]
    fleet.left(gone)
    left_s = time.perf_counter() - started_at
    workers[0] = fleet.joined(gone.hello)
    fleet.reported(workers[0], report(seeds))
    fleet.cache_changed(workers[0], pb.CacheEvents(snapshot=True))
    return {
        "stored_and_removed": {"keys": num_keys, "keys_per_s": num_keys / seconds},
        "worker_gone_ms": {"ms": 1e3 * left_s},
    }


def measure_placement(
    progress: Progress, fleet: Fleet, workers: list[WorkerRecord], chains: list[bytes], system: bytes
) -> dict[str, Any]:
    """Measure decisions; between two a placement begins, one ends and a worker reports, so every snapshot is new."""
    seeds = random.Random(2)
    demand = Demand(
        PROMPT_TOKENS + 1, CHAIN_BLOCKS, CHAIN_BLOCKS + 17, BLOCK_TOKENS, BLOCK_BYTES, (PROMPT_TOKENS + 1,), 8449
    )
    prompts: dict[str, Callable[[], bytes]] = {
        "known to nobody": lambda: seeds.randbytes(CHAIN_BLOCKS * KEY_BYTES),
        "held by four": lambda: seeds.choice(chains),
        "system prompt held by all": lambda: system + seeds.randbytes((CHAIN_BLOCKS - SYSTEM_BLOCKS) * KEY_BYTES),
        "half of one held by four": lambda: (
            seeds.choice(chains)[: CHAIN_BLOCKS // 2 * KEY_BYTES] + seeds.randbytes(CHAIN_BLOCKS // 2 * KEY_BYTES)
        ),
    }
    seconds: dict[str, list[float]] = {kind: [] for kind in prompts}
    in_flight = []
    kinds = list(prompts)
    task = progress.add_task("placement", total=ROUNDS)
    for number in range(ROUNDS):
        kind = kinds[number % len(kinds)]
        keys: list[BlockKey] = split_keys(prompts[kind]())
        demand = replace(demand, session=session_of("", str(seeds.randrange(NUM_SESSIONS)), ""))
        started_at = time.perf_counter()
        decision = fleet.decide(demand, keys)
        seconds[kind].append(time.perf_counter() - started_at)
        assert decision is not None
        in_flight.append(fleet.placed(decision, demand, keys))
        if len(in_flight) > IN_FLIGHT:
            over = in_flight.pop(seeds.randrange(IN_FLIGHT))
            fleet.started(over)
            fleet.ended(over)
        fleet.reported(workers[number % len(workers)], report(seeds))
        progress.advance(task)
    for placed in in_flight:
        fleet.ended(placed)
    return {kind: quantiles_ms(values) for kind, values in seconds.items()} | {
        "all": quantiles_ms([value for values in seconds.values() for value in values])
    }


def quantiles_ms(seconds: Sequence[float]) -> dict[str, float]:
    return {"p50_ms": 1e3 * percentile(seconds, 0.5), "p99_ms": 1e3 * percentile(seconds, 0.99)}


def measure(console: Console) -> tuple[list[Bar], dict[str, Any]]:
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {max(cores)})
    with Progress(*Progress.get_default_columns(), TimeElapsedColumn(), console=console) as progress:
        index, *fleet = measure_index(progress)
        placement = measure_placement(progress, *fleet)
    os.sched_setaffinity(0, cores)
    events_per_s = min(index[kind]["keys_per_s"] for kind in ("stored", "stored_and_removed"))
    sizes = f"{NUM_PREFILL} P x {NUM_DECODE} D, {index['blocks']:,} blocks, {PROMPT_TOKENS} tokens"
    bars = [
        Bar(f"placement decision, {sizes}: ms p50", placement["all"]["p50_ms"], 0.5),
        Bar("the same, ms p99", placement["all"]["p99_ms"], 2.0),
        Bar("index: thousand events (keys) applied per second", events_per_s / 1e3, 300, at_least=True),
        Bar("index: bytes per block", index["bytes_per_block"], 250),
    ]
    return bars, {"index": index, "placement": placement}
