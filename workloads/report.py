"""JSON values and pictures of the reports of all commands."""

import math
from typing import Any

from pydantic import BaseModel

from cluster.install import needing
from workloads.request import BadSetup


def open_figures() -> Any:
    """Return matplotlib's Figure; call it before the work.

    Raises BadSetup without matplotlib.
    """
    with needing("png", BadSetup):
        from matplotlib.figure import Figure
    return Figure


def finite(value: Any) -> Any:
    """Replace values that JSON cannot express by null."""
    if isinstance(value, BaseModel):
        value = value.model_dump()
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
