"""User programs of Tandem: the CLI, the Python client, the launchers, the load generator and the doctor."""

from importlib.metadata import version

__version__ = version("tandem-serving")
