"""Starts of TandemConnector that are refused: `python -m support.connector_refusals RESULTS`, in vLLM's environment.

RESULTS gets, as JSON, why each of `CASES` is refused; null where it is not.
"""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.engine.arg_utils import EngineArgs

from cluster.errors import StartError
from tandem.storyteller import STORYTELLER
from tandem_connector import TandemConnector


def extra(**keys: Any) -> Callable[[Any], None]:
    """Set keys of the connector's configuration."""
    return lambda config: config.kv_transfer_config.kv_connector_extra_config.update(keys)


def change(part: str, **values: Any) -> Callable[[Any], None]:
    """Set options of a part of vLLM's configuration, as flags would on another machine."""

    def set_them(config: Any) -> None:
        for name, value in values.items():
            object.__setattr__(getattr(config, part), name, value)

    return set_them


def lend_only(config: Any) -> None:
    change("kv_transfer_config", kv_role="kv_producer")(config)
    extra(lenders="a:1")(config)


CASES: dict[str, Callable[[Any], None]] = {
    "nothing": lambda config: None,
    "unknown key": extra(lender="a:1"),
    "open without a guard": extra(loan_host="0.0.0.0"),
    "lends only, with lenders": lend_only,
    "prefix caching off": change("cache_config", enable_prefix_caching=False),
    "sleep mode": change("model_config", enable_sleep_mode=True),
    "ray": change("parallel_config", distributed_executor_backend="ray"),
    "several nodes": change("parallel_config", nnodes=2),
    "context parallel": change("parallel_config", decode_context_parallel_size=2),
    "within another connector": change("kv_transfer_config", kv_connector="MultiConnector"),
}


def main() -> None:
    refusals: dict[str, str | None] = {}
    for name, change_config in CASES.items():
        transfer = KVTransferConfig(
            kv_connector="TandemConnector", kv_connector_module_path="tandem_connector", kv_role="kv_both"
        )
        config = EngineArgs(
            model=str(STORYTELLER), enforce_eager=True, max_model_len=512, dtype="float32", block_size=32,
            skip_tokenizer_init=True, kv_transfer_config=transfer, kv_cache_memory_bytes=1 << 20,
        ).create_engine_config()  # fmt: skip
        change_config(config)
        try:
            TandemConnector(config, KVConnectorRole.SCHEDULER, None)
            refusals[name] = None
        except StartError as error:
            refusals[name] = str(error)
    Path(sys.argv[1]).write_text(json.dumps(refusals))


if __name__ == "__main__":
    main()
