"""Trials by seed, in one process or in several."""

import multiprocessing
import os
from collections import Counter
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from typing import TypeVar
from unittest.mock import patch

from support.sim_model import LAYOUT
from support.trial_cells import Cell
from support.trial_cluster import Cluster

Counts = tuple[Counter[str], Counter[Cell]]
"""What was seen, and which fault met which state."""
CHUNK = 50


C = TypeVar("C", bound=Cluster)


def sim_cluster(seed: int) -> Cluster:
    return Cluster(seed, num_nodes=2 + seed % 2, reserve=(256, 1, 4, 1)[seed % 4])


def run_trial(seed: int, open_cluster: Callable[[int], C], num_moves: int = 300) -> C:
    """Windows, reads, landings and how often a lender hears of releases change with the seed."""
    window = LAYOUT.block_bytes * (1, 2, 64)[seed % 3]
    release = LAYOUT.block_bytes * (1, 3)[seed // 3 % 2]
    read = LAYOUT.block_bytes * (1, 2)[seed // 6 % 2]
    block_read = LAYOUT.block_bytes * (1, 3, 64)[seed // 12 % 3]
    with (
        patch("kvtransfer.transport.MAX_POSTED_BYTES", window),
        patch("kvtransfer.transport.MAX_POSTED_BYTES_ON_GPU", window),
        patch("loans.loan.RELEASE_BYTES", release),
        patch("kvtransfer.transport.READ_BYTES", read),
        patch("kvtransfer.transport.READ_BYTES_ON_GPU", read),
        patch("loans.borrower_manager.BLOCK_READ_BYTES", block_read),
        patch("loans.store.STORE_SILENCE_S", 25.0),
    ):
        cluster = open_cluster(seed)
        try:
            cluster.run(num_requests=14, num_moves=num_moves)
        except BaseException as error:
            error.add_note(f"seed {seed}")
            raise
    return cluster


def run_trials(seeds: Iterable[int]) -> Counts:
    """One after the other."""
    seen: Counter[str] = Counter()
    cells: Counter[Cell] = Counter()
    for seed in seeds:
        cluster = run_trial(seed, sim_cluster)
        seen += cluster.seen
        cells += cluster.cells.counts
    return seen, cells


def run_many_trials(num_trials: int) -> Counts:
    """Seeds [0, num_trials), on all cores that this process may use."""
    seen: Counter[str] = Counter()
    cells: Counter[Cell] = Counter()
    chunks = [range(first, min(first + CHUNK, num_trials)) for first in range(0, num_trials, CHUNK)]
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(len(os.sched_getaffinity(0)), context) as processes:
        for seen_there, cells_there in processes.map(run_trials, chunks):
            seen += seen_there
            cells += cells_there
    return seen, cells
