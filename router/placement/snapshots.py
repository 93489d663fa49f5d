"""Inputs of a decision as they were, for later questions.

Conversion of a decision and its placement snapshot to JSON and back, without loss.
"""

import dataclasses
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np

from router.placement.demand import Alternative, Candidate, Demand
from router.placement.place import Decision, explain, place
from router.placement.rates import Ints, Rates
from router.placement.worker_table import Hits, WorkerTable

FIXED_BYTES = 4096
"""Approximate bytes of the objects around the arrays."""


@dataclass(frozen=True, slots=True, eq=False)
class PlacementSnapshot:
    """Inputs of one decision, never changed."""

    demand: Demand
    workers: WorkerTable
    hits: Hits
    rates: Rates
    available: Ints | None
    """Blocks that the request could use of each worker, if not all."""

    @classmethod
    def of(
        cls, demand: Demand, workers: WorkerTable, hits: Hits, rates: Rates, available: Ints | None
    ) -> "PlacementSnapshot":
        """Copy the inputs; only `workers` may change afterwards."""
        frozen = replace(
            workers,
            draining=workers.draining.copy(),
            running=workers.running.copy(),
            decoding=workers.decoding.copy(),
            queued_prefill_tokens=workers.queued_prefill_tokens.copy(),
            available_blocks=workers.available_blocks.copy(),
            num_blocks=workers.num_blocks.copy(),
            outgoing_bytes=workers.outgoing_bytes.copy(),
            outgoing_flows=workers.outgoing_flows.copy(),
            incoming_bytes=workers.incoming_bytes.copy(),
            incoming_flows=workers.incoming_flows.copy(),
        )
        kept = replace(demand, other_keys=()) if demand.other_keys else demand  # their result is in `hits`
        return cls(kept, frozen, hits, rates, available)

    def candidates(self) -> list[Candidate]:
        """Return the compared candidates, the chosen one first."""
        return explain(self.demand, self.workers, self.hits, self.rates, self.available)

    def num_bytes(self, before: "PlacementSnapshot | None") -> int:
        """Return the approximate memory, without what it shares with the previous snapshot."""
        columns = 20 * 8 * len(self.workers.ids)
        shared = before is not None and before.rates.kv_bytes_per_s is self.rates.kv_bytes_per_s
        return FIXED_BYTES + columns + (0 if shared else 2 * self.rates.kv_bytes_per_s.nbytes)


T = TypeVar("T")


def recorded(decision: Decision, placement_snapshot: PlacementSnapshot) -> dict[str, Any]:
    """Convert to JSON values.

    The arguments never change, so this may run later and on another thread.
    """
    values = {"decision": dataclasses.asdict(decision), "available": _plain(placement_snapshot.available)}
    parts = (placement_snapshot.demand, placement_snapshot.workers, placement_snapshot.hits, placement_snapshot.rates)
    return values | {type(part).__name__: _fields(part) for part in parts}


def read_recorded(values: dict[str, Any]) -> tuple[Decision, PlacementSnapshot]:
    """Undo `recorded`; other keys are ignored."""
    decision = dict(values["decision"])
    decision["alternatives"] = tuple(Alternative(**rival) for rival in decision["alternatives"])
    parts = (_made(Demand, values), _made(WorkerTable, values), _made(Hits, values), _made(Rates, values))
    return Decision(**decision), PlacementSnapshot(*parts, _value(values["available"]))


def decided_again(placement_snapshot: PlacementSnapshot) -> Decision | None:
    return place(
        placement_snapshot.demand,
        placement_snapshot.workers,
        placement_snapshot.hits,
        placement_snapshot.rates,
        placement_snapshot.available,
    )


def _fields(part: Any) -> dict[str, Any]:
    return {field.name: _plain(getattr(part, field.name)) for field in dataclasses.fields(part)}


def _plain(value: Any) -> Any:
    """Convert to plain values.

    Numbers survive to the bit: JSON has the shortest text that does.
    """
    if isinstance(value, np.ndarray):
        return {"dtype": value.dtype.str, "values": value.tolist()}
    return [_plain(each) for each in value] if isinstance(value, tuple) else value


def _made(kind: type[T], values: dict[str, Any]) -> T:
    return kind(**{name: _value(value) for name, value in values[kind.__name__].items()})


def _value(value: Any) -> Any:
    if isinstance(value, dict) and "dtype" in value:
        return np.array(value["values"], value["dtype"])
    return tuple(map(_value, value)) if isinstance(value, list) else value
