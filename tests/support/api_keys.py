"""Files of API keys."""

from collections.abc import Mapping
from pathlib import Path

import yaml


def keys_file(folder: Path, *entries: Mapping[str, object]) -> Path:
    """Write the file that a router's `api_keys_file` names."""
    file = folder / "keys.yaml"
    file.write_text(yaml.safe_dump([dict(entry) for entry in entries]))
    return file
