"""Preparation of an engine process, or of one of its ranks, before it loads a model."""

import logging
import os
import signal
import sys

from cluster.process.tree import die_with_parent
from engine.config import WorkerConfig
from engine.host.cores import stay_on, step_back
from kvtransfer.hardware.topology import use_nearest_nics
from kvtransfer.registry import open_transport
from kvtransfer.transport import Transport

log = logging.getLogger(__name__)
SWITCH_S = 0.0005
"""Longest time for which the runner's Python code may hold the GIL while a message waits, in seconds."""


def become_child() -> None:
    """Die with the parent process, and leave Ctrl-C to it.

    Call it on the main thread.
    """
    die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sys.setswitchinterval(SWITCH_S)


def prepare(config: WorkerConfig) -> None:
    """Set what must be set before numerical libraries are loaded.

    Raises EngineStartError.
    """
    step_back(config.niceness)
    if config.cores:
        stay_on(config.cores)
    os.environ["OMP_NUM_THREADS"] = str(config.num_threads)
    os.environ["TRANSFORMERS_VERBOSITY"] = "error"
    os.environ["HF_HUB_OFFLINE"] = "1"


def own_transport(config: WorkerConfig, agent_name: str) -> Transport:
    """Open the transport of this rank.

    Raises TransportUnavailable.
    """
    on_gpu = config.kind.may_use_gpu
    if on_gpu and (chosen := use_nearest_nics(os.environ)) is not None:
        log.info(chosen)
    host = config.advertise_host or config.host
    return open_transport(config.transport, agent_name, host, config.strict_lanes, on_gpu)
