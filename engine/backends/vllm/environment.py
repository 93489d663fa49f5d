"""Environment variables that vLLM reads when it is imported, its logs, and its platform."""

import importlib.util
import logging
import os
import sys
import warnings

from engine.errors import EngineStartError


def set_environment() -> None:
    """Set what every process with vLLM needs; vLLM must not have been imported yet."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ["VLLM_NO_USAGE_STATS"] = "1"
    os.environ["VLLM_CONFIGURE_LOGGING"] = "0"  # its log lines are Tandem's
    os.environ["TQDM_DISABLE"] = "1"
    if importlib.util.find_spec("flashinfer") is None:  # vLLM's sampler takes it for installed
        os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")


def quiet_vllm() -> None:
    """Let vLLM log errors only."""
    warnings.simplefilter("ignore")  # Python's warnings about vLLM's own code
    logging.getLogger("vllm").setLevel(logging.ERROR)


def computes_at_launch() -> bool:
    """Return whether vLLM's executor computes a batch in the call that launches it, as on CPUs.

    Raises EngineStartError where vLLM cannot be imported.
    """
    try:
        from vllm.platforms import current_platform
    except ImportError as error:
        raise EngineStartError("vllm_python", f"{sys.executable} cannot import vLLM: {error}") from None
    return bool(current_platform.is_cpu())
