"""What placement sees of the workers: columns of figures, a row for each worker in order of ids."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from router.placement.rates import Bools, Floats, Ints


@dataclass(frozen=True, slots=True)
class WorkerView:
    """A worker as placement sees it: its last report plus what was placed on it since."""

    worker_id: str
    decodes: bool
    fingerprint: bytes
    running: int
    decoding: int
    """Of the running ones: those past their prompt."""
    queued_prefill_tokens: int
    available_blocks: int
    num_blocks: int
    reserve_output_tokens: int = 0
    """As in its Hello."""
    draining: bool = False
    """It takes no request, and computes for none; what it holds can be read."""
    traffic_share: float = 0.0
    """As in its Hello."""


@dataclass(frozen=True, slots=True, eq=False)
class WorkerTable:
    """W workers, ascending by id. Whoever made it may change the figures in place: decide before the next event."""

    ids: tuple[str, ...]
    row_of: Mapping[str, int]
    decodes: Bools
    """[W], as are the others unless they say otherwise."""
    draining: Bools
    compatible: Bools
    """[W, W]: two workers of one fingerprint."""
    running: Ints
    decoding: Ints
    queued_prefill_tokens: Ints
    available_blocks: Ints
    num_blocks: Ints
    reserves: tuple[int, ...]
    """The different values of reserve_output_tokens there are."""
    reserve_of: Ints
    """Which of them."""
    traffic_shares: Floats
    """0: no canary."""
    with_canaries: bool

    @property
    def starts(self) -> Bools:
        """[W]: decode workers that are to stay, on which requests may start."""
        return self.decodes & ~self.draining

    def computing_lenders(self, num_blocks: int, traffic_hash: float) -> Bools:
        """[W]: prefill workers that may compute so many blocks for a request of this lot."""
        could: Bools = ~self.decodes & ~self.draining & (self.num_blocks >= num_blocks)
        return self.in_share(could, could, traffic_hash)

    def in_share(self, able: Bools, could: Bools, traffic_hash: float) -> Bools:
        """[W]: those of the `able` that a request of this lot is for. A canary's goes to the others where no canary is
        able; the others' to canaries only where nobody else `could` ever serve it."""
        if not self.with_canaries:
            return able
        canaries = self.traffic_shares > 0
        if traffic_hash < self.traffic_shares[could].max(initial=0):
            wanted: Bools = able & canaries
            return wanted if wanted.any() else able
        return able & ~canaries if (could & ~canaries).any() else able

    @classmethod
    def of(cls, views: Sequence[WorkerView]) -> "WorkerTable":
        views = sorted(views, key=lambda view: view.worker_id)
        ids = tuple(view.worker_id for view in views)
        reserves = sorted({view.reserve_output_tokens for view in views})
        models = {fingerprint: number for number, fingerprint in enumerate({view.fingerprint for view in views})}
        model_of = np.array([models[view.fingerprint] for view in views], np.int64)
        return cls(
            ids=ids,
            row_of={worker_id: row for row, worker_id in enumerate(ids)},
            decodes=np.array([view.decodes for view in views], np.bool_),
            draining=np.array([view.draining for view in views], np.bool_),
            compatible=(model_of[:, None] == model_of[None, :]) & ~np.eye(len(ids), dtype=np.bool_),
            running=_column(view.running for view in views),
            decoding=_column(view.decoding for view in views),
            queued_prefill_tokens=_column(view.queued_prefill_tokens for view in views),
            available_blocks=_column(view.available_blocks for view in views),
            num_blocks=_column(view.num_blocks for view in views),
            reserves=tuple(reserves),
            reserve_of=_column(reserves.index(view.reserve_output_tokens) for view in views),
            traffic_shares=np.array([view.traffic_share for view in views], np.float64),
            with_canaries=any(view.traffic_share for view in views),
        )


def _column(values: Iterable[int]) -> Ints:
    return np.fromiter(values, np.int64)


@dataclass(frozen=True, slots=True, eq=False)
class Hits:
    """Leading blocks of a prompt that each worker has, [W] in order of ids."""

    held: Floats
    """There now."""
    due: Floats
    """There when a loan that computes would come to be served."""

    @classmethod
    def of(cls, workers: WorkerTable, held: Mapping[str, int], due: Mapping[str, int] | None = None) -> "Hits":
        """By worker; who has none may be left out, and who is not among `workers` does not count. `due` as `held`
        when left out: nothing is being computed."""
        there = _by_row(workers, held)
        return cls(there, there if due is None else _by_row(workers, due))


def _by_row(workers: WorkerTable, blocks: Mapping[str, int]) -> Floats:
    column = np.zeros(len(workers.ids))
    for worker_id, num_blocks in blocks.items():
        if (row := workers.row_of.get(worker_id)) is not None:
            column[row] = num_blocks
    return column
