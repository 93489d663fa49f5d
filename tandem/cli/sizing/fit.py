"""Output of `tandem plan --values`: whether each pool of a chart's values fits its device."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.text import Text

from cluster.config import read_file
from cluster.errors import StartError
from engine.model.hub import model_path
from sizing.fit.memory import gb
from sizing.fit.verdict import Shapes, Verdict, merged, verdicts
from sizing.models.known_models import known_shape
from sizing.models.model_shape import ModelShape, open_config, shape_in
from tandem.cli.tables import NamesTable, uncut
from workloads.request import BadSetup, shown

NAMES = ("pool", "verdict")
FIGURES = ("replicas", "device", "weights", "KV", "step", "reserve", "left")
STYLES = {"fits": "green", "does not fit": "bold red", "unchecked": "yellow"}


def read_values(paths: Sequence[Path]) -> dict[str, Any]:
    """Return the values of files, later ones over earlier ones as helm has it.

    Raises BadSetup.
    """
    values: dict[str, Any] = {}
    for path in paths:
        try:
            values = merged(values, read_file(path))
        except UnicodeDecodeError:
            raise BadSetup("values", f"{path} is not UTF-8") from None
        except StartError as error:
            raise BadSetup("values", error.reason) from None
    return values


def parse_shapes(texts: Sequence[str]) -> dict[str, ModelShape | BadSetup]:
    """Return shapes by the name of the model in the values, from NAME=SHAPE, or why one is not known.

    Raises BadSetup where there is no such model.
    """
    shapes: dict[str, ModelShape | BadSetup] = {}
    for text in texts:
        name, equals, shape = text.partition("=")
        if not (name and equals and shape):
            raise BadSetup("shape", f"{shown(text)} is not NAME=SHAPE")
        shapes[name] = known_shape(shape) or _shape_at(Path(model_path(shape)))
    return shapes


def _shape_at(path: Path) -> ModelShape | BadSetup:
    model_dir = open_config(path)
    try:
        return shape_in(model_dir)
    except BadSetup as error:
        return error


def refuse_beside_values(others: Mapping[str, object]) -> None:
    """Check that no option of a load is given.

    Raises BadSetup naming one.
    """
    for name, value in others.items():
        if value is not None:
            raise BadSetup(name, "describes a load and cannot be combined with --values")


def show_fit(console: Console, values: Mapping[str, Any], shapes: Shapes, gpu: str, json_path: Path | None) -> bool:
    """Print a verdict on each pool and its reasons, and write figures; return whether no pool is refused.

    Raises BadSetup.
    """
    results = verdicts(values, shapes, gpu)
    rows = [_row(verdict) for verdict in results]
    with uncut(console):
        console.print(NamesTable(NAMES, FIGURES, rows, box=box.SIMPLE_HEAD))
        for verdict in results:
            for reason in verdict.reasons():
                line = Text(f"{verdict.pool.name}: ", style=STYLES[verdict.said])
                console.print(line.append(reason, style="default"))
    if json_path is not None:
        json_path.write_text(json.dumps([as_json(verdict) for verdict in results], indent=1) + "\n")
        console.print(f"figures: {json_path}")
    return not any(verdict.said == "does not fit" for verdict in results)


def as_json(verdict: Verdict) -> dict[str, Any]:
    """Return a verdict as JSON values, sizes in bytes of each device."""
    pool, fit = verdict.pool, verdict.fit
    need = fit.need if fit is not None else None
    return {
        "pool": pool.name,
        "replicas": pool.replicas,
        "gpus": pool.gpus,
        "device": None if fit is None else fit.worker.device.name,
        "memory": None if fit is None else fit.worker.device.memory_bytes,
        "weights": need and need.weights,
        "kv": need and need.kv,
        "step": need and need.step,
        "reserve": need and need.reserve,
        "left": None if fit is None or need is None else fit.left,
        "verdict": verdict.said,
        "reasons": verdict.reasons(),
    }


def _row(verdict: Verdict) -> list[str]:
    pool, fit = verdict.pool, verdict.fit
    first = [pool.name, verdict.said, str(pool.replicas)]
    if fit is None:
        return [*first, f"{pool.gpus} x ?" if pool.gpus else "memory", *[""] * 5]
    size = gb(fit.worker.device.memory_bytes)
    device = f"{pool.gpus} x {fit.worker.device.name}, {size}" if pool.gpus else f"memory, {size}"
    if fit.need is None:
        return [*first, device, *[""] * 5]
    sizes = (fit.need.weights, fit.need.kv, fit.need.step, fit.need.reserve, fit.left)
    return [*first, device, *map(gb, sizes)]
