"""vLLM's interpreter, and arguments of vLLM's EngineArgs, from a worker's settings.

Environment variables that vLLM reads when it is imported, its logs, and its platform.
"""

import importlib.util
import logging
import os
import shlex
import sys
import warnings
from argparse import SUPPRESS
from pathlib import Path
from typing import Any, NoReturn

from engine.backends.vllm.settings import VllmSettings
from engine.errors import EngineStartError
from engine.model.adapters import read_adapters

LORA_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""Values of max_lora_rank that vLLM takes on every device."""
SEVERAL_RANKS = {
    "distributed_executor_backend": "mp",
    "worker_extension_cls": "engine.process.vllm.worker.TandemWorker",
}
"""Arguments of an engine with several ranks."""
MAX_ACTIVE_ADAPTERS = 8
"""Adapters of one step, unless vLLM's max_loras says otherwise."""


def vllm_python(config: VllmSettings) -> Path:
    """Return the interpreter of vLLM's environment.

    Raises EngineStartError when there is none.
    """
    if config.vllm_python is None and importlib.util.find_spec("vllm") is not None:
        return Path(sys.executable)
    chosen = config.vllm_python or Path(sys.prefix).parent / ".venv-vllm" / "bin" / "python"
    if not chosen.exists():
        reason = f"no {chosen}, and vLLM is not installed beside {sys.executable}; `make vllm` sets up an environment"
        raise EngineStartError("vllm_python", reason)
    return chosen


def engine_arguments(config: VllmSettings) -> dict[str, Any]:
    """Return the arguments, but for those of `vllm_args` and those that depend on the device.

    Raises EngineStartError for adapters that cannot be read.
    """
    ranks = config.num_ranks
    return {
        "model": str(config.model),
        "block_size": config.block_tokens,
        "dtype": config.dtype,
        "kv_cache_memory_bytes": None if config.kv_bytes is None else config.kv_bytes // ranks,
        "tensor_parallel_size": config.tensor_parallel,
        "pipeline_parallel_size": config.pipeline_parallel,
        **(SEVERAL_RANKS if ranks > 1 else {}),
        **_data_parallel_arguments(config),
        **_node_arguments(config),
        "enable_prefix_caching": True,
        "scheduling_policy": "priority",
        "disable_log_stats": True,
        **_lora_arguments(config),
        **config.vllm_options,
    }


def _data_parallel_arguments(config: VllmSettings) -> dict[str, Any]:
    """Return the arguments of a rank of a data-parallel group."""
    if config.data_parallel == 1:
        return {}
    return {
        "data_parallel_size": config.data_parallel,
        "data_parallel_rank": config.data_parallel_rank,
        "data_parallel_address": config.data_parallel_address,
        **({} if config.num_ranks > 1 else {"distributed_executor_backend": "uni"}),
    }


def _node_arguments(config: VllmSettings) -> dict[str, Any]:
    """Return the arguments of a worker over several nodes."""
    if config.nodes == 1:
        return {}
    return {
        "nnodes": config.nodes,
        "node_rank": config.node_rank,
        "master_addr": config.master_addr,
        "master_port": config.master_port,
    }


def passed_arguments(config: VllmSettings) -> dict[str, Any]:
    """Return the arguments of `vllm_args`, parsed by vLLM, in whose environment this runs.

    Raises EngineStartError for a value that vLLM refuses, and for one that differs from `vllm_options`.
    """
    if not config.vllm_args:
        return {}
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    class Parser(FlexibleArgumentParser):
        def error(self, message: str) -> NoReturn:
            raise EngineStartError("vllm_args", " ".join(message.split()))

    parser = AsyncEngineArgs.add_cli_args(Parser())
    for action in parser._actions:
        action.default = SUPPRESS  # arguments that no flag sets keep EngineArgs' own defaults
    arguments: dict[str, Any] = vars(parser.parse_args(shlex.split(config.vllm_args)))
    for name in sorted(set(arguments) & set(config.vllm_options)):
        both = ({name: arguments[name]}, {name: config.vllm_options[name]})
        flag, option = (getattr(AsyncEngineArgs(model=str(config.model), **each), name) for each in both)
        if flag != option:
            raise EngineStartError("vllm_args", f"{name} has another value in vllm_options: set it in one of them")
    return arguments


def _lora_arguments(config: VllmSettings) -> dict[str, Any]:
    """Return the arguments for adapters: all of them in main memory, the most recently used ones on the device."""
    adapters = read_adapters(config.adapters)
    if not adapters:
        return {}
    rank = max(adapter.rank for adapter in adapters)
    if (allowed := next((each for each in LORA_RANKS if each >= rank), None)) is None:
        raise EngineStartError("adapters", f"rank {rank} is above {LORA_RANKS[-1]}, vLLM's largest")
    return {
        "enable_lora": True,
        "max_lora_rank": allowed,
        "max_loras": min(len(adapters), MAX_ACTIVE_ADAPTERS),
        "max_cpu_loras": len(adapters),
    }


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
