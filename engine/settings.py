"""Settings of a worker that do not belong to one engine; those of an engine lie beside its backend."""

import os
import re
import socket
from pathlib import Path
from typing import Any, ClassVar, Final, Literal, Self

from pydantic import BaseModel, Field, NonNegativeInt, PositiveFloat, PositiveInt, field_validator

from cluster.config import Config
from cluster.roles import Role
from cluster.settings import (
    DiscoverySettings,
    DrainSettings,
    HealthSettings,
    LogSettings,
    MetricsSettings,
    ReachedSettings,
)
from engine.core_types import GpuDevice, StepBudget
from engine.host.cores import num_available
from engine.model.hub import ModelPath
from kvcache.store.block_store import BUFFER_BYTES
from kvcache.store.kv_store import StoreSettings
from kvtransfer.ranks import MAX_RANKS

BATCH_TOKENS_ON_CPU = 2048
"""Default of `max_batch_tokens` on a CPU."""
PREFILL_TOKENS_ON_GPU = 8192
"""Default chunk of prefill workers on any GPU, whose kernels are busy only from thousands of tokens on. No stream waits
for their steps, so they need not keep to vLLM's smaller defaults."""
DEFAULT_ENGINE: Final = "torch"
PLUGIN_NAME = r"^[a-z][a-z0-9_-]*$"


class VllmFlags(BaseModel):
    """Settings of every process that starts vLLM or a part of it."""

    vllm_python: Path | None = None
    """Python interpreter of the environment with vLLM, Tandem and nixl, as `make vllm` sets it up. Default: this
    process's interpreter where vLLM is installed beside it, else .venv-vllm beside its environment."""
    vllm_options: dict[str, Any] = Field(default_factory=dict)
    """Further arguments of vLLM's EngineArgs by name, such as quantization, max_model_len, max_num_seqs, enforce_eager,
    kv_cache_dtype and attention_backend."""
    vllm_args: str = ""
    """Flags of `vllm serve`, as on its command line: `--max-model-len 8192 --quantization fp8`. A flag that is a
    setting here, such as --tensor-parallel-size, sets it; a flag that Tandem cannot honour is refused by name.
    Preprocessors and encode workers need those of the workers that concern media, such as --limit-mm-per-prompt."""


class CommonSettings(
    StoreSettings,
    ReachedSettings,
    DrainSettings,
    HealthSettings,
    MetricsSettings,
    LogSettings,
    DiscoverySettings,
    Config,
):
    """Settings of a worker that engines share, or that Tandem reads itself."""

    model: ModelPath
    """Local Hugging Face directory of a decoder-only model, or a repository of the Hub as org/name[@revision], fetched
    at start where there is no such directory. A name that begins with `./` is always a directory's. HF_TOKEN,
    HF_ENDPOINT, HF_HOME, HF_HUB_CACHE and HF_HUB_OFFLINE have huggingface_hub's meaning."""
    model_name: str = Field(default="", max_length=256)
    """Name of the model at the routers: their `name` of it, or the name of their directory. Set it where revisions of
    the model lie in directories of different names. Default: the name of the directory or the repository."""
    routers: tuple[str, ...] = ()
    """Addresses host:port of routers to join, besides those found in Redis."""
    worker_id: str = ""
    """Name of the worker, unique in the cluster. Default: role, host and process id."""
    port: int = Field(default=0, ge=0, le=65535)
    """Port to listen on; 0 lets the system choose."""
    stream_port: int = Field(default=0, ge=0, le=65535)
    """Port at which routers open their connections of requests and events, over TCP; 0 lets the system choose."""
    loan_port: int = Field(default=0, ge=0, le=65535)
    """Port at which the engine takes loans of other engines, over TCP; 0 lets the system choose."""

    engine: str = Field(default=DEFAULT_ENGINE, pattern=PLUGIN_NAME)
    """Engine. torch: a transformers model, computed by Tandem on CPUs. vllm: vLLM in an environment of its own. sim: a
    simulated model whose tokens are hashes, for tests and for sizing. Another name: an engine of an installed package,
    see docs/extending.md. Only workers of one engine exchange KV."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Data type of weights and KV; auto: as the model was saved."""
    adapters: dict[str, ModelPath] = Field(default_factory=dict)
    """Directories or repositories of LoRA adapters as PEFT saves them, by name (vllm and sim engines). Clients ask for
    an adapter as for a model of its own. Workers of a model may have different adapters: a request goes to workers that
    have its adapter loaded."""
    block_tokens: int = Field(default=16, ge=1, le=1024)
    """Tokens of a KV block, equal for all workers of a model. Default: 16; with the vllm engine 32, since vLLM's CPU
    attention takes multiples of 32."""
    kv_memory_mib: PositiveInt | Literal["auto"] = "auto"
    """Size of the KV pool in MiB. auto: with the torch engine what the weights and a measured step leave of the
    container's memory, where the worker is alone in one that has a limit; with the vllm engine what vLLM leaves of a
    GPU; 256 everywhere else. Set a number where several workers share a GPU."""
    max_batch_tokens: PositiveInt | None = None
    """Largest number of tokens in one step, decodes and prompts together. Default: 2048 on a CPU; 8192 on a GPU, 16384
    on one of at least 160 GiB."""
    max_prefill_tokens: PositiveInt | None = None
    """Largest number of prompt tokens in one step, the chunk of chunked prefill. Default on a CPU: 512 for prefill
    workers; 128 for decode workers, whose running streams wait for every step. On a GPU: `max_batch_tokens` for prefill
    workers; for decode workers what `vllm serve` takes, which is 2048, from 70 GiB on (except A100) 8192, from 160 GiB
    on 16384."""
    threads: PositiveInt | None = None
    """Number of compute threads. Default: the number of `cores`, or of the machine's cores within the container's CPU
    limit."""
    reserve_output_tokens: PositiveInt = 256
    """Most output tokens for which a request reserves KV blocks, beyond its prompt; fewer where its router expects a
    shorter output. Further blocks are taken while available; when none is, a request is preempted and computed again
    later. Raise it when requests with long outputs are preempted often."""
    traffic_share: float | None = Field(default=None, gt=0, lt=1)
    """Share of the model's requests for canary workers, together, per pool of a role. They get no others while other
    workers could serve those; requests that they have no capacity for go to other workers. Default: no canary."""
    cores: tuple[int, ...] | None = None
    """CPU cores to which the engine process is pinned. Unpinned engines that share cores slow each other several times
    over. Default: torch engines of one host without this setting and `threads` agree on disjoint cores by
    themselves. Set it for containers with a network of their own or a CPU limit
    below the cores they see."""
    shared_cores: tuple[int, ...] = ()
    """Cores of other engines on which the native backend also computes, one thread bound to each: a prefill worker may
    use those of a decode worker, whose steps wait for memory."""
    niceness: int = Field(default=0, ge=0, le=19)
    """Niceness of the engine process; raise it for an engine that should yield to others on the same cores."""

    tensor_parallel: int = Field(default=1, ge=1, le=MAX_RANKS)
    """Number of processes that share the model's weights, attention heads and KV blocks (vllm engine), one GPU or a
    part of `cores` each. Memory, threads and cores in these settings are those of all of them together."""

    pipeline_parallel: int = Field(default=1, ge=1, le=MAX_RANKS)
    """Number of pipeline stages of the vllm engine, each with a range of the model's layers, on `tensor_parallel`
    processes. Memory, threads and cores in these settings are those of all stages together. It needs vLLM's Model
    Runner V2, so a GPU."""
    nodes: int = Field(default=1, ge=1, le=MAX_RANKS)
    """Number of hosts with ranks of this worker (vllm engine), equally many on each. Every host runs this program with
    the same settings but for its own `node_rank`."""
    node_rank: int = Field(default=0, ge=0, lt=MAX_RANKS)
    """Number of this host among the `nodes`. Node 0 is the worker; the others serve health only, and start again with
    each start of node 0."""
    master_addr: str = ""
    """Address of node 0 that the other nodes reach. Required with several `nodes`."""
    master_port: int = Field(default=29501, ge=1, le=65534)
    """Port of node 0 at which vLLM's ranks meet. The port after it has Tandem's own link between nodes. Both need a
    private network: vLLM's port has no authentication."""
    data_parallel: int = Field(default=1, ge=1)
    """Number of workers that share the experts of a mixture-of-experts model, each with attention and KV of its own
    (vllm engine). They are ranks of a group whose steps are made together, so one lost rank ends all; their streams
    go on at workers of other groups. Each rank is started as a worker of its own, with the same settings."""
    data_parallel_rank: NonNegativeInt = 0
    """Number of this worker in its group, from 0."""
    data_parallel_local: int = Field(default=1, ge=1, le=MAX_RANKS)
    """Number of the group's workers that this program starts, from `data_parallel_rank` on, each as a process of its
    own that sees the GPUs of all. `port`, `stream_port`, `loan_port` and `metrics_port` are the first one's, and the
    others take the ports that follow."""
    data_parallel_address: str = "127.0.0.1"
    """Host of rank 0, where the ranks of the group meet."""
    data_parallel_port: int = Field(default=29550, ge=1, le=65535)
    """Port of rank 0 at which the ranks of the group connect; they agree on steps over it. The ports of vLLM's own
    process groups are free ones, which rank 0, Gloo and NCCL choose at each start, as for `vllm serve`. None of them
    is encrypted."""
    member_index: NonNegativeInt | None = None
    """Number of this program among all of a group, from 0, for launchers that number their pods. It stands for
    `node_rank` and `data_parallel_rank`: programs of one worker follow each other."""

    transport: str = Field(default="nixl", pattern=PLUGIN_NAME)
    """Transport of KV between workers, equal for all workers of a cluster. nixl: UCX by NIXL. ucxx: for machines
    without NIXL, or to compare; on one host nixl is faster, since it reads shared memory. Another name: a transport of
    an installed package, see docs/extending.md."""
    strict_lanes: tuple[str, ...] = ()
    """UCX transports that KV must travel over, such as rc_mlx5 or cuda_ipc, or groups of them: rdma, shm. Where UCX
    would fall back to others, the worker does not start, or its loans fail. Default: UCX chooses."""
    max_queued_loans: ClassVar[int] = 256
    """Largest number of loans that wait in a lender; further loans are refused."""
    peer_silence_s: PositiveFloat = 8.0
    """Seconds of silence after which a lender or a borrower is given up, and seconds without progress after which a
    loan fails, whether it reads from a lender, host memory or disk. Keep it below 10 s, including the second that it
    takes to notice a hanging rank."""
    faults: bool = False
    """Whether operators may inject faults into this worker, for drills with `tandem fault`. Every process that reaches
    the worker's port can then kill or stop it, so leave it false in production."""

    @property
    def num_ranks(self) -> int:
        """Number of processes that compute."""
        return self.tensor_parallel * self.pipeline_parallel

    @property
    def num_local_ranks(self) -> int:
        """Number of them on each of the `nodes`."""
        return self.num_ranks // self.nodes

    @property
    def num_threads(self) -> int:
        """Number of compute threads."""
        return self.threads or len(self.cores or ()) or num_available()

    @property
    def kv_bytes(self) -> int | None:
        """Size of the KV pool in bytes; None for auto."""
        return None if self.kv_memory_mib == "auto" else self.kv_memory_mib << 20

    @property
    def host_kv_bytes(self) -> int:
        """Main memory for KV outside of the pool: evicted blocks, and the buffers of stores."""
        num_stores = bool(self.kv_store) + bool(self.kv_host_memory_mib or self.kv_disk_dir)
        return (self.kv_host_memory_mib << 20) + num_stores * BUFFER_BYTES

    @field_validator("routers")
    @classmethod
    def _have_ports(cls, routers: tuple[str, ...]) -> tuple[str, ...]:
        for router in routers:
            if not re.search(r".:[0-9]{1,5}$", router):
                raise ValueError(f"{router!r} is not host:port")
        return routers

    def of_rank(self, rank: int) -> Self:
        """Return the settings of one rank, with its share of this host's cores and threads.

        All ranks get equally many, so all compute the same sums in the same order. Ranks share cores when there are
        fewer cores than ranks.
        """
        if self.num_ranks == 1:
            return self
        ranks = self.num_local_ranks
        rank %= ranks
        cores = self.cores
        if cores is not None and len(cores) >= ranks:
            each = len(cores) // ranks
            cores = cores[rank * each : (rank + 1) * each]
        threads = max(1, self.num_threads // ranks)
        return self.model_copy(update={"cores": cores, "threads": threads, "shared_cores": ()})

    def id_for(self, role: Role) -> str:
        return self.worker_id or f"{role}-{socket.gethostname()}-{os.getpid()}"


def step_budget(config: CommonSettings, role: Role, gpu: GpuDevice | None) -> StepBudget:
    """Return the limits of a step of an engine in `role`, on a GPU or a CPU (None)."""
    max_tokens = max_step_tokens(config, gpu)
    if gpu is None:
        chunk = 512 if role == "prefill" else 128
    else:
        chunk = max_tokens if role == "prefill" else _vllm_tokens(gpu)
    return StepBudget(max_tokens, min(config.max_prefill_tokens or chunk, max_tokens))


def max_step_tokens(config: CommonSettings, gpu: GpuDevice | None) -> int:
    """Return the largest number of tokens in one step, equal for both roles, which a worker may change."""
    default = BATCH_TOKENS_ON_CPU if gpu is None else max(PREFILL_TOKENS_ON_GPU, _vllm_tokens(gpu))
    return config.max_batch_tokens or default


def _vllm_tokens(gpu: GpuDevice) -> int:
    """Return the default of max_num_batched_tokens of `vllm serve` (EngineArgs.get_batch_defaults of vLLM 0.32)."""
    if gpu.num_bytes >= 160 << 30:
        return 16384
    return 8192 if gpu.num_bytes >= 70 << 30 and "a100" not in gpu.name.lower() else 2048
