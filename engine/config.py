"""Configuration of a worker, of either role."""

import os
import re
import socket
from pathlib import Path
from typing import Any, Literal

from pydantic import (
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    field_validator,
    model_validator,
)

from cluster.config import Config
from cluster.roles import Role
from cluster.settings import DiscoverySettings, HealthSettings, LogSettings, MetricsSettings
from engine.backends.sim.timing import StepTiming
from engine.core_types import GpuDevice, StepBudget
from engine.errors import EngineStartError
from engine.host.cpu_affinity import num_available
from engine.kv.layout import KvDtype
from engine.kv.store.block_store import BUFFER_BYTES
from engine.kv.store.settings import StoreSettings
from engine.model.hub import ModelPath
from engine.model.quantization import QuantizationConfig, Weights
from engine.speculation.speculator import MAX_GUESSES, NGRAM
from engine.vllm_flags import value_of, with_flags
from kvtransfer.ranks import MAX_RANKS

BATCH_TOKENS_ON_CPU = 2048
"""Default of `max_batch_tokens` on a CPU."""
PREFILL_TOKENS_ON_GPU = 8192
"""Default chunk of prefill workers on any GPU, whose kernels are busy only from thousands of tokens on. No stream waits
for their steps, so they need not keep to vLLM's smaller defaults."""
OWN_ENGINES = ("torch", "vllm", "sim")
"""Engines of this package."""
PLUGIN_NAME = r"^[a-z][a-z0-9_-]*$"
VLLM_BLOCK_TOKENS = 32
"""Tokens of a KV block of the vllm engine, where none are set."""


class WorkerConfig(StoreSettings, HealthSettings, MetricsSettings, LogSettings, DiscoverySettings, Config):
    """Settings of a prefill or decode worker."""

    model: ModelPath
    """Local Hugging Face directory of a decoder-only model, or a repository of the Hub as org/name[@revision], fetched
    at start where there is no such directory. A name that begins with `./` is always a directory's. HF_TOKEN,
    HF_ENDPOINT, HF_HOME, HF_HUB_CACHE and HF_HUB_OFFLINE have huggingface_hub's meaning."""
    routers: tuple[str, ...] = ()
    """Addresses host:port of routers to join, besides those found in Redis."""
    worker_id: str = ""
    """Name of the worker, unique in the cluster. Default: role, host and process id."""
    host: str = "127.0.0.1"
    """Address to listen on."""
    port: int = Field(default=0, ge=0, le=65535)
    """Port to listen on; 0 lets the system choose."""
    stream_port: int | None = Field(default=0, ge=0, le=65535)
    """Port at which routers open their streams of requests and events, which cost a third of gRPC's CPU time. 0 lets
    the system choose; null: they use gRPC, say where a proxy lets nothing else through."""
    advertise_host: str = ""
    """Host at which others reach this worker, when it is not `host`."""

    engine: str = Field(default="torch", pattern=PLUGIN_NAME)
    """Engine. torch: a transformers model, computed by Tandem. vllm: vLLM in an environment of its own. sim: a
    simulated model whose tokens are hashes, for tests and for sizing. Another name: an engine of an installed package,
    see docs/extending.md. Only workers of one engine exchange KV."""
    vllm_python: Path | None = None
    """Python interpreter of the environment with vLLM, Tandem and nixl, as `make vllm` sets it up. Default: this
    process's interpreter where vLLM is installed beside it, else .venv-vllm beside its environment."""
    vllm_options: dict[str, Any] = Field(default_factory=dict)
    """Further arguments of vLLM's EngineArgs by name, such as quantization, max_model_len, max_num_seqs, enforce_eager,
    kv_cache_dtype and attention_backend."""
    vllm_args: str = ""
    """Flags of `vllm serve`, as on its command line: `--max-model-len 8192 --quantization fp8`. A flag that is a
    setting here, such as --tensor-parallel-size, sets it; a flag that Tandem cannot honour is refused by name."""
    sim_step_ms: NonNegativeFloat = 0.0
    """Milliseconds that a step of the sim engine takes; the four terms below are added."""
    sim_prompt_token_us: NonNegativeFloat = 0.0
    """Microseconds per prompt token of the step."""
    sim_prompt_pair_ns: NonNegativeFloat = 0.0
    """Nanoseconds per pair of a prompt token and a token before it: attention's quadratic term."""
    sim_stream_us: NonNegativeFloat = 0.0
    """Microseconds per decoding sequence."""
    sim_kv_token_ns: NonNegativeFloat = 0.0
    """Nanoseconds per token of context of each decoding sequence."""
    sim_reads: Literal["all", "last"] = "all"
    """KV that a token of the sim engine is a hash of: all of the sequence, or that of its last token (faster with many
    long sequences)."""
    sim_block_kib: PositiveInt = 2
    """Size of a KV block of 16 tokens in the sim engine, in KiB."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Data type of weights and KV; auto: as the model was saved."""
    weights: Weights = "auto"
    """Format of linear layers, the output layer included. auto: as saved, also if saved quantised by GPTQ, AWQ or in
    float8. int8: quantised at load, half the memory and, on a CPU, nearly half the time of a decode step. int4: less
    of both, but on a CPU prompts take a quarter more time than as saved, and some quality is lost. fp8: float8
    weights and activations, on GPUs of compute capability 8.9 and up, half the memory and faster prompts. Only
    workers with equal weights exchange KV."""
    lora: ModelPath | None = None
    """Directory or repository of a LoRA adapter as PEFT saves it (adapter_config.json, adapter_model.safetensors),
    merged into the weights at load, before quantisation. Routers do not see it: all workers of a model need the same
    adapter; a model with another adapter is a directory of its own."""
    adapters: dict[str, ModelPath] = Field(default_factory=dict)
    """Directories or repositories of LoRA adapters as PEFT saves them, by name (vllm and sim engines). Clients ask for
    an adapter as for a model of its own. Workers of a model may have different adapters: a request goes to workers that
    have its adapter loaded."""
    kv_dtype: KvDtype = "auto"
    """Format of stored, lent and moved KV. auto: as computed. int8 (any device), fp8 (GPUs): each vector quantised with
    its own scale, so nearly twice as many blocks fit into `kv_memory_mib`. Only workers with equal settings exchange
    KV."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device of the torch engine. cuda: the first GPU that the process sees. auto: cuda where there is a GPU, else the
    CPU."""
    backend: Literal["auto", "native", "flashinfer", "triton", "sdpa"] = "auto"
    """Kernels of the torch engine. native: compiled once for this machine's CPU. flashinfer: NVIDIA GPUs. triton: GPUs,
    also with quantised KV. sdpa: torch's own on any device, several times slower. auto: native where a C++ compiler
    is found; on a GPU flashinfer, or triton where KV is quantised or flashinfer is missing; sdpa with a warning
    where these do not know the dtype."""
    block_tokens: int = Field(default=16, ge=1, le=1024)
    """Tokens of a KV block, equal for all workers of a model. Default: 16; with the vllm engine 32, since vLLM's CPU
    attention takes multiples of 32."""
    kv_memory_mib: PositiveInt | Literal["auto"] = "auto"
    """Size of the KV pool in MiB. auto: what the weights and a measured step leave of the GPU's memory, or of the
    container's where the worker is alone in one that has a limit; with the vllm engine what vLLM leaves of a GPU; 256
    everywhere else. Set a number where several workers share a GPU."""
    kv_host_memory_mib: NonNegativeInt = 0
    """Host memory for evicted blocks, in MiB. Blocks are restored from there where that is faster than computing."""
    kv_disk_dir: Path | None = None
    """Directory for blocks that leave host memory. Its contents outlive the worker. Workers of one host may share it,
    also workers of different models. A file left by another model a week ago is removed at start."""
    kv_disk_mib: PositiveInt = 4096
    """Size of this worker's file in `kv_disk_dir`, in MiB."""
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
    themselves. Set it for ranks of `tensor_parallel`, and for containers with a network of their own or a CPU limit
    below the cores they see."""
    shared_cores: tuple[int, ...] = ()
    """Cores of other engines on which the native backend also computes, one thread bound to each: a prefill worker may
    use those of a decode worker, whose steps wait for memory."""
    niceness: int = Field(default=0, ge=0, le=19)
    """Niceness of the engine process; raise it for an engine that should yield to others on the same cores."""

    speculation: str | None = None
    """Source of draft tokens of a decode worker. ngram: the tokens that followed earlier occurrences of the last
    tokens, in prompt or output. off: none. A directory or repository: a draft model, smaller and of the same
    vocabulary, whose KV comes on top of `kv_memory_mib`. The output does not depend on it, and drafts that do not pay
    are not made. Default: ngram. A prefill worker that becomes a decode worker uses ngram instead of a draft model. The
    sim engine has none."""
    speculation_tokens: int = Field(default=MAX_GUESSES, ge=1, le=32)
    """Largest number of draft tokens for one sequence in one step."""

    tensor_parallel: int = Field(default=1, ge=1, le=MAX_RANKS)
    """Number of processes that share the model's weights, attention heads and KV blocks, one GPU or a part of `cores`
    each. Memory, disk, threads and cores in these settings are those of all of them together. It must divide the
    model's heads, and the model needs a tensor-parallel plan in transformers."""

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
    own that sees the GPUs of all. `port` and `metrics_port` are the first one's, and the others take the ports that
    follow."""
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
    max_queued_loans: PositiveInt = 256
    """Largest number of loans that wait in a lender; further loans are refused."""
    peer_silence_s: PositiveFloat = 8.0
    """Seconds of silence after which a lender or a borrower is given up, and seconds without progress after which a
    loan fails, whether it reads from a lender, host memory or disk. Keep it below 10 s, including the second that it
    takes to notice a hanging rank."""
    drain_s: NonNegativeFloat = 30.0
    """Seconds for which a stopping worker lets streams and loans finish, before it hands streams over to other workers,
    which may read its blocks for a while longer."""
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
    def kv_bytes(self) -> int | None:
        """Size of the KV pool in bytes; None for auto."""
        return None if self.kv_memory_mib == "auto" else self.kv_memory_mib << 20

    @property
    def host_kv_bytes(self) -> int:
        """Main memory for KV outside of the pool: the host tier, and the shared store's buffers."""
        return (self.kv_host_memory_mib << 20) + (BUFFER_BYTES if self.kv_store else 0)

    @property
    def group(self) -> str:
        """Name of the data-parallel group, unique in the cluster; empty for a worker of its own."""
        if self.data_parallel == 1 or self.engine != "vllm":  # simulated workers of a group step by themselves
            return ""
        host = self.data_parallel_address
        is_local = host.startswith("127.") or host in ("localhost", "::1")
        return f"{socket.gethostname() if is_local else host}:{self.data_parallel_port}"

    def sim_timing(self) -> StepTiming:
        return StepTiming(
            step_s=self.sim_step_ms * 1e-3,
            prompt_token_s=self.sim_prompt_token_us * 1e-6,
            prompt_pair_s=self.sim_prompt_pair_ns * 1e-9,
            stream_s=self.sim_stream_us * 1e-6,
            kv_token_s=self.sim_kv_token_ns * 1e-9,
        )

    def vllm_option(self, name: str) -> Any:
        """Return the value of an argument of vLLM's that is set, None for others; a flag's as it is written."""
        return self.vllm_options.get(name, value_of(self.vllm_args, name))

    @model_validator(mode="before")
    @classmethod
    def _settings_of_vllm(cls, values: Any) -> Any:
        """Set what flags of vLLM and a program's number stand for.

        Raises EngineStartError for arguments of vLLM that Tandem refuses.
        """
        if not isinstance(values, dict):
            return values
        if values.get("engine") == "vllm":
            return _numbered({"block_tokens": VLLM_BLOCK_TOKENS} | with_flags(values))
        if values.get("vllm_args"):
            raise EngineStartError("vllm_args", "flags of vLLM need engine: vllm")
        return values

    @model_validator(mode="after")
    def _check_data_parallel(self) -> "WorkerConfig":
        """Raise EngineStartError for settings that do not go with a data-parallel group."""
        if self.data_parallel > 1 and self.engine not in ("vllm", "sim"):
            raise EngineStartError("data_parallel", "needs engine: vllm; start more workers instead, each is a replica")
        last = self.data_parallel_rank + self.data_parallel_local - 1
        if last >= self.data_parallel:
            reason = f"{last} is no rank of {self.data_parallel}, the value of data_parallel"
            raise EngineStartError("data_parallel_rank", reason)
        return self

    @field_validator("routers")
    @classmethod
    def _have_ports(cls, routers: tuple[str, ...]) -> tuple[str, ...]:
        for router in routers:
            if not re.search(r".:[0-9]{1,5}$", router):
                raise ValueError(f"{router!r} is not host:port")
        return routers

    @field_validator("speculation", mode="before")
    @classmethod
    def _off_is_a_word(cls, value: object) -> object:
        """Accept `off`, which YAML reads as false."""
        return "off" if value is False else value

    def speculates(self, role: Role) -> str:
        """Return off, ngram, or the directory of a draft model.

        A prefill worker has ngram in case it becomes a decode worker, since a draft model would occupy memory
        meanwhile. Raises EngineStartError.
        """
        if self.engine == "sim":
            if self.speculation not in (None, "off"):
                raise EngineStartError("speculation", "the sim engine cannot speculate: its tokens are hashes")
            return "off"
        if self.engine != "torch":
            return "off"
        chosen = self.speculation or NGRAM
        return NGRAM if role == "prefill" and chosen != "off" else chosen

    def quantization(self) -> QuantizationConfig:
        """Quantization settings.

        Raises EngineStartError where the engine has no weights.
        """
        if self.engine == "torch" and self.adapters:
            reason = "the torch engine serves no unmerged adapters: set lora to merge one, or engine: vllm"
            raise EngineStartError("adapters", reason)
        if self.engine == "sim" and self.weights != "auto":
            raise EngineStartError("weights", "the sim engine has no weights")
        if self.engine == "sim" and self.lora is not None:
            raise EngineStartError("lora", "the sim engine has no weights")
        if self.engine == "sim" and self.kv_dtype != "auto":
            raise EngineStartError("kv_dtype", "the sim engine has one KV format")
        return QuantizationConfig(weights=self.weights, kv_dtype=self.kv_dtype, lora=self.lora)

    def refuse_parallel(self, role: Role) -> None:
        """Check that settings go together with `tensor_parallel` or `pipeline_parallel` above 1.

        Raises EngineStartError.
        """
        self._refuse_nodes()
        if self.num_ranks == 1:
            return
        if self.pipeline_parallel > 1 and self.engine != "vllm":
            reason = f"{self.pipeline_parallel} needs engine: vllm, not {self.engine}"
            raise EngineStartError("pipeline_parallel", reason)
        if self.num_ranks > MAX_RANKS:
            reason = f"{self.pipeline_parallel} stages of {self.tensor_parallel} ranks are more than {MAX_RANKS} ranks"
            raise EngineStartError("pipeline_parallel", reason)
        others = {
            f"engine: {self.engine}": self.engine not in ("torch", "vllm"),
            f"weights: {self.weights}": self.weights != "auto",
            "lora": self.lora is not None,
            "a draft model in speculation": self.speculates(role) not in ("off", NGRAM),
        }
        if unsupported := [name for name, is_set in others.items() if is_set]:
            field = "tensor_parallel" if self.tensor_parallel > 1 else "pipeline_parallel"
            reason = f"{getattr(self, field)} cannot be combined with {', '.join(unsupported)}"
            raise EngineStartError(field, reason)

    def _refuse_nodes(self) -> None:
        if self.nodes == 1:
            if self.node_rank:
                raise EngineStartError("node_rank", f"{self.node_rank} needs more nodes than 1")
            return
        if self.engine != "vllm":
            raise EngineStartError("nodes", f"{self.nodes} needs engine: vllm, not {self.engine}")
        if self.num_ranks % self.nodes:
            ranks = f"{self.num_ranks} ranks (tensor_parallel {self.tensor_parallel}, pipeline_parallel"
            reason = f"{ranks} {self.pipeline_parallel}) are not equally many on each of {self.nodes}"
            raise EngineStartError("nodes", reason)
        if self.node_rank >= self.nodes:
            raise EngineStartError("node_rank", f"{self.node_rank} is not below nodes, {self.nodes}")
        if not self.master_addr:
            raise EngineStartError("master_addr", "with several nodes, set the address of node 0")

    def of_rank(self, rank: int) -> "WorkerConfig":
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
        threads = max(1, (self.threads or len(self.cores or ()) or num_available()) // ranks)
        return self.model_copy(update={"cores": cores, "threads": threads, "shared_cores": ()})

    def id_for(self, role: Role) -> str:
        return self.worker_id or f"{role}-{socket.gethostname()}-{os.getpid()}"


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


def step_budget(config: WorkerConfig, role: Role, gpu: GpuDevice | None) -> StepBudget:
    """Return the limits of a step of an engine in `role`, on a GPU or a CPU (None)."""
    max_tokens = max_step_tokens(config, gpu)
    if gpu is None:
        chunk = 512 if role == "prefill" else 128
    else:
        chunk = max_tokens if role == "prefill" else _vllm_tokens(gpu)
    return StepBudget(max_tokens, min(config.max_prefill_tokens or chunk, max_tokens))


def max_step_tokens(config: WorkerConfig, gpu: GpuDevice | None) -> int:
    """Return the largest number of tokens in one step, equal for both roles, which a worker may change."""
    default = BATCH_TOKENS_ON_CPU if gpu is None else max(PREFILL_TOKENS_ON_GPU, _vllm_tokens(gpu))
    return config.max_batch_tokens or default


def _vllm_tokens(gpu: GpuDevice) -> int:
    """Return the default of max_num_batched_tokens of `vllm serve` (EngineArgs.get_batch_defaults of vLLM 0.32)."""
    if gpu.num_bytes >= 160 << 30:
        return 16384
    return 8192 if gpu.num_bytes >= 70 << 30 and "a100" not in gpu.name.lower() else 2048


def finds_own_cores(config: WorkerConfig) -> bool:
    """Return whether an engine with these settings takes part in the allocation.

    With `cores` set it is avoided by others; without, it also avoids them. A container with a quota below the cores it
    sees cannot know which of them others leave to it.
    """
    if config.engine != "torch":
        return False
    if config.cores:
        return True
    return (config.threads, config.tensor_parallel) == (None, 1) and num_available() >= len(os.sched_getaffinity(0))
