"""Interface of an engine: all that the rest of Tandem asks of it besides computing, which goes through `ModelRunner`.

An engine's folder in `engine/backends`, or a package of its own, has one `EngineKind`, found by the engine's name.
Nothing outside of that folder compares names. A module with a kind is imported in every process of a worker and by
tools: it imports what is heavy, such as torch, within methods.
"""

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar

from cluster.roles import Role
from engine.errors import EngineStartError
from engine.model.hub import MODEL_FILES, RepositoryFiles
from engine.settings import CommonSettings
from kvtransfer.ranks import MAX_RANKS
from kvtransfer.registry import load_plugin, plugin_names

if TYPE_CHECKING:
    from engine.host.cores import CoreAllocation
    from engine.media import MediaEncoder, MediaProcessor
    from engine.model_runner import ModelRunner

BUILT_IN = ("torch", "vllm", "sim")
"""Engines of this package; `kind.py` in the folder of each has its `KIND`, imported late: backends import this module.
"""
GROUP = "tandem.engines"
"""Group of the entry points that name engines of other packages."""

Settings = TypeVar("Settings", bound=CommonSettings)
Feature = Literal["structured output"]
"""Feature that a request asks of an engine."""
ONE_RANK = MappingProxyType(
    {
        **dict.fromkeys(("nodes", "pipeline_parallel", "tensor_parallel"), "{value} needs engine: vllm, not {engine}"),
        "data_parallel": "needs engine: vllm; start more workers instead, each is a replica",
    }
)
"""Refused settings of an engine with one rank."""


@dataclass(frozen=True, slots=True)
class Launch:
    """Way to start an engine's process."""

    command: tuple[str, ...]
    """Command line; the descriptor of the front's socket is appended."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Further environment variables."""
    keeps_log: bool = False
    """Whether the last line of its log tells why it ended."""


@dataclass(frozen=True, slots=True)
class Environment:
    """Environment of an engine whose process has an interpreter of its own."""

    name: str
    """Name for messages."""
    distributions: Mapping[str, tuple[str, ...]]
    """Distributions by a display name, any of which will do; the engine's own comes first."""
    check: str
    """Module that prints, in that environment, why its version of the engine cannot be used; nothing where it can."""
    advice: str
    """Advice on how to set the environment up."""
    extensions: Mapping[str, str] = field(default_factory=dict)
    """Modules such as `check` for extensions of the engine's own server in that environment, by a display name."""


@dataclass(frozen=True, slots=True)
class Installation:
    """Software that an engine needs on a machine."""

    packages: tuple[str, ...] = ()
    """Packages that it imports in the worker's own environment."""
    kernels: str = ""
    """Module that compiles and times its CPU kernels, and prints the outcome as JSON; empty: it has none."""
    environment: Environment | None = None
    """Environment of its process; None: the worker's own."""


@dataclass(frozen=True, slots=True)
class Option:
    """Value that a user has set."""

    value: Any
    setting: str
    """Place of the value, as messages name it: `weights`, or `vllm_options.quantization`."""


@dataclass(frozen=True, slots=True)
class MemoryOptions:
    """Settings of an engine that decide how much memory it takes; None: as the model is saved."""

    weights: Option | None = None
    """Format to which weights are quantised at load."""
    kv_dtype: Option | None = None
    """Format of KV, of an engine that does not keep it in Tandem's layout."""
    context_tokens: Option | None = None
    """Longest context."""
    drafts: Option | None = None
    """Method that drafts tokens, where the engine does it itself."""


class EngineMemory(Generic[Settings]):
    """Memory of an engine, for `tandem plan --values`.

    These defaults are those of an engine that keeps KV in Tandem's own layout.
    """

    needs_shape: bool = True
    """Whether its memory depends on the shape of a model; else it has no weights."""
    keeps_whole_contexts: bool = True
    """Whether each layer keeps every token of a context, in Tandem's layout; else windows and states keep less."""
    copies_kv_heads: bool = False
    """Whether several ranks may hold copies of one KV head."""
    needs_full_context: str = ""
    """Words for a pool that does not hold one context of the longest length; empty: it need not."""
    format_bits: Mapping[str, float] = MappingProxyType({})
    """Bits of an element by the names of `MemoryOptions.weights` and `kv_dtype`."""

    def options(self, config: Settings) -> MemoryOptions:
        return MemoryOptions()

    def block_bytes(self, config: Settings) -> float:
        """Return the bytes of a KV block of an engine that needs no shape; 0 of others."""
        return 0.0

    def narrowed(self, config: Settings) -> dict[str, Any]:
        """Return settings with which weights become fp8 at load; none where that is set or impossible."""
        return {}


class EngineKind(ABC, Generic[Settings]):
    """One engine, as the rest of Tandem sees it."""

    name: str
    settings: type[Settings]
    """Class of the settings that it reads. An engine of another package may derive one from `WorkerConfig`."""
    installation = Installation()
    memory: EngineMemory[Settings] = EngineMemory()
    block_tokens: int | None = None
    """Default of `block_tokens`; None: that of all engines."""
    model_files: RepositoryFiles = MODEL_FILES
    """Files that it needs of a model."""
    reads_weight_files: bool = False
    """Whether it reads weights through the page cache, so that a start tells where they came from."""
    may_use_gpu: bool = True
    """Whether it computes on GPUs, with its pool in their memory."""
    steps_in_group: bool = False
    """Whether workers of a data-parallel group make their steps together."""
    refused_settings: Mapping[str, str] = ONE_RANK
    """Settings that it does not have, with the reason. `{value}` and `{engine}` stand for the setting's value and the
    engine's name."""
    lacking: Mapping[Feature, str] = MappingProxyType({})
    """Features that it does not have, with the reason."""

    def settled(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return settings, not yet validated, with this engine's defaults.

        Raises EngineStartError.
        """
        return dict(values) if self.block_tokens is None else {"block_tokens": self.block_tokens, **values}

    def refusals(self, config: Settings, role: Role) -> Iterator[EngineStartError]:
        """Yield what it cannot honour, the most important first."""
        for name, reason in self.refused_settings.items():
            if (value := getattr(config, name)) != _default_of(config, name):
                yield EngineStartError(name, reason.format(value=value, engine=self.name))
        yield from _refused_ranks(config)

    def check(self, config: Settings, role: Role) -> None:
        """Raise EngineStartError for settings that the engine cannot honour."""
        for refusal in self.refusals(config, role):
            raise refusal

    def finds_own_cores(self, config: Settings) -> bool:
        """Return whether an engine with these settings takes part in the host's core allocation."""
        return False

    @abstractmethod
    def launch(self, config: Settings) -> Launch:
        """Return how to start its process.

        Raises EngineStartError where there is no interpreter for it.
        """

    def launch_module(self, config: Settings, module: str) -> Launch:
        """Return how to start another program of Tandem in the environment of its process.

        Raises EngineStartError where there is no interpreter for it.
        """
        return Launch((sys.executable, "-m", "cluster.launch", module))

    def open_encoder(self, config: Settings) -> "MediaEncoder":
        """Load the encoder of the settings' model, in a process of its own.

        Raises EngineStartError.
        """
        raise EngineStartError("engine", f"{self.name} has no encoder of its own")

    def open_media_processor(self, config: Settings) -> "MediaProcessor":
        """Open what makes pictures, sounds and videos ready for the model, on the thread that will use it.

        Raises EngineStartError, also where the engine or the model reads none.
        """
        raise EngineStartError("engine", f"{self.name} reads no pictures, sounds or videos")


class RunnerKind(EngineKind[Settings]):
    """Engine that computes batches (`ModelRunner`) under Tandem's scheduler, in `engine/process/engine_process.py`."""

    warms_up: bool = True
    """Whether its first steps are slower than later ones."""

    def launch(self, config: Settings) -> Launch:
        return self.launch_module(config, "engine.process.engine_process")

    def open_core_allocation(self, config: Settings, role: Role) -> "CoreAllocation | None":
        """Open the core allocation; None when the engine was told its cores.

        Raises EngineStartError.
        """
        return None

    @abstractmethod
    def open_runner(
        self, config: Settings, role: Role, core_allocation: "CoreAllocation | None" = None
    ) -> "ModelRunner":
        """Load the model, on the thread that will compute.

        Raises EngineStartError, or StartError.
        """


OpenRunner = Callable[[Any, Role], "ModelRunner"]
"""Function open(config, role) that an entry point may name instead of a kind.

Raises EngineStartError, or StartError, naming the setting at fault."""


class FunctionKind(RunnerKind[CommonSettings]):
    """Engine of another package that has a function only: one rank, and no settings of its own."""

    settings = CommonSettings

    def __init__(self, name: str, function: OpenRunner) -> None:
        self.name = name
        self._function = function

    def open_runner(
        self, config: CommonSettings, role: Role, core_allocation: "CoreAllocation | None" = None
    ) -> "ModelRunner":
        return self._function(config, role)


@cache
def find_kind(name: str) -> EngineKind[Any] | None:
    """Return the engine of a name; None where no installed package has it, as on a machine that only launches workers.

    Raises EngineStartError where it cannot be imported.
    """
    if name in BUILT_IN:
        built_in: EngineKind[Any] = import_module(f"engine.backends.{name}.kind").KIND
        return built_in
    try:
        loaded = load_plugin(GROUP, name)
    except ImportError as error:
        raise EngineStartError("engine", f"{name} cannot be imported: {error}") from error
    return loaded if loaded is None or isinstance(loaded, EngineKind) else FunctionKind(name, loaded)


def kind_of(name: str) -> EngineKind[Any]:
    """Return the engine of a name.

    Raises EngineStartError where no installed package has it.
    """
    if (kind := find_kind(name)) is None:
        installed = ", ".join([*BUILT_IN, *plugin_names(GROUP)])
        raise EngineStartError("engine", f"unknown engine {name!r}; installed are {installed}")
    return kind


def runner_kind_of(name: str) -> RunnerKind[Any]:
    """Return the engine of a name that `engine/process/engine_process.py` was started for."""
    kind = kind_of(name)
    assert isinstance(kind, RunnerKind), f"{name} has a program of its own"
    return kind


def _default_of(config: CommonSettings, name: str) -> Any:
    return type(config).model_fields[name].get_default(call_default_factory=True)


def _refused_ranks(config: CommonSettings) -> Iterator[EngineStartError]:
    """Yield numbers of ranks and nodes that contradict each other."""
    if config.nodes == 1 and config.node_rank:
        yield EngineStartError("node_rank", f"{config.node_rank} needs more nodes than 1")
    if config.nodes > 1:
        if config.num_ranks % config.nodes:
            ranks = f"{config.num_ranks} ranks (tensor_parallel {config.tensor_parallel}, pipeline_parallel"
            reason = f"{ranks} {config.pipeline_parallel}) are not equally many on each of {config.nodes}"
            yield EngineStartError("nodes", reason)
        if config.node_rank >= config.nodes:
            yield EngineStartError("node_rank", f"{config.node_rank} is not below nodes, {config.nodes}")
        if not config.master_addr:
            yield EngineStartError("master_addr", "with several nodes, set the address of node 0")
    if config.num_ranks > MAX_RANKS:
        ranks = f"{config.pipeline_parallel} stages of {config.tensor_parallel} ranks"
        yield EngineStartError("pipeline_parallel", f"{ranks} are more than {MAX_RANKS} ranks")
