"""Configuration of a worker, of either role."""

import os
import re
import socket
from pathlib import Path
from typing import Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, field_validator

from cluster.config import Config
from cluster.roles import Role
from cluster.settings import DiscoverySettings, HealthSettings, LogSettings, MetricsSettings
from engine.backends.sim.timing import StepTiming
from engine.errors import EngineStartError
from engine.host.cpu_affinity import num_available
from engine.kv.layout import KvDtype
from engine.model.quantization import QuantizationConfig, Weights
from engine.speculation.speculator import MAX_GUESSES, NGRAM
from kvtransfer.ranks import MAX_RANKS


class WorkerConfig(HealthSettings, MetricsSettings, LogSettings, DiscoverySettings, Config):
    """A prefill or decode worker."""

    model: Path
    """A local Hugging Face directory of a decoder-only model."""
    routers: tuple[str, ...] = ()
    """host:port of every router to join, besides those that are found in Redis."""
    worker_id: str = ""
    """Unique in the cluster. Default: role, host and process id."""
    host: str = "127.0.0.1"
    """Address to listen on."""
    port: int = Field(default=0, ge=0, le=65535)
    """0 lets the system choose."""
    advertise_host: str = ""
    """Host others reach this worker by, when it is not `host`."""

    engine: Literal["torch", "sim"] = "torch"
    sim_step_ms: NonNegativeFloat = 0.0
    """How long a step of the sim engine takes; to it come the four below."""
    sim_prompt_token_us: NonNegativeFloat = 0.0
    """For each prompt token of the step."""
    sim_prompt_pair_ns: NonNegativeFloat = 0.0
    """For each pair of a prompt token of the step and a token before it: attention's quadratic term."""
    sim_stream_us: NonNegativeFloat = 0.0
    """For each sequence that decodes."""
    sim_kv_token_ns: NonNegativeFloat = 0.0
    """For each token of context of each sequence that decodes."""
    sim_reads: Literal["all", "last"] = "all"
    """What a sampled token is a hash of: all KV of the sequence, or that of its last token, for many and long ones."""
    sim_block_kib: PositiveInt = 2
    """How much KV 16 tokens of the sim engine have."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Of weights and KV; auto: as the model was saved."""
    weights: Weights = "auto"
    """Of linear layers, the output layer among them. int8: quantised while loading, for half the memory and, on a CPU,
    nearly half the time of a decode step. int4: less of both, but prompts take a quarter more on a CPU than as saved,
    and some quality is lost. fp8: float8 weights and activations, on GPUs since Ada and Hopper (compute capability
    8.9), for half the memory and faster prompts. auto: as the model was saved, also if that is quantised, by GPTQ, AWQ
    or in float8. Workers exchange KV only with others whose weights are the same."""
    lora: Path | None = None
    """Directory of a LoRA adapter as PEFT saves it (adapter_config.json, adapter_model.safetensors). It is merged into
    the weights while loading, before they are quantised. Routers do not see it: all workers of a model have the same
    adapter, or the model with another one is a directory of its own."""
    kv_dtype: KvDtype = "auto"
    """What keys and values are kept, lent and moved in. int8 (any device) and fp8 (GPUs): quantised one by one, each
    with a scale of its own, so that nearly twice as many fit into `kv_memory_mib`. auto: as they are computed. Workers
    exchange KV only with others of the same."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where the torch engine computes and keeps KV. cuda: the first GPU the process sees. auto: that where there is
    one, else the CPU."""
    backend: Literal["auto", "native", "flashinfer", "triton", "sdpa"] = "auto"
    """What the torch engine computes with. native: kernels compiled once for this machine's CPU; flashinfer: on NVIDIA
    GPUs; triton: on GPUs too, and quantised KV; sdpa: torch's own on either, several times slower. auto: native, where
    a C++ compiler is found; on a GPU flashinfer, or triton where KV is quantised or flashinfer cannot be had; sdpa with
    a warning where these do not know the dtype."""
    block_tokens: int = Field(default=16, ge=1, le=1024)
    kv_memory_mib: PositiveInt = 256
    """Size of the KV pool."""
    kv_host_memory_mib: NonNegativeInt = 0
    """Host memory for blocks that the pool evicts. They come back from there where that is quicker than computing."""
    kv_disk_dir: Path | None = None
    """A directory for blocks that leave host memory. They outlive the worker. Workers of one host may share it, also
    of several models. What was left of another model a week ago goes when a worker starts."""
    kv_disk_mib: PositiveInt = 4096
    """Size of this worker's file in `kv_disk_dir`."""
    max_batch_tokens: PositiveInt = 2048
    """Tokens of one step, decodes and prompts together."""
    max_prefill_tokens: PositiveInt | None = None
    """Prompt tokens of one step, the chunk of chunked prefill. Default: 512 for prefill workers; 128 for decode
    workers, whose running streams wait for every step."""
    threads: PositiveInt | None = None
    """Compute threads. Default: as many as `cores`, or as the machine or the container's CPU limit has."""
    reserve_output_tokens: PositiveInt = 256
    """KV blocks promised to a request beyond its prompt are for this many tokens at most. What it generates beyond
    takes blocks as they are available, and where none is, somebody is preempted and computed anew later."""
    traffic_share: float | None = Field(default=None, gt=0, lt=1)
    """For canaries: the share of its model's requests that workers which say this get together, each pool of its role
    for itself. They get no others while other workers could serve those; a request of theirs that they have no room for
    goes to the others. Default: no canary."""
    cores: tuple[int, ...] | None = None
    """CPU cores the engine process is pinned to. Engines that share cores unpinned slow each other several times over.
    Default: torch engines of one host that are told neither this nor `threads` keep off each other's cores by
    themselves, anew as they come and go. Not so ranks of `tensor_parallel`, and containers that have a network of their
    own or a CPU limit below the cores they see."""
    shared_cores: tuple[int, ...] = ()
    """Cores of other engines that the native backend computes on as well, with one thread bound to each: what a
    prefill worker gets of the cores of a decode worker, whose steps wait for memory more than they compute."""
    niceness: int = Field(default=0, ge=0, le=19)
    """How far the engine steps back behind others on the same cores; as `nice`."""

    speculation: str | None = None
    """Of a decode worker: where guesses at the tokens that follow come from, which a step verifies together. ngram:
    what followed the last tokens where they occurred before, in the prompt or the output; off; or the directory of a
    draft model, a smaller one of the same vocabulary, whose KV comes on top of `kv_memory_mib`. What is sampled does
    not depend on it; guesses that do not pay are not made. Default: ngram. A prefill worker that becomes a decode
    worker has ngram instead of a draft model. The sim engine has none."""
    speculation_tokens: int = Field(default=MAX_GUESSES, ge=1, le=32)
    """Guesses for one sequence in one step, at most."""

    tensor_parallel: int = Field(default=1, ge=1, le=MAX_RANKS)
    """Processes that share the model's weights, attention heads and KV blocks, one GPU or a part of `cores` each. The
    memory, threads and cores of these settings are those of all of them together. Must divide the model's heads; the
    model needs a tensor-parallel plan in transformers."""

    transport: Literal["nixl", "ucxx"] = "nixl"
    """What moves KV between workers; all of a cluster use the same. ucxx: for machines without NIXL, or to compare; on
    one host nixl is faster, since it reads shared memory."""
    strict_lanes: tuple[str, ...] = ()
    """UCX transports that KV must travel over, such as rc_mlx5 or cuda_ipc, or a group of them: rdma, shm. Where UCX
    would fall back to others, the worker does not start, or its loans fail. Default: whatever UCX finds best."""
    max_queued_loans: PositiveInt = 256
    peer_silence_s: PositiveFloat = 8.0
    """A lender whose engine says nothing for so long is given up, and so is a borrower. So is a loan, when for so long
    nothing comes from where it is read, be it the lender, host memory or disk. Below 10 s with the second that it takes
    to notice a rank that hangs."""
    drain_s: NonNegativeFloat = 30.0
    """Told to stop, the worker lets its streams and loans finish for so long, and then hands its streams over to other
    workers, which may read its blocks for a while longer."""

    @property
    def kv_bytes(self) -> int:
        return self.kv_memory_mib << 20

    def sim_timing(self) -> StepTiming:
        return StepTiming(
            step_s=self.sim_step_ms * 1e-3,
            prompt_token_s=self.sim_prompt_token_us * 1e-6,
            prompt_pair_s=self.sim_prompt_pair_ns * 1e-9,
            stream_s=self.sim_stream_us * 1e-6,
            kv_token_s=self.sim_kv_token_ns * 1e-9,
        )

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
        """YAML reads it as false."""
        return "off" if value is False else value

    def speculates(self, role: Role) -> str:
        """off, ngram, or the directory of a draft model. A prefill worker may become a decode worker, for which it has
        ngram: a draft model would take memory meanwhile. Raises EngineStartError."""
        if self.engine == "sim":
            if self.speculation not in (None, "off"):
                raise EngineStartError("speculation", "the sim engine's tokens are hashes, which nobody can guess")
            return "off"
        chosen = self.speculation or NGRAM
        return NGRAM if role == "prefill" and chosen != "off" else chosen

    def quantization(self) -> QuantizationConfig:
        """Raises EngineStartError where the engine has nothing to make it of."""
        if self.engine == "sim" and self.weights != "auto":
            raise EngineStartError("weights", "the sim engine has no weights")
        if self.engine == "sim" and self.lora is not None:
            raise EngineStartError("lora", "the sim engine has no weights")
        if self.engine == "sim" and self.kv_dtype != "auto":
            raise EngineStartError("kv_dtype", "what KV of the sim engine is made of is not to be chosen")
        return QuantizationConfig(weights=self.weights, kv_dtype=self.kv_dtype, lora=self.lora)

    def refuse_parallel(self, role: Role) -> None:
        """Raises EngineStartError for settings that do not go together with `tensor_parallel` above 1."""
        if self.tensor_parallel == 1:
            return
        others = {
            "engine: sim": self.engine == "sim",
            "kv_host_memory_mib": self.kv_host_memory_mib > 0,
            "kv_disk_dir": self.kv_disk_dir is not None,
            f"weights: {self.weights}": self.weights != "auto",
            "lora": self.lora is not None,
            "a draft model in speculation": self.speculates(role) not in ("off", NGRAM),
        }
        if found := [name for name, is_set in others.items() if is_set]:
            raise EngineStartError("tensor_parallel", f"{self.tensor_parallel} does not go with {', '.join(found)}")

    def of_rank(self, rank: int) -> "WorkerConfig":
        """With one rank's share of cores and threads: equally many for all, so that all compute the same sums in the
        same order. Fewer cores than ranks are shared."""
        ranks = self.tensor_parallel
        if ranks == 1:
            return self
        cores = self.cores
        if cores is not None and len(cores) >= ranks:
            each = len(cores) // ranks
            cores = cores[rank * each : (rank + 1) * each]
        threads = max(1, (self.threads or len(self.cores or ()) or num_available()) // ranks)
        return self.model_copy(update={"cores": cores, "threads": threads, "shared_cores": ()})

    def id_for(self, role: Role) -> str:
        return self.worker_id or f"{role}-{socket.gethostname()}-{os.getpid()}"

    def prefill_chunk(self, role: Role) -> int:
        """Most prompt tokens in one step."""
        chosen = self.max_prefill_tokens or (512 if role == "prefill" else 128)
        return min(chosen, self.max_batch_tokens)
