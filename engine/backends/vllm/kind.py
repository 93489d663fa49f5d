"""The vllm engine, as the rest of Tandem sees it."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from engine.backends.vllm.arguments import vllm_python
from engine.backends.vllm.settings import NAME, VllmSettings
from engine.engine_kind import EngineKind, EngineMemory, Environment, Installation, Launch, MemoryOptions, Option
from engine.errors import EngineStartError
from engine.vllm_flags import count_of, flags_of, with_flags

if TYPE_CHECKING:
    from engine.backends.vllm.media.encoder import VllmEncoder
    from engine.backends.vllm.media.processor import VllmMediaProcessor

MODEL = "a model"
"""Method of drafting where only a model is named."""
FLOAT8 = MappingProxyType({"fp8": 8.0, "fp8_e4m3": 8.0, "fp8_e5m2": 8.0})
"""Values of vLLM's quantization and kv_cache_dtype that mean one byte, in bits."""


class VllmMemory(EngineMemory[VllmSettings]):
    """Memory of the vllm engine."""

    keeps_whole_contexts = False
    copies_kv_heads = True
    needs_full_context = "vLLM needs room for"
    format_bits = FLOAT8

    def options(self, config: VllmSettings) -> MemoryOptions:
        context = _option(config, "max_model_len")
        if context is not None and "max_model_len" not in config.vllm_options:
            context = Option(count_of(context.value) or context.value, context.setting)
        kv_dtype = _option(config, "kv_cache_dtype")
        return MemoryOptions(
            weights=_option(config, "quantization"),
            kv_dtype=None if kv_dtype is None or kv_dtype.value in ("", "auto") else kv_dtype,
            context_tokens=context,
            drafts=Option(drafts, "vllm_options.speculative_config") if (drafts := _drafts(config)) else None,
        )

    def narrowed(self, config: VllmSettings) -> dict[str, Any]:
        if config.vllm_option("quantization") is not None:
            return {}
        return {"vllm_options": {**config.vllm_options, "quantization": "fp8"}}


class VllmKind(EngineKind[VllmSettings]):
    """vLLM's EngineCore in an environment of its own."""

    name = NAME
    settings = VllmSettings
    memory = VllmMemory()
    installation = Installation(
        environment=Environment(
            name="vLLM's environment",
            distributions=MappingProxyType(
                {"vllm": ("vllm",), "nixl": ("nixl-cu12", "nixl-cu13"), "tandem-serving": ("tandem-serving",)}
            ),
            check="engine.backends.vllm.contract",
            advice="make vllm, or set vllm_python; see docs/vllm.md",
            extensions=MappingProxyType({"connector": "tandem_connector.contract"}),
        )
    )
    block_tokens = 32  # vLLM's CPU attention takes multiples of 32
    steps_in_group = True
    refused_settings = MappingProxyType(
        {
            "backend": "set vllm_options.attention_backend",
        }
    )
    lacking = MappingProxyType({})

    def settled(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return settings by flags of vLLM and by the program's number.

        Raises EngineStartError for arguments of vLLM that Tandem refuses.
        """
        return _numbered(super().settled(with_flags(values)))

    def launch(self, config: VllmSettings) -> Launch:
        """Return how to start its process.

        Raises EngineStartError where there is no interpreter for it.
        """
        return self.launch_module(config, f"engine.process.vllm.{'node' if config.node_rank else 'process'}")

    def launch_module(self, config: VllmSettings, module: str) -> Launch:
        """Return how to start a program in vLLM's environment.

        It gets the libraries that vLLM's manual recommends on CPUs, without which its threads and its memory allocation
        are slower. Raises EngineStartError where there is no interpreter for it.
        """
        python = vllm_python(config)
        return Launch((str(python), "-m", "cluster.launch", module), libraries_of(python, os.environ), keeps_log=True)

    def open_encoder(self, config: VllmSettings) -> "VllmEncoder":
        from engine.backends.vllm.media.encoder import open_vllm_encoder

        return open_vllm_encoder(config)

    def open_media_processor(self, config: VllmSettings) -> "VllmMediaProcessor":
        from engine.backends.vllm.media.processor import open_vllm_media_processor

        return open_vllm_media_processor(config)


KIND = VllmKind()


def libraries_of(python: Path, environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variable that has an interpreter load the libraries of its environment, if it has them."""
    lib = python.parent.parent / "lib"
    libraries = [*lib.glob("libiomp5.so"), *lib.glob("python3*/site-packages/vllm/libs/libtcmalloc*.so*")]
    others = [path for path in [environment.get("LD_PRELOAD", "")] if path]
    return {"LD_PRELOAD": ":".join([*map(str, libraries), *others])} if libraries else {}


def _numbered(values: dict[str, Any]) -> dict[str, Any]:
    """Return settings with `node_rank` and `data_parallel_rank` by `member_index`.

    Raises EngineStartError where both are set.
    """
    member, nodes, local = values.get("member_index"), values.get("nodes", 1), values.get("data_parallel_local", 1)
    if not isinstance(member, int) or not isinstance(nodes, int) or not isinstance(local, int) or nodes < 1:
        return values  # not set, or refused by the fields' own rules
    numbers = {"node_rank": member % nodes, "data_parallel_rank": member // nodes * local}
    if taken := [name for name, number in numbers.items() if values.get(name, number) != number]:
        raise EngineStartError("member_index", f"{member} means another {taken[0]} than {values[taken[0]]}: set one")
    return values | numbers


def _option(config: VllmSettings, name: str) -> Option | None:
    """Return an argument of vLLM's that is set, and where the worker's settings have it."""
    if (value := config.vllm_option(name)) is None:
        return None
    is_option = name in config.vllm_options
    return Option(value, f"vllm_options.{name}" if is_option else f"vllm_args --{name.replace('_', '-')}")


def _drafts(config: VllmSettings) -> str:
    """Return the method with which vLLM drafts tokens; empty for none, `MODEL` where only a model is named."""
    for flag in flags_of(config.vllm_args):
        if flag.name == "speculative_config" and flag.key.endswith(".method"):
            return flag.values[0]
    written = config.vllm_option("speculative_config")
    if isinstance(written, str):
        try:
            written = json.loads(written)
        except ValueError:  # vLLM's parser refuses it when the worker starts
            written = None
    if isinstance(written, Mapping):
        return str(written.get("method") or MODEL)
    return str(config.vllm_option("spec_method") or (MODEL if config.vllm_option("spec_model") else ""))
