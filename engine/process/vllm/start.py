"""Start of vLLM in an engine process: as its only rank, or with worker processes for several."""

import json
import logging
import os
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

from cluster.roles import Role
from engine.backends.vllm.arguments import (
    computes_at_launch,
    engine_arguments,
    passed_arguments,
    quiet_vllm,
    set_environment,
)
from engine.backends.vllm.contract import check_version
from engine.config import WorkerConfig
from engine.core_types import GpuDevice
from engine.errors import EngineStartError
from engine.host.memory import UNMEASURED_KV_BYTES, belongs_in_file
from engine.media import encoder_fingerprint
from engine.model.adapters import Adapter, read_adapters
from engine.model.model_dir import ModelDir
from engine.model_runner import ModelInfo
from engine.process.data_parallel.step_group import StepGroup
from engine.process.ranks.nodes import facts_of, interface_of, own_address
from engine.process.ranks.worker_ranks import WorkerRanks
from engine.process.spec import LOCAL_RANK
from engine.settings import max_step_tokens
from kvtransfer.ranks import RankGrid

if TYPE_CHECKING:
    from engine.backends.vllm.kv.groups import KvGroups
    from engine.backends.vllm.kv.memory import KvMemory

log = logging.getLogger(__name__)

LEAST_GPU_SHARE = 0.01
SPARE_GPU_SHARE = 0.02
"""Share of a GPU's memory that stays free beside other programs, whose use changes a little."""


@dataclass(slots=True)
class StartedVllm:
    """vLLM's engine after its model is loaded."""

    engine: Any
    """vLLM's EngineCore."""
    memory: Any
    """`KvMemory` of it."""
    block_pool: Any
    gpu: GpuDevice | None
    """GPU that vLLM computes on; None on a CPU."""
    info: ModelInfo
    is_native: bool
    """Whether vLLM runs Model Runner V2, which samples by itself and whose launches return at once on a GPU."""
    sampling: Any
    """`Sampling` of its requests."""
    num_batches: int
    """Largest number of batches in flight."""
    lora: dict[bytes, Any]
    """vLLM's LoRARequest of each adapter, by the adapter's fingerprint."""
    writes_drafts: bool
    """Whether drafting writes KV, after a batch's samples."""


def prepare_vllm(config: WorkerConfig) -> None:
    """Set what vLLM reads from the environment when it is imported, here and in its worker processes.

    Raises EngineStartError.
    """
    set_environment()
    ranks = range(config.num_local_ranks)
    if config.cores:
        of_ranks = [config.of_rank(rank).cores or () for rank in ranks]
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "|".join(",".join(map(str, cores)) for cores in of_ranks)
    if config.num_ranks > 1:
        os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"  # this process has threads, which a fork would lose
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")  # else it wants a NUMA node for each rank
        interface: str | None = "lo"
        if config.nodes > 1:  # else the host's name decides, which may stand for another address
            os.environ.setdefault("VLLM_HOST_IP", own_address(config))
            interface = interface_of(os.environ["VLLM_HOST_IP"])
        if interface is not None:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
    if config.data_parallel > 1:
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
        if config.data_parallel_address == "127.0.0.1":
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    quiet_vllm()


def start_vllm(
    config: WorkerConfig, role: Role, ranks: WorkerRanks | None = None, group: StepGroup | None = None
) -> StartedVllm:
    """Load the model in vLLM, on the calling thread, which on a CPU must be the one that computes.

    With `ranks` vLLM starts their processes; these end with the calling thread. Raises EngineStartError or RankLost.
    """
    configured = configure_vllm(config, role)
    vllm_config, is_native, gpu = configured.vllm_config, configured.is_native, configured.gpu
    model_dir, adapters = configured.model_dir, configured.adapters
    import vllm
    from vllm.lora.request import LoRARequest
    from vllm.v1.engine.core import EngineCore
    from vllm.v1.executor import Executor

    from engine.backends.vllm.connector import offered
    from engine.backends.vllm.identity import kv_weights, num_kv_heads

    sampling_class: Any
    if vllm_config.model_config.runner_type == "pooling":
        from engine.backends.vllm.submitted import PoolingRequests as sampling_class  # noqa: N813
    elif is_native:
        from engine.backends.vllm.sampling.native_sampling import NativeSampling as sampling_class  # noqa: N813
    else:
        from engine.backends.vllm.sampling.keyed_sampling import KeyedSampling as sampling_class  # noqa: N813
    if ranks is not None:
        ranks.gather_nodes(configured.facts)
    if group is not None:
        _meet(group, config, vllm_config)
    engine = EngineCore(vllm_config, Executor.get_class(vllm_config), log_stats=False)
    replicas = max(1, config.tensor_parallel // num_kv_heads(vllm_config.model_config))
    grid = RankGrid(config.num_ranks, config.pipeline_parallel, replicas)
    groups = _groups(engine, config, config.tensor_parallel // replicas)
    requests = [LoRARequest(each.name, i, str(each.path)) for i, each in enumerate(adapters, 1)]
    for request in requests:
        engine.add_lora(request)
    memory: KvMemory
    if ranks is None:
        memory = offered.memory(vllm_config, engine.scheduler.kv_cache_config, groups.unit, groups)
    else:
        memory = _memory_of(engine, vllm_config, ranks, groups, grid)
    files = model_dir.weights_fingerprint()
    drafts = vllm_config.speculative_config
    writes_drafts = drafts is not None and drafts.uses_draft_kv_cache()
    sampling = sampling_class(engine, model_dir.eos_token_ids)
    info = ModelInfo(
        weights_fingerprint=kv_weights(files, vllm_config),
        vocab_size=model_dir.vocab_size,
        max_context_tokens=int(vllm_config.model_config.max_model_len),
        eos_token_ids=model_dir.eos_token_ids,
        revision=_revision(files, vllm_config.model_config),
        adapters=tuple((each.name, each.fingerprint) for each in adapters),
        reads_media=engine.scheduler.max_num_encoder_input_tokens > 0,
        encoder_fingerprint=encoder_fingerprint(files, str(vllm_config.model_config.dtype)),
        pooler=sampling.pooler,
    )
    lora = {each.fingerprint: request for each, request in zip(adapters, requests, strict=True)}
    num_batches = int(engine.batch_queue_size)
    log.info(
        "vLLM %s: model runner %s, %d batches in flight, KV layout %s",
        vllm.__version__,
        "V2" if is_native else "V1",
        num_batches,
        vllm_config.cache_config.kv_cache_layout,
    )
    return StartedVllm(
        engine, memory, offered.block_pool, gpu, info, is_native, sampling, num_batches, lora, writes_drafts
    )


def _meet(group: StepGroup, config: WorkerConfig, vllm_config: Any) -> None:
    """Wait for the other data-parallel ranks, and let vLLM's process group meet where they agreed to.

    Raises EngineStartError.
    """
    import vllm

    from engine.backends.vllm.identity import digest_of

    parallel = vllm_config.parallel_config
    facts = {
        "data_parallel": config.data_parallel,
        "tensor_parallel": config.tensor_parallel,
        "pipeline_parallel": config.pipeline_parallel,
        "vllm_python": f"vLLM {vllm.__version__}",
        "model": digest_of(vllm_config.model_config).hex(),
        "block_tokens": config.block_tokens,
        "max_batch_tokens": vllm_config.scheduler_config.max_num_batched_tokens,
        "vllm_options": json.dumps(config.vllm_options, sort_keys=True, default=str),
        "vllm_args": config.vllm_args,
    }
    parallel.data_parallel_master_port = group.meet(facts, int(parallel.dp_sync_interval))
    parallel._data_parallel_master_port_list = []  # vLLM chose ports that no other rank knows
    parallel.data_parallel_rank_local = _local_rank()


@dataclass(slots=True)
class ConfiguredVllm:
    """vLLM's configuration, with what was read on the way."""

    vllm_config: Any
    model_dir: ModelDir
    adapters: list[Adapter]
    gpu: GpuDevice | None
    is_native: bool
    facts: dict[str, str]
    """Facts that must be the same on all nodes of a worker."""


def configure_vllm(config: WorkerConfig, role: Role) -> ConfiguredVllm:
    """Import vLLM and make its configuration.

    Raises EngineStartError.
    """
    model_dir = ModelDir.open(config.model)
    arguments = engine_arguments(config)  # first: importing vLLM takes seconds
    adapters = read_adapters(config.adapters)
    on_cpu = computes_at_launch()
    import vllm
    from vllm.platforms import current_platform

    check_version(vllm.__version__)
    gpu = None
    if not on_cpu:
        gpu = GpuDevice(current_platform.get_device_name(), current_platform.get_device_total_memory())
    arguments["max_num_batched_tokens"] = max_step_tokens(config, gpu)
    arguments |= passed_arguments(config)
    if config.kv_bytes is None and on_cpu:  # there vLLM would take a share of the whole host
        arguments["kv_cache_memory_bytes"] = UNMEASURED_KV_BYTES // config.num_ranks
    if not on_cpu:
        arguments.setdefault("gpu_memory_utilization", _gpu_share(config))
    arguments["skip_tokenizer_init"] = not model_dir.has_tokenizer
    from engine.backends.vllm.sampling.speculation import set_up_speculation

    vllm_config = _engine_config(config, role, arguments, adapters)
    if config.pipeline_parallel > 1 and not vllm_config.use_v2_model_runner:
        reason = f"{config.pipeline_parallel} needs Model Runner V2, since V1 fails in its first step; vLLM takes V1 "
        reason += "here, as on CPUs and for some kinds of speculation"
        raise EngineStartError("pipeline_parallel", reason)
    set_up_speculation(vllm_config)
    if vllm_config.model_config.is_multimodal_model:
        from engine.backends.vllm.media.embeddings import consumer

        vllm_config.ec_transfer_config = consumer()
    os.environ["VLLM_COMPUTE_NANS_IN_LOGITS"] = "1"
    if not (is_native := bool(vllm_config.use_v2_model_runner)) and vllm_config.model_config.runner_type == "generate":
        from engine.backends.vllm.sampling.keyed_sampling import TandemSampling

        vllm_config.model_config.logits_processors = [TandemSampling]
        vllm_config.scheduler_config.async_scheduling = False
    weights = model_dir.weights_fingerprint().hex() if config.nodes > 1 else ""
    facts = facts_of(config, weights, vllm.__version__)
    return ConfiguredVllm(vllm_config, model_dir, adapters, gpu, is_native, facts)


def _memory_of(engine: Any, vllm_config: Any, ranks: WorkerRanks, groups: "KvGroups", grid: RankGrid) -> "KvMemory":
    """Return the KV memory of an engine's ranks, which are a `grid` and serve their parts from now on.

    Raises EngineStartError or RankLost.
    """
    from engine.backends.vllm.kv.memory import joined_memory
    from engine.backends.vllm.kv.stages import Stage, stages_of

    stages: list[Stage | None] = [None]
    attention: set[str] = set()
    if grid.stages > 1:
        pools = engine.collective_rpc("tandem_pool")[:: grid.ranks // grid.stages]
        in_planes = not vllm_config.cache_config.get_resolved_kv_cache_layout().is_block_outermost
        stages = [*stages_of(pools, in_planes)]
        attention = {name for pool in pools for name in pool.attention}
    engine.collective_rpc("tandem_serve", args=(groups.unit, grid.replicas, stages, sorted(attention)))
    ranks.wait_for()
    ranks.met()
    joined = [link.joined.result() for link in ranks.links]
    return joined_memory(joined, ranks.links, groups, grid, stages, ranks.memory.take)


def _revision(files: bytes, model_config: Any) -> bytes:
    """Return the fingerprint of the model that clients know: its files, and the settings that make another one of them.

    Unlike `digest_of`, equal in all versions of vLLM and transformers, so that an upgrade of these moves streams.
    """
    settings = json.dumps([model_config.quantization, model_config.hf_overrides], sort_keys=True, default=str)
    return blake2b(files + settings.encode(), digest_size=32).digest()


def _local_rank() -> int:
    """Return the worker's number among those of its program; the GPUs of each follow those of the one before."""
    return int(os.environ.get(LOCAL_RANK, 0))


def _gpu_share(config: WorkerConfig) -> float:
    """Return vLLM's `gpu_memory_utilization`: the share of the GPU's memory that it demands to be free.

    vLLM demands it also where the size of the KV pool is a number. Then almost nothing is demanded, so that several
    programs can share a GPU. Otherwise it is vLLM's own default, or less where other programs use the GPU.
    """
    if config.kv_bytes is not None:
        return LEAST_GPU_SHARE
    import torch
    from vllm.config import CacheConfig

    free, total = torch.cuda.mem_get_info(_local_rank() * config.num_ranks)
    default = float(CacheConfig.gpu_memory_utilization)
    return max(LEAST_GPU_SHARE, min(default, free / total - SPARE_GPU_SHARE))


def why_not_started(error: BaseException) -> EngineStartError:
    """Return the error of a start that failed within vLLM; it names what to set."""
    causes = list(_causes(error))
    for each in causes:
        if isinstance(each, EngineStartError):
            return each
    cause = _told(causes[-1])
    if "GPU memory utilization" in cause or "gpu_memory_utilization" in cause or "out of memory" in cause:
        hint = "set kv_memory_mib to a number that fits beside the weights and the GPU's other programs"
        return EngineStartError("kv_memory_mib", f"vLLM did not start: {cause}; {hint}")
    return EngineStartError("engine", f"vLLM did not start: {cause}")


def _causes(error: BaseException) -> Iterator[BaseException]:
    """Yield an error and what caused it, the innermost one last."""
    yield error
    while (cause := error.__cause__ or error.__context__) is not None:
        error = cause
        yield error


def _told(error: BaseException) -> str:
    """Return an error's message in one line."""
    return " ".join(f"{type(error).__name__}: {error}".split())


def _engine_config(config: WorkerConfig, role: Role, arguments: dict[str, Any], adapters: list[Adapter]) -> Any:
    """Return vLLM's VllmConfig.

    Raises EngineStartError for options that vLLM does not have, and for models that cannot be lent or split.
    """
    from vllm.config import KVTransferConfig
    from vllm.engine.arg_utils import EngineArgs
    from vllm.platforms import current_platform

    from engine.backends.vllm.connector import IN_FILE, MemoryConnector
    from engine.backends.vllm.identity import num_kv_heads

    if adapters and current_platform.is_cpu():
        if config.vllm_option("max_loras") is not None:
            raise EngineStartError("adapters", "vLLM's max_loras is set by Tandem on CPUs: leave it out")
        # vLLM's CPU kernels give tokens without an adapter index -1, the last slot: it stays empty, so all zeros.
        arguments["max_loras"] = arguments["max_cpu_loras"] = len(adapters) + 1
    transfer = KVTransferConfig(
        kv_connector=MemoryConnector.__name__,
        kv_connector_module_path=MemoryConnector.__module__,
        kv_role="kv_both",
        kv_connector_extra_config={IN_FILE: belongs_in_file(role)},
    )
    try:
        options = EngineArgs(kv_transfer_config=transfer, **arguments)
    except TypeError as error:
        raise EngineStartError("vllm_options", str(error)) from None
    if (ranks := config.tensor_parallel) > 1:
        kv_heads = num_kv_heads(options.create_model_config())
        if kv_heads % ranks and ranks % kv_heads:
            reason = f"{ranks} neither divides the model's {kv_heads} KV heads nor is a multiple of them"
            raise EngineStartError("tensor_parallel", reason)
    model_config = options.create_model_config()
    if config.data_parallel > 1:
        _check_data_parallel(model_config)
    if model_config.runner_type == "pooling":
        _check_pooling(model_config)
        if not model_config.is_chunked_prefill_supported:  # the longest prompt is one step
            options.max_num_batched_tokens = max(options.max_num_batched_tokens or 0, model_config.max_model_len)
    vllm_config = options.create_engine_config()
    if not vllm_config.cache_config.enable_prefix_caching:
        reason = "vLLM turns its prefix cache off for this model here (so it does for MLA on CPUs), and loans need it"
        raise EngineStartError("model", reason)
    return vllm_config


def _check_pooling(model_config: Any) -> None:
    """Raise EngineStartError unless the model's blocks are those of a decoder."""
    if model_config.attn_type != "decoder":
        reason = (
            f"its attention is {model_config.attn_type}: tokens attend to later ones, so there is no KV of a prefix"
        )
        raise EngineStartError("model", f"{reason}; decoder-only pooling models are served")


def _check_data_parallel(model_config: Any) -> None:
    """Raise EngineStartError unless the model has experts, and vLLM can spread them on this device."""
    from vllm.distributed.device_communicators.base_device_communicator import DeviceCommunicatorBase
    from vllm.platforms import current_platform
    from vllm.utils.import_utils import resolve_obj_by_qualname

    if not model_config.is_moe:
        reason = "the model has no experts to spread: leave it out and start more workers, each is a replica"
        raise EngineStartError("data_parallel", reason)
    communicator = resolve_obj_by_qualname(current_platform.get_device_communicator_cls())
    if communicator.all_gatherv is DeviceCommunicatorBase.all_gatherv:
        reason = "vLLM cannot gather batches of unlike ranks on this device (so on CPUs): it takes GPUs"
        raise EngineStartError("data_parallel", reason)


def _groups(engine: Any, config: WorkerConfig, parts: int) -> "KvGroups":
    """Return the KV groups of a model whose blocks lie in so many `parts`.

    Raises EngineStartError for another block size than the worker's, unless the model's recurrent states decide it.
    """
    from engine.backends.vllm.kv.groups import KvGroups

    kv_config = engine.scheduler.kv_cache_config
    scheduler = engine.scheduler
    num_ahead = 1 + scheduler.num_spec_tokens + scheduler.num_lookahead_tokens if scheduler.num_spec_tokens else 0
    unit = int(scheduler.hash_block_size)
    groups = KvGroups(scheduler.kv_cache_manager, unit, num_ahead, parts)
    if unit != config.block_tokens and not kv_config.has_mamba_layers:
        raise EngineStartError("block_tokens", f"vLLM uses blocks of {unit} tokens here")
    return groups
