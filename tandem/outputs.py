"""Files that a command is to write, looked at before its work and not after it."""

import os
from pathlib import Path

from simulator.errors import BadSetup


def check_outputs(**paths: Path | None) -> None:
    """By option. Raises BadSetup for one that cannot be written."""
    for option, path in paths.items():
        if path is not None and (reason := _in_the_way(path)):
            raise BadSetup(option, f"{path}: {reason}")


def _in_the_way(path: Path) -> str:
    try:
        if path.is_dir():
            return "is a directory"
        if path.exists():
            return "" if os.access(path, os.W_OK) else "may not be written"
        folder = path.parent
        if not folder.is_dir():
            return f"there is no directory {folder}"
        return "" if os.access(folder, os.W_OK | os.X_OK) else f"nothing may be written in {folder}"
    except (OSError, ValueError) as error:
        return getattr(error, "strerror", None) or str(error)
