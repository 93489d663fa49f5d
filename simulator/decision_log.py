"""Every decision with all it was made of, as a JSON line; made again from that, it is the same."""

import dataclasses
import json
from collections.abc import Sequence
from typing import Any, TextIO, TypeVar

import numpy as np

from engine.keys import BlockKey
from router.placement.core import Decision, place
from router.placement.demand import Demand
from router.placement.fleet import Fleet
from router.placement.rates import Ints, Priors, Rates
from router.placement.snapshot import Hits, Workers

T = TypeVar("T")


class LoggedFleet(Fleet):
    """Ours, with a log of what it decided."""

    def __init__(self, router_id: str, priors: Priors, learn_rates: bool, log: TextIO) -> None:
        super().__init__(router_id, priors, learn_rates)
        self._log = log

    def decide(self, demand: Demand, keys: Sequence[BlockKey], available: Ints | None = None) -> Decision | None:
        decision = super().decide(demand, keys, available)
        if decision is not None:
            situation = (demand, self.snapshot, self.hits(keys), self.rates)
            line = {"decision": dataclasses.asdict(decision), "available": _plain(available)}
            line |= {type(part).__name__: _fields(part) for part in situation}
            self._log.write(json.dumps(line, separators=(",", ":")) + "\n")
        return decision


def decide_again(line: str) -> tuple[Decision, Decision | None]:
    """What was decided, and what is from the same snapshot."""
    said = json.loads(line)
    parts = (_made(Demand, said), _made(Workers, said), _made(Hits, said), _made(Rates, said))
    return Decision(**said["decision"]), place(*parts, _value(said["available"]))


def _fields(part: Any) -> dict[str, Any]:
    return {field.name: _plain(getattr(part, field.name)) for field in dataclasses.fields(part)}


def _plain(value: Any) -> Any:
    """Numbers come back the same to the bit: JSON has the shortest text that does."""
    if isinstance(value, np.ndarray):
        return {"dtype": value.dtype.str, "values": value.tolist()}
    return list(value) if isinstance(value, tuple) else value


def _made(kind: type[T], said: dict[str, Any]) -> T:
    return kind(**{name: _value(value) for name, value in said[kind.__name__].items()})


def _value(value: Any) -> Any:
    if isinstance(value, dict) and "dtype" in value:
        return np.array(value["values"], value["dtype"])
    return tuple(value) if isinstance(value, list) else value
