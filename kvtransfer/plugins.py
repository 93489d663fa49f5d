"""Parts of other packages, found by their entry points."""

from importlib.metadata import entry_points
from typing import Any


def plugin_names(group: str) -> list[str]:
    """Return the names of a group's entry points, sorted."""
    return sorted({entry.name for entry in entry_points(group=group)})


def load_plugin(group: str, name: str) -> Any:
    """Return the object that a group's entry point names; None where no installed package has such an entry point.

    Raises whatever importing it raises.
    """
    return next((entry.load() for entry in entry_points(group=group, name=name)), None)
