"""Conversion of a decision and its placement snapshot to JSON and back, without loss.

Pure.
"""

import dataclasses
from typing import Any, TypeVar

import numpy as np

from router.placement.candidates import Alternative
from router.placement.demand import Demand
from router.placement.place import Decision, place
from router.placement.rates import Rates
from router.placement.snapshots.placement_snapshot import PlacementSnapshot
from router.placement.worker_table import Hits, WorkerTable

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
