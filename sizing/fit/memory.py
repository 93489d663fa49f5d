"""Memory that a worker takes of each device, and whether the device has it.

A device is one GPU, which holds the part of one rank, or a container's main memory, which holds all ranks of the
program. A worker has `tensor_parallel` x `pipeline_parallel` ranks. Each takes

    weights + KV pool / ranks + step + reserve

`weights` is, of a stage with the most layers, 1 / `tensor_parallel` of its layers and of its end: the embeddings of the
first stage, the output layer of the last, both where there is one stage. Of a group of `data_parallel` workers each has
1 / `data_parallel` of the routed experts, and all else. Embeddings and the output layer stay in the model's dtype
where the weights are quantised at load.

The KV pool is `kv_memory_mib`, which is of all ranks together; a stage with more layers than others holds fewer tokens.
`auto` is what the other terms leave. Under vLLM the pool must hold one full context, of which layers with a window keep
the last tokens, and recurrent layers two states (`ModelShape.kv_bytes`). The model's own draft layers (MTP) count where
vLLM drafts by them. The torch engine keeps whole contexts in all layers.

`step` is an estimate of what a step of `max_batch_tokens` tokens takes at its largest, in a layer and at the end:

    tokens x dtype x (4 hidden + (2 heads + 2 kv_heads) x head_dim / tensor_parallel + 3 inner / tensor_parallel)
    + rows x vocab x (dtype + 8)

The first line is a layer's: the residual, its norm, the two sums; queries, keys, values and attention's output; gate,
up and their product. The second line has the logits in the model's dtype, in float32, and their logarithms, for one row
of each sequence or prompt token that is scored: at most `MAX_ROWS`.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from cluster.errors import StartError
from cluster.roles import Role
from engine.config import WorkerConfig
from engine.core_types import GpuDevice
from engine.engine_kind import EngineKind, EngineMemory, Option, kind_of
from engine.host.memory import UNMEASURED_KV_BYTES
from engine.settings import BATCH_TOKENS_ON_CPU, DEFAULT_ENGINE, max_step_tokens
from kvcache.layout import DTYPE_BYTES, KvLayout
from sizing.models.model_shape import ModelShape
from workloads.request import BadSetup, shown

AUTO: Final = "auto"
ON_GPUS: Final = "engine: vllm"
"""Advice where an engine does not compute on GPUs, or lacks what the model needs."""
GPU_RESERVE = 2e9
"""Bytes of a GPU for CUDA's context, kernels' workspaces, graphs, NCCL and fragmentation."""
HOST_RESERVE = 0.78e9
"""Bytes of a rank's processes in main memory: the front's and the engine's with a tiny model (docs/benchmarks.md)."""
MAX_ROWS = 1024
"""Rows of logits in one step: vLLM's largest default of max_num_seqs."""
MIB = 1 << 20
BATCHES_IN_FLIGHT = 2
"""Steps whose tokens a window keeps too: vLLM frees blocks once a step has ended, and two are under way on a GPU."""


class Unchecked(BadSetup):
    """A worker whose memory is not known: `field` is what is missing."""


@dataclass(frozen=True, slots=True)
class Device:
    """Memory that one rank has, or all ranks of a container."""

    name: str
    """Name of the GPU as in `gpus.py`, or of the setting that limits main memory."""
    memory_bytes: float
    is_gpu: bool = True


@dataclass(frozen=True, slots=True)
class PlannedWorker:
    """A worker to check."""

    role: Role
    settings: Mapping[str, Any]
    """Settings as `WorkerConfig` takes them; `kv_memory_mib` may be "auto"."""
    device: Device
    shape: ModelShape | None
    """Shape of its model; None for an engine without weights."""
    gpus: int = 1
    """Number of GPUs of its pod; 0: none."""

    @property
    def kind(self) -> EngineKind[Any]:
        """Engine of the worker.

        Raises StartError where it is not installed here.
        """
        return kind_of(str(self.settings.get("engine", DEFAULT_ENGINE)))

    @property
    def kv_auto(self) -> bool:
        return self._is_auto and self.device.is_gpu and self.kind.memory.needs_shape

    @property
    def _is_auto(self) -> bool:
        return bool(self.settings.get("kv_memory_mib", AUTO) == AUTO)

    def config(self) -> WorkerConfig:
        """Return the validated settings, with a stand-in for `kv_memory_mib: auto`.

        Raises StartError.
        """
        stand_in = 1 if self.kv_auto else UNMEASURED_KV_BYTES // MIB
        return WorkerConfig.parse({**self.settings, **({"kv_memory_mib": stand_in} if self._is_auto else {})})

    def without_flags(self) -> "PlannedWorker":
        """Return the worker with flags that are settings as settings; unchanged if a flag is bad."""
        try:
            return replace(self, settings=self.kind.settled(self.settings))
        except StartError:
            return self  # `check` reports the flag

    def with_settings(self, **changes: Any) -> "PlannedWorker":
        return replace(self, settings={**self.settings, **changes})


@dataclass(frozen=True, slots=True)
class Need:
    """Bytes that a worker takes of each of its devices."""

    weights: float
    kv: float
    step: float
    reserve: float

    @property
    def total(self) -> float:
        return self.weights + self.kv + self.step + self.reserve

    def in_words(self) -> str:
        terms = {"weights": self.weights, "KV": self.kv, "step": self.step, "reserve": self.reserve}
        return " + ".join(f"{name} {gb(size)}" for name, size in terms.items()) + f" = {gb(self.total)}"


@dataclass(frozen=True, slots=True)
class Fit:
    """Outcome of a check."""

    worker: PlannedWorker
    refusals: tuple[str, ...] = ()
    """Reasons why the worker cannot run, each with its arithmetic or its setting; empty: it fits."""
    need: Need | None = None
    """Memory of each device; None where the settings are invalid."""
    kv_mib: int = 0
    """Size of the KV pool of all ranks; with "auto" what is left."""
    unknown: tuple[str, ...] = ()
    """Settings whose memory is not counted."""

    @property
    def fits(self) -> bool:
        return not self.refusals

    @property
    def left(self) -> float:
        """Bytes that stay free on each device; below 0: bytes that are missing."""
        return self.worker.device.memory_bytes - (self.need.total if self.need else 0)


def gb(size: float) -> str:
    return f"{size / 1e9:.1f} GB"


def check(worker: PlannedWorker) -> Fit:
    """Check a worker's settings by their own rules, then its memory.

    Raises Unchecked where the size of its model cannot be told.
    """
    try:
        config = worker.config()
        kind = config.kind
    except StartError as error:
        return Fit(worker, (str(error),))
    if not kind.memory.needs_shape:
        worker = replace(worker, shape=None)
    elif worker.shape is None:
        raise Unchecked("model", "its shape is not known")
    refusals = list(_refused(config, worker))
    need, kv_mib = _need(worker, config)
    context = full_context_bytes(worker.shape, config, worker.device)
    refusals += _too_little(worker, config, need, kv_mib, context)
    return Fit(worker, tuple(refusals), need, kv_mib, tuple(_not_counted(config)))


def weight_bytes(shape: ModelShape | None, config: WorkerConfig) -> float:
    """Return the bytes of all weights.

    Raises Unchecked for a quantisation of unknown size.
    """
    if shape is None:
        return 0.0
    memory = config.kind.memory
    weights = memory.options(config).weights
    if shape.layer_bits:
        return float(shape.weight_bytes)
    if weights is None:
        return float(shape.params * _dtype_bytes(shape, config))
    embeddings = shape.embedding_params * _dtype_bytes(shape, config)
    return embeddings + (shape.params - shape.embedding_params) * _bits(memory, weights) / 8


def _rank_weight_bytes(shape: ModelShape | None, config: WorkerConfig) -> float:
    """Return the bytes of the weights of the rank that has most of them.

    Raises Unchecked for a quantisation of unknown size.
    """
    whole = weight_bytes(shape, config)
    if shape is None or not whole:
        return whole
    stages, ends = config.pipeline_parallel, shape.embedding_params * _dtype_bytes(shape, config)
    layers = whole - ends
    if shape.experts and shape.params > shape.embedding_params:
        experts = shape.expert_bytes if shape.layer_bits else layers * shape.expert_params / _layer_params(shape)
        layers -= experts * (1 - 1 / config.data_parallel)
    if stages > 1:
        layers *= _largest_stage(shape, stages)
        ends = shape.vocab * shape.hidden * _dtype_bytes(shape, config)  # one of the two matrices, or the only one
    return (layers + ends) / config.tensor_parallel


def _layer_params(shape: ModelShape) -> int:
    return shape.params - shape.embedding_params


def _largest_stage(shape: ModelShape, stages: int) -> float:
    """Return the part of the layers that the largest of so many stages has."""
    return math.ceil(shape.layers / stages) / shape.layers


def block_bytes(shape: ModelShape | None, config: WorkerConfig) -> float:
    """Return the bytes of a KV block, of all ranks together."""
    memory = config.kind.memory
    if shape is None:
        return memory.block_bytes(config)
    if memory.keeps_whole_contexts:
        return float(_layout(shape, config).block_bytes)
    own = shape.kv_bytes(config.block_tokens, dtype_bytes=_kv_element_bytes(shape, config))
    return _spread(shape, config) * (own + _mtp_bytes(shape, config, config.block_tokens))


def full_context_bytes(shape: ModelShape | None, config: WorkerConfig, device: Device | None = None) -> float:
    """Return the KV of one context as long as the worker takes it.

    Where the context's length is not known, that is the KV of a CPU's step; without a shape, one block.
    """
    if shape is None:
        return block_bytes(shape, config)
    blocks = _layout(shape, config).blocks_for(_context_tokens(shape, config))
    if config.kind.memory.keeps_whole_contexts:
        return blocks * block_bytes(shape, config)
    in_flight, tokens = BATCHES_IN_FLIGHT * max_step_tokens(config, _gpu(device)), blocks * config.block_tokens
    own = shape.kv_bytes(tokens, in_flight, _kv_element_bytes(shape, config))
    return _spread(shape, config) * (own + _mtp_bytes(shape, config, tokens))


def _spread(shape: ModelShape, config: WorkerConfig) -> float:
    """Return the bytes of all ranks' pools, of an engine that copies KV heads, for each byte of KV.

    Ranks beyond the KV heads hold the same KV. Stages have equal pools, of which those with fewer layers leave a part.
    """
    copies = max(1, config.tensor_parallel // shape.kv_heads)
    return copies * config.pipeline_parallel * _largest_stage(shape, config.pipeline_parallel)


def _mtp_bytes(shape: ModelShape, config: WorkerConfig, tokens: int) -> float:
    """Return the KV of so many tokens in the model's own draft layers, where the engine drafts with them."""
    if not _drafts(config).endswith("mtp"):
        return 0.0
    return tokens * shape.draft_bytes_per_token * _kv_element_bytes(shape, config) / shape.kv_dtype_bytes


def _drafts(config: WorkerConfig) -> str:
    """Return the method with which the engine itself drafts tokens; empty for none."""
    drafts = config.kind.memory.options(config).drafts
    return "" if drafts is None else str(drafts.value)


def step_bytes(shape: ModelShape | None, config: WorkerConfig, device: Device) -> float:
    """Return the memory of a step on each rank, as the module says."""
    if shape is None:
        return 0.0
    dtype, ranks = DTYPE_BYTES[_layout(shape, config).dtype], config.tensor_parallel
    sharded = (2 * shape.heads + 2 * shape.kv_heads) * shape.head_dim + 3 * shape.inner
    tokens = max_step_tokens(config, _gpu(device))
    layer = tokens * dtype * (4 * shape.hidden + sharded / ranks)
    return layer + min(tokens, MAX_ROWS) * shape.vocab * (dtype + 8)


def _need(worker: PlannedWorker, config: WorkerConfig) -> tuple[Need, int]:
    """Return the memory of each device, and the MiB of the KV pool of all ranks."""
    ranks, device = config.num_ranks, worker.device
    here = 1 if device.is_gpu else config.num_local_ranks * config.data_parallel_local
    share = here / ranks
    reserve = GPU_RESERVE if device.is_gpu else HOST_RESERVE
    tiers = 0.0 if device.is_gpu else float(config.host_kv_bytes)
    need = Need(
        weights=_rank_weight_bytes(worker.shape, config) * here,
        kv=tiers,
        step=step_bytes(worker.shape, config, device) * here,
        reserve=reserve * here,
    )
    left = max(device.memory_bytes - need.total, 0.0)
    assert config.kv_memory_mib != AUTO, "a stand-in was set"
    kv_mib = math.floor(left / share / MIB) if worker.kv_auto else config.kv_memory_mib
    return replace(need, kv=tiers + kv_mib * MIB * share), kv_mib


def _refused(config: WorkerConfig, worker: PlannedWorker) -> list[str]:
    """Return what the settings' own rules refuse, and what the device cannot compute."""
    placed = config.model_copy(update={"master_addr": config.master_addr or "the first pod"})  # set at the start
    refusals = [str(refusal) for refusal in config.kind.refusals(placed, worker.role)]
    shape = worker.shape
    if worker.gpus and not config.kind.may_use_gpu and shape is not None:
        refusals.append(f"engine: {config.engine} computes on CPUs only, and its pod has gpus: set {ON_GPUS}")
    refusals += _refused_ranks(shape, config)
    if worker.gpus and worker.gpus != (gpus := gpus_of(config)):
        refusals.append(f"gpus: {worker.gpus} is not {gpus}, the ranks of a pod: each has one GPU")
    if shape is not None and not _divides(shape, config):
        refusals.append(
            f"tensor_parallel: {config.tensor_parallel} does not divide the {shape.kv_heads} KV heads and"
            f" {shape.heads} heads of {shape.name}"
        )
    if shape is not None and (refusal := _refused_memory(shape, config)):
        refusals.append(refusal)
    if shape is not None and shape.layer_bits is not None and config.kind.memory.keeps_whole_contexts:
        quantised = f"does not serve models that are saved quantised, as {shape.name} is"
        refusals.append(f"engine: {config.engine} {quantised}: set {ON_GPUS}")
    return list(dict.fromkeys(refusals))


def gpus_of(config: WorkerConfig) -> int:
    """Return the number of ranks of one program, which are the GPUs of its pod."""
    return max(1, config.num_local_ranks) * config.data_parallel_local


def _refused_ranks(shape: ModelShape | None, config: WorkerConfig) -> Iterator[str]:
    """Yield what is wrong with stages and groups."""
    stages, group = config.pipeline_parallel, config.data_parallel
    if group % config.data_parallel_local:
        yield f"data_parallel_local: {config.data_parallel_local} does not divide data_parallel, {group}"
    if shape is None:
        return
    if stages > shape.layers:
        yield f"pipeline_parallel: {stages} is above the {shape.layers} layers of {shape.name}"
    if group > 1 and not shape.experts:
        yield f"data_parallel: {shape.name} has no experts to share out: set replicas instead"
    elif group > 1 and shape.experts % group:
        yield f"data_parallel: {group} does not divide the {shape.experts} experts of {shape.name}"


def _divides(shape: ModelShape, config: WorkerConfig) -> bool:
    """Return whether the ranks can share out the heads; some engines copy a KV head to several ranks."""
    ranks = config.tensor_parallel
    copied = config.kind.memory.copies_kv_heads and ranks % shape.kv_heads == 0
    return not shape.heads % ranks and (copied or not shape.kv_heads % ranks)


def _refused_memory(shape: ModelShape, config: WorkerConfig) -> str:
    """Return why the engine does not keep the memory that the model's layers need; empty: it does."""
    kind = "recurrent layers" if shape.state_bytes else "MLA" if shape.latent else ""
    if config.kind.memory.keeps_whole_contexts and kind:
        return f"engine: {config.engine} does not serve {kind}, which {shape.name} has: set {ON_GPUS}"
    if config.num_ranks > 1 and shape.undivided:
        taken = f"1 is all that the {config.engine} engine takes"
        return f"tensor_parallel: {taken} with {shape.undivided}, as {shape.name} has"
    return ""


def _too_little(worker: PlannedWorker, config: WorkerConfig, need: Need, kv_mib: int, context: float) -> list[str]:
    device, kv = worker.device, float(kv_mib * MIB)
    if need.total > device.memory_bytes:
        each = f" on each of {config.num_ranks}" if device.is_gpu and config.num_ranks > 1 else ""
        short = f"{gb(need.total - device.memory_bytes)} more than the {gb(device.memory_bytes)} of {device.name}"
        return [f"{need.in_words()}{each}, {short}"]
    whole = f"one full context of {worker.shape.name}" if worker.shape else "a block"
    if worker.kv_auto and kv < context:
        left = f"leaves {gb(kv)} of {gb(device.memory_bytes)} for KV"
        return [f"kv_memory_mib: {need.in_words()} {left}, and {whole} takes {gb(context)}"]
    if (needs := config.kind.memory.needs_full_context) and kv < context:
        return [f"kv_memory_mib: {kv_mib} is below {math.ceil(context / MIB)}: {needs} {whole}"]
    if kv < (block := block_bytes(worker.shape, config)):
        return [f"kv_memory_mib: {kv_mib} is below {math.ceil(block / MIB)}, a KV block"]
    return []


def _not_counted(config: WorkerConfig) -> list[str]:
    parts = []
    drafts = config.kind.memory.options(config).drafts
    if drafts is not None and not drafts.value.endswith("mtp") and not drafts.value.startswith("ngram"):
        parts.append(f"{drafts.setting}: the draft model")
    if config.adapters:
        parts.append("adapters")
    return parts


def _layout(shape: ModelShape, config: WorkerConfig) -> KvLayout:
    dtype = shape.kv_dtype if config.dtype == AUTO else config.dtype
    return KvLayout(shape.layers, shape.kv_heads, shape.head_dim, config.block_tokens, dtype)


def _gpu(device: Device | None) -> GpuDevice | None:
    return GpuDevice(device.name, int(device.memory_bytes)) if device is not None and device.is_gpu else None


def _kv_element_bytes(shape: ModelShape, config: WorkerConfig) -> float:
    """Return the bytes of an element of keys and values, of an engine that does not keep them in Tandem's layout."""
    memory = config.kind.memory
    if (dtype := memory.options(config).kv_dtype) is None:
        return DTYPE_BYTES[_layout(shape, config).dtype]
    return (16.0 if dtype.value in ("bfloat16", "float16") else _bits(memory, dtype)) / 8


def _dtype_bytes(shape: ModelShape, config: WorkerConfig) -> int:
    return shape.dtype_bytes if config.dtype == AUTO else DTYPE_BYTES[config.dtype]


def _context_tokens(shape: ModelShape, config: WorkerConfig) -> int:
    if (chosen := config.kind.memory.options(config).context_tokens) is None:
        return shape.max_context_tokens or config.max_batch_tokens or BATCH_TOKENS_ON_CPU
    if isinstance(chosen.value, bool) or not isinstance(chosen.value, int) or chosen.value < 1:
        raise Unchecked(chosen.setting, f"{shown(chosen.value)} is not a number of tokens")
    return chosen.value


def _bits(memory: EngineMemory[Any], option: Option) -> float:
    """Return the bits of an element in a format that a user has set.

    Raises Unchecked for a format that is not known.
    """
    bits = memory.format_bits.get(option.value) if isinstance(option.value, str) else None
    if bits is None:
        known = ", ".join(memory.format_bits)
        raise Unchecked(option.setting, f"unknown dtype {shown(option.value)}; known are {known}")
    return bits
