"""Settings whose constants a test chooses."""

from typing import Any, TypeVar

from pydantic import BaseModel

Settings = TypeVar("Settings", bound=BaseModel)


def tuned(settings: type[Settings], values: dict[str, Any]) -> Settings:
    """Return settings with these values; constants of the class may be among them."""
    constants = {name: value for name, value in values.items() if name in settings.__class_vars__}
    rest = {name: value for name, value in values.items() if name not in constants}
    variant: type[Settings] = type(settings.__name__, (settings,), constants)
    return variant(**rest)
