"""The worker table: what placement sees of the workers, one row each in order of ids."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from router.placement.demand import Demand
from router.placement.in_flight import IDLE, Flows
from router.placement.rates import Bools, Floats, Ints


@dataclass(frozen=True, slots=True)
class WorkerView:
    """A worker as placement sees it: its last report plus later placements."""

    worker_id: str
    decodes: bool
    fingerprint: bytes
    """Fingerprint of weights and KV layout; only workers with equal ones exchange KV."""
    running: int
    decoding: int
    """Running streams that are past their prompt."""
    queued_prefill_tokens: int
    available_blocks: int
    num_blocks: int
    reserve_output_tokens: int = 0
    """Output tokens for which it reserves blocks, from its Hello."""
    draining: bool = False
    """Whether it accepts no request and computes for none; its blocks can be read."""
    traffic_share: float = 0.0
    """Canary share, from its Hello."""
    adapters: frozenset[str] = frozenset()
    """Fingerprints of its LoRA adapters, in hexadecimal digits."""
    reads_media: bool = False
    """Whether it computes prompts with items."""
    files: str = ""
    """Fingerprint of its config and tokenizer, in hexadecimal digits; empty where it starts nothing."""
    revision: str = ""
    """Revision of its model, in hexadecimal digits; empty for a worker of an earlier version, which does not tell."""
    loan_version: int | None = 0
    """Version of loans that its engine speaks; only equal ones lend each other. None: a store, which all read."""
    outgoing: Flows = IDLE
    """Transfers in flight from it."""
    incoming: Flows = IDLE
    """Transfers in flight to it."""


@dataclass(frozen=True, slots=True, eq=False)
class WorkerTable:
    """Columns of W workers, ascending by id.

    The owner may change them in place: decide before the next event.
    """

    ids: tuple[str, ...]
    row_of: Mapping[str, int]
    decodes: Bools
    """Whether each is a decode worker, [W], the shape of the others unless noted."""
    draining: Bools
    compatible: Bools
    """Whether two workers have one fingerprint and one version of loans, [W, W]."""
    running: Ints
    decoding: Ints
    queued_prefill_tokens: Ints
    available_blocks: Ints
    num_blocks: Ints
    reserves: tuple[int, ...]
    """Distinct values of reserve_output_tokens."""
    reserve_of: Ints
    """Index of each worker's value."""
    traffic_shares: Floats
    """Canary shares; 0: no canary."""
    with_canaries: bool
    outgoing_bytes: Floats
    """Bytes in flight from each worker."""
    outgoing_flows: Floats
    """Transfers in flight from each worker; like all four, floating point for the sake of pairs.py."""
    incoming_bytes: Floats
    """Bytes in flight to each worker."""
    incoming_flows: Floats
    """Transfers in flight to each worker."""
    adapters: tuple[tuple[str, ...], ...] = ()
    """LoRA adapters of each worker, by fingerprint."""
    reads_media: tuple[bool, ...] = ()
    files: tuple[str, ...] = ()
    revisions: tuple[str, ...] = ()
    common: tuple[str, str] = ("", "")
    """Files and revision that all workers have; empty where they differ."""

    def set_in_flight(self, row: int, outgoing: Flows, incoming: Flows) -> None:
        """Set the transfers in flight of a row."""
        self.outgoing_bytes[row], self.outgoing_flows[row] = outgoing.num_bytes, outgoing.count
        self.incoming_bytes[row], self.incoming_flows[row] = incoming.num_bytes, incoming.count

    @property
    def starts(self) -> Bools:
        """Decode workers that are not draining, on which requests may start, [W]."""
        return self.decodes & ~self.draining

    def starts_for(self, demand: Demand) -> Bools:
        """Return the workers that are not draining and of the role that serves the request, [W]."""
        starts = self.starts
        if demand.only:
            chosen = np.zeros_like(starts)
            rows = [row for name in demand.only if (row := self.row_of.get(name)) is not None]
            chosen[rows] = starts[rows]
            return chosen
        if not demand.embeds:
            return starts
        prefill: Bools = ~self.decodes & ~self.draining
        return prefill if prefill.any() else starts

    def computing_lenders(self, demand: Demand) -> Bools:
        """Return the prefill workers that may compute the request's blocks, [W]."""
        could: Bools = ~self.decodes & ~self.draining & (self.num_blocks >= demand.num_usable_blocks)
        could = self.able_for(demand, could)
        return self.in_share(could, could, demand.traffic_hash)

    def able_for(self, demand: Demand, could: Bools) -> Bools:
        """Return those workers that have the request's revision and adapter and read its items, if it has such, [W].

        A worker without a revision may have any.
        """
        files, revision = self.common
        if demand.files not in ("", files):
            could = could & np.array([demand.files == each for each in self.files], np.bool_)
        if demand.revision not in ("", revision):
            could = could & np.array([each in ("", demand.revision) for each in self.revisions], np.bool_)
        if demand.has_items:
            could = could & np.array(self.reads_media, np.bool_)
        if demand.adapter:
            could = could & np.array([demand.adapter in each for each in self.adapters], np.bool_)
        return could

    def suit(self, demand: Demand) -> bool:
        """Return whether every worker is able to serve the request, as `able_for` has it."""
        files, revision = self.common
        has_all = demand.files in ("", files) and demand.revision in ("", revision)
        return has_all and not (demand.adapter or demand.has_items)

    def in_share(self, able: Bools, could: Bools, traffic_hash: float) -> Bools:
        """Return those of the `able` workers that the traffic hash selects, [W].

        A canary's request goes to others where no canary is able; another's goes to canaries only where no other worker
        `could` ever serve it.
        """
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
        version_of = np.array([-1 if view.loan_version is None else view.loan_version for view in views], np.int64)
        is_store = version_of < 0
        same = (model_of[:, None] == model_of[None, :]) & ~np.eye(len(ids), dtype=np.bool_)
        same &= (version_of[:, None] == version_of[None, :]) | is_store[:, None] | is_store[None, :]
        return cls(
            ids=ids,
            row_of={worker_id: row for row, worker_id in enumerate(ids)},
            decodes=np.array([view.decodes for view in views], np.bool_),
            draining=np.array([view.draining for view in views], np.bool_),
            compatible=same,
            running=_column(view.running for view in views),
            decoding=_column(view.decoding for view in views),
            queued_prefill_tokens=_column(view.queued_prefill_tokens for view in views),
            available_blocks=_column(view.available_blocks for view in views),
            num_blocks=_column(view.num_blocks for view in views),
            reserves=tuple(reserves),
            reserve_of=_column(reserves.index(view.reserve_output_tokens) for view in views),
            traffic_shares=np.array([view.traffic_share for view in views], np.float64),
            with_canaries=any(view.traffic_share for view in views),
            outgoing_bytes=_floats(view.outgoing.num_bytes for view in views),
            outgoing_flows=_floats(view.outgoing.count for view in views),
            incoming_bytes=_floats(view.incoming.num_bytes for view in views),
            incoming_flows=_floats(view.incoming.count for view in views),
            adapters=tuple(tuple(sorted(view.adapters)) for view in views),
            reads_media=tuple(view.reads_media for view in views),
            files=tuple(view.files for view in views),
            revisions=tuple(view.revision for view in views),
            common=(_common(view.files for view in views), _common(view.revision for view in views)),
        )


def _common(values: Iterable[str]) -> str:
    """Return the value that all non-empty ones equal; empty without one."""
    distinct = {value for value in values if value}
    return distinct.pop() if len(distinct) == 1 else ""


def _column(values: Iterable[int]) -> Ints:
    return np.fromiter(values, np.int64)


def _floats(values: Iterable[int]) -> Floats:
    return np.fromiter(values, np.float64)


@dataclass(frozen=True, slots=True, eq=False)
class Hits:
    """Leading blocks of a prompt that each worker has, [W] in order of ids."""

    held: Floats
    """Blocks there now."""
    due: Floats
    """Blocks that will be there when a loan that computes is served."""
    last_decode: int = -1
    """Row of the worker that decoded the session's last request; -1: unknown, or gone."""
    last_lender: int = -1
    """Row of the lender that computed for it; -1: unknown, gone, or none did."""

    @classmethod
    def of(cls, workers: WorkerTable, held: Mapping[str, int], due: Mapping[str, int] | None = None) -> "Hits":
        """Build arrays from counts by worker; missing workers have none, unknown ones are ignored.

        `due` equals `held` when omitted: nothing is being computed.
        """
        held_by_row = _by_row(workers, held)
        return cls(held_by_row, held_by_row if due is None else _by_row(workers, due))


def _by_row(workers: WorkerTable, blocks: Mapping[str, int]) -> Floats:
    column = np.zeros(len(workers.ids))
    for worker_id, num_blocks in blocks.items():
        if (row := workers.row_of.get(worker_id)) is not None:
            column[row] = num_blocks
    return column
