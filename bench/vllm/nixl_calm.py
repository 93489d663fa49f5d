"""vLLM's NixlConnector whose NIXL progress thread sleeps until UCX has an event.

NIXL fixes that thread's delay at 0, which polls without a pause and takes half of the model's core; vLLM has no setting
for it. Tandem's own agents have the same delay (`kvtransfer/ucx/nixl_lane.py`). On CPUs the connector moves the thread
that computes to the machine's last core, where the other server's thread is; here it goes back to its own.
"""

import os
from importlib import import_module
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.nixl.connector import NixlConnector

from kvtransfer.ucx.nixl_lane import PROGRESS_DELAY_US

_bindings: Any = import_module("nixl._bindings")
"""NIXL's C++ module, by the name that vLLM imports; it cannot be imported under a second name."""


class SleepyConfig(_bindings.nixlAgentConfig):  # type: ignore[misc]
    """Configuration of an agent with Tandem's delay."""

    def __setattr__(self, key: str, value: object) -> None:
        super().__setattr__(key, PROGRESS_DELAY_US if key == "pthrDelay" else value)


_bindings.nixlAgentConfig = SleepyConfig


class NixlCalm(NixlConnector):
    """Connector of both servers."""

    def __init__(self, *given: Any, **named: Any) -> None:
        cores = os.sched_getaffinity(0)
        super().__init__(*given, **named)
        os.sched_setaffinity(0, cores)
