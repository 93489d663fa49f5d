"""The demo model that comes with the package: a few million parameters; examples/storyteller describes it."""

from pathlib import Path

NAME = "storyteller"
"""Name of the demo model where a command takes a model."""
STORYTELLER = Path(__file__).parent / "model"
"""Directory of the demo model."""
