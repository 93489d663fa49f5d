"""Tandem's loans in stock vLLM servers: `kv_connector_module_path` of `--kv-transfer-config`."""

from typing import Any


def __getattr__(name: str) -> Any:
    """Return the connector when vLLM asks for it; the rest of the package is also used without vLLM."""
    if name == "TandemConnector":
        from tandem_connector.connector import TandemConnector

        return TandemConnector
    raise AttributeError(name)
