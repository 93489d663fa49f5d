"""A verdict on each pool of a chart's values: it fits, it does not and why, or what is unknown."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from sizing.fit.memory import Fit, PlannedWorker, Unchecked, check
from sizing.fit.nearest import Proposal, nearest
from sizing.fit.values import ValuesPool, pools_of
from sizing.models.known_models import NAMES, known_shape
from sizing.models.model_shape import ModelShape
from workloads.errors import BadSetup

Said = Literal["fits", "does not fit", "unchecked"]


@dataclass(frozen=True, slots=True)
class Verdict:
    """Verdict on one pool before it starts."""

    pool: ValuesPool
    fit: Fit | None = None
    """Outcome of the check; None: not checked."""
    proposal: Proposal | None = None
    """Nearest change that fits, of a worker that does not."""
    unknown: tuple[str, ...] = ()
    """Values that are missing, or settings whose memory is not counted, with the reason."""

    @property
    def said(self) -> Said:
        return "unchecked" if self.fit is None else "fits" if self.fit.fits else "does not fit"

    def reasons(self) -> list[str]:
        """Return lines that explain the verdict; none where all is known and fits."""
        lines = [f"not counted: {each}" for each in self.unknown]
        if self.fit is None:
            return [f"unchecked: {each}" for each in self.unknown]
        if not self.fit.fits:
            lines = [*self.fit.refusals, *lines]
            if self.proposal is not None:
                lines.append(f"fits with {self.proposal.in_words()}")
            elif self.fit.need is not None:
                lines.append("no known change of the KV pool, ranks, weights or GPU makes it fit")
        return lines


Shapes = Mapping[str, ModelShape | BadSetup]
"""Shapes of models by their names in the values, or why a shape is not known."""


def verdicts(values: Mapping[str, Any], shapes: Shapes, gpu: str = "") -> list[Verdict]:
    """Return a verdict on each pool, in the order of the chart.

    `shapes`: where the models' names do not tell. `gpu`: where no node selector names one. Raises BadSetup for values
    that are no values.
    """
    pools = pools_of(values)
    if others := sorted(set(shapes) - {model["name"] for model in values["models"]}):
        raise BadSetup("shape", f"the values have no model {others[0]!r}")
    return [_verdict(pool, shapes, gpu) for pool in pools]


def _verdict(pool: ValuesPool, shapes: Shapes, gpu: str) -> Verdict:
    shape = shapes.get(pool.model) or known_shape(pool.repository) or known_shape(pool.model)
    if not pool.needs_shape:
        shape = None
    try:
        if isinstance(shape, BadSetup):
            raise Unchecked("shape", shape.reason)
        device = pool.device(gpu)
        if shape is None and pool.needs_shape:
            raise Unchecked(
                "shape", f"unknown model {pool.model!r}; known are {', '.join(NAMES)}: set --shape {pool.model}=DIR"
            )
        worker = PlannedWorker(pool.role, pool.settings, device, shape, pool.gpus).without_flags()
        fit = check(worker)
    except Unchecked as error:
        return Verdict(pool, unknown=(str(error),))
    return Verdict(pool, fit, None if fit.fits else nearest(worker), fit.unknown)
