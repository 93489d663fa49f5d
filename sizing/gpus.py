"""GPUs by name: public figures, and the duration of a model's step derived from them.

    name   bf16 TFLOP/s, dense   HBM TB/s   HBM GB   NIC GB/s   source of the first three
    B200   2250                  8.0        180      50         NVIDIA DGX B200 datasheet, 1/8 of it
    H200    989                  4.8        141      50         nvidia.com/en-us/data-center/h200 (SXM)
    H100    989                  3.35        80      50         nvidia.com/en-us/data-center/h100 (SXM)
    A100    312                  2.039       80      25         NVIDIA A100 datasheet (SXM, 80 GB)
    L40S    362                  0.864       48      12.5       nvidia.com/en-us/data-center/l40s
    A10     125                  0.6         24      12.5       NVIDIA A10 datasheet
    L4      121                  0.3         24      12.5       nvidia.com/en-us/data-center/l4

Where NVIDIA states a figure with sparsity (H100 and H200 1979, L4 242), this is half of it. All figures agree with
copies of those pages elsewhere (stas00/ml-engineering, MLPerf's system descriptions, vendors' product pages). B200 has
192 GB, of which servers offer 180.

NICs are what servers usually give each GPU: 400, 200 and 100 Gbit/s. Prices are round figures of clouds per GPU and
hour on demand in 2025; they differ by a factor of two between clouds, so bring your own (`--price`).

No GPU reaches its figures: `COMPUTE` of the FLOP/s and `MEMORY` of the bandwidth are what well-tuned engines reach on
large prompts and large batches (published: MFU of 40 to 60 %, 70 to 85 % of the bandwidth).
"""

from dataclasses import dataclass, field

from engine.backends.sim.settings import StepWork
from sizing.models.model_layers import LayerGroup
from sizing.models.model_shape import STATES, ModelShape
from workloads.request import BadSetup, shown

COMPUTE = 0.5
MEMORY = 0.75
STEP_S = 0.002
"""Fixed seconds of a step: launch, sampling, the engine's own work."""
TP_EFFICIENCY = 0.9
"""Efficiency of each further doubling of the GPUs of one model, which wait for each other twice per layer."""
USABLE_MEMORY = 0.9
HOST_GPUS = 8
"""GPUs of one host, which NVLink joins."""
EXCHANGE_BYTES = 3
"""Bytes of a hidden state's element on its way to an expert of another host, in float8, and back, in bfloat16."""
SEQUENCE_TOKENS = 4096
"""Length of a sequence where nothing tells that of a load; it matters only to models with windows or states."""


@dataclass(frozen=True, slots=True)
class Gpu:
    """Figures of one GPU."""

    name: str
    flops: float
    """Dense bf16 FLOP per second."""
    bytes_per_s: float
    """Memory bandwidth."""
    memory_bytes: float
    nic_bytes_per_s: float
    usd_per_hour: float


GPUS = {
    gpu.name: gpu
    for gpu in (
        Gpu("B200", 2250e12, 8.0e12, 180e9, 50e9, 5.5),
        Gpu("H200", 989e12, 4.8e12, 141e9, 50e9, 3.5),
        Gpu("H100", 989e12, 3.35e12, 80e9, 50e9, 3.0),
        Gpu("A100", 312e12, 2.039e12, 80e9, 25e9, 1.8),
        Gpu("L40S", 362e12, 0.864e12, 48e9, 12.5e9, 1.2),
        Gpu("A10", 125e12, 0.6e12, 24e9, 12.5e9, 0.75),
        Gpu("L4", 121e12, 0.3e12, 24e9, 12.5e9, 0.7),
    )
}


def gpu_named(name: str) -> Gpu:
    """Return a GPU by name.

    Raises BadSetup.
    """
    try:
        return GPUS[name.upper()]
    except KeyError:
        raise BadSetup("gpu", f"{shown(name)} is not known; known are {', '.join(GPUS)}") from None


@dataclass(frozen=True, slots=True)
class Roofline:
    """Step timing of a worker's `tp` x `pp` equal GPUs: the larger of arithmetic and memory time, plus `step_s`.

    Arithmetic is that of all tokens, and of attention over the tokens before them. Memory is read once for the weights
    and once for the KV of each decoding sequence; a prompt's reads of its own KV hide behind its arithmetic. The
    decoding sequences of a step count as equally long where layers have windows. A recurrent state is read and written
    at each step; its arithmetic is not counted, since its matrices have a small part of the model's weights.

    With `pp` stages a step of all sequences is `pp` batches, one in each stage at any time. A batch reads all weights
    on its way, and has 1 / `pp` of the tokens and of the KV; so stages divide the other terms, and not the weights.

    With `dp` workers in a group each has a part of the experts, and all attention and shared layers. They are equally
    busy, so each computes as much for experts as its own tokens need, and reads its experts for all workers' tokens.
    Where the group has several hosts, a token's hidden state goes to each that has one of its experts, over the NICs.
    That time is added, not hidden.
    """

    model: ModelShape
    gpu: Gpu
    tp: int = 1
    pp: int = 1
    """Pipeline stages."""
    dp: int = 1
    """Workers of an expert-parallel group."""
    compute: float = COMPUTE
    memory: float = MEMORY
    step_s: float = STEP_S
    _token_s: float = field(init=False, repr=False)
    _pair_s: float = field(init=False, repr=False)
    _byte_s: float = field(init=False, repr=False)
    _weights_s: float = field(init=False, repr=False)
    """Seconds for all weights, which every step of a model without experts reads."""
    _context_s: float = field(init=False, repr=False)
    _decode_pair_s: float = field(init=False, repr=False)
    """Seconds per token of context beyond `_pair_s`."""
    _windows: tuple[tuple[int, float, float], ...] = field(init=False, repr=False)
    """Size of each window, seconds per pair, and seconds per token of context."""
    _state_s: float = field(init=False, repr=False)
    _exchange_s: float = field(init=False, repr=False)
    """Seconds per token in which hidden states go to other hosts' experts and back."""

    def __post_init__(self) -> None:
        """Precompute the seconds per token, pair, byte of weights and token of context, used at every step."""
        gpus = self.effective_gpus
        flop_s = 1 / (self.gpu.flops * self.compute * gpus)
        byte_s = 1 / (self.gpu.bytes_per_s * self.memory * gpus)
        object.__setattr__(self, "_token_s", 2 * self.model.active_params * flop_s)
        object.__setattr__(self, "_pair_s", self.model.attention_flops_per_pair * flop_s)
        object.__setattr__(self, "_byte_s", byte_s)
        object.__setattr__(self, "_weights_s", byte_s * self.model.weight_bytes_read(0))
        full, windows = _by_window(self.model)
        dtype = self.model.kv_dtype_bytes
        kept = sum(group.layers * group.token_elements for group in full)
        object.__setattr__(self, "_context_s", kept * dtype * self.copies * byte_s)
        more = sum(group.layers * (group.decode_pair_flops - group.pair_flops) for group in full)
        object.__setattr__(self, "_decode_pair_s", more * flop_s)
        each = (
            (group.window or 0, group.layers * group.pair_flops * flop_s, group.layers * group.token_elements * dtype)
            for group in windows
        )
        object.__setattr__(self, "_windows", tuple((size, pair_s, kept * byte_s) for size, pair_s, kept in each))
        object.__setattr__(self, "_state_s", STATES * self.model.state_bytes * byte_s)
        hosts = -(-self.gpus * self.dp // HOST_GPUS) if self.dp > 1 else 1
        others = min(self.model.experts_per_token, hosts - 1)
        sent = self.model.expert_layers * self.model.hidden * EXCHANGE_BYTES * others
        object.__setattr__(self, "_exchange_s", sent / (self.gpu.nic_bytes_per_s * self.gpus))

    @property
    def copies(self) -> int:
        """Copies of KV that the GPUs keep: a latent vector cannot be shared out by heads, so each rank has all."""
        return self.tp if self.model.latent else 1

    @property
    def gpus(self) -> int:
        """Number of GPUs of a worker."""
        return self.tp * self.pp

    @property
    def effective_gpus(self) -> float:
        """Number of ideal GPUs that the `tp` GPUs of a stage equal."""
        return self.tp * TP_EFFICIENCY ** (self.tp.bit_length() - 1)

    def seconds_of(self, work: StepWork) -> float:
        tokens, context = work.prompt_tokens + work.streams, work.context_tokens
        compute_s = self._token_s * tokens + self._pair_s * (work.prompt_pairs + context)
        compute_s += self._decode_pair_s * context
        memory_s = self._context_s * context + self._state_s * work.streams
        for size, pair_s, context_s in self._windows:
            seen = min(context, work.streams * size)
            compute_s += pair_s * (min(work.prompt_pairs, work.prompt_tokens * size) + seen)
            memory_s += context_s * seen
        weights_s = self._weights_s
        if self.model.experts:
            weights_s = self._byte_s * self.model.weight_bytes_read(tokens / self.pp, self.dp)
        compute_s, memory_s = compute_s / self.pp, weights_s + memory_s / self.pp
        return self.step_s + (compute_s if compute_s > memory_s else memory_s) + self._exchange_s * tokens / self.pp

    def num_blocks(self, block_tokens: int, sequence_tokens: float = SEQUENCE_TOKENS) -> int:
        """Return the number of KV blocks in the memory that the weights leave.

        Where layers have windows or states, a block is a part of a sequence of `sequence_tokens` tokens, its share of
        windows and states included. Raises BadSetup.
        """
        left = self.gpu.memory_bytes * self.gpus * USABLE_MEMORY - self.weight_bytes
        count = int(left // (self.model.mean_token_bytes(sequence_tokens) * block_tokens * self.copies))
        if count < 1:
            weights, memory = self.weight_bytes / 1e9, self.gpu.memory_bytes * self.gpus / 1e9
            part = f" in each of {self.dp} workers" if self.dp > 1 else ""
            raise BadSetup(
                "tp",
                f"{self.model.name} has {weights:.0f} GB of weights{part}, {self.gpus} x {self.gpu.name} have"
                f" {memory:.0f} GB",
            )
        return count

    @property
    def weight_bytes(self) -> float:
        """Bytes of the weights that a worker has."""
        return self.model.weight_bytes - self.model.expert_bytes * (1 - 1 / self.dp)


def _by_window(model: ModelShape) -> tuple[list[LayerGroup], list[LayerGroup]]:
    """Return the layers that keep all tokens, and those with a window."""
    with_tokens = [group for group in model.groups if group.token_elements]
    return [each for each in with_tokens if each.window is None], [each for each in with_tokens if each.window]
