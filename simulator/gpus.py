"""GPUs by name: public figures, and how long a model's step takes by them.

    name   bf16 TFLOP/s, dense   HBM TB/s   HBM GB   NIC GB/s   source of the first three
    B200   2250                  8.0        180      50         NVIDIA DGX B200 datasheet, 1/8 of it
    H200    989                  4.8        141      50         nvidia.com/en-us/data-center/h200 (SXM)
    H100    989                  3.35        80      50         nvidia.com/en-us/data-center/h100 (SXM)
    A100    312                  2.039       80      25         NVIDIA A100 datasheet (SXM, 80 GB)
    L40S    362                  0.864       48      12.5       nvidia.com/en-us/data-center/l40s
    A10     125                  0.6         24      12.5       NVIDIA A10 datasheet
    L4      121                  0.3         24      12.5       nvidia.com/en-us/data-center/l4

Where NVIDIA states a figure with sparsity (H100 and H200 1979, L4 242), this is half of it. All of them were compared
with what others copied from those pages (stas00/ml-engineering, the accelerator tables; MLPerf's system descriptions;
product pages of vendors). B200 has 192 GB of which servers offer 180.

NICs are what servers usually give each GPU: 400, 200 and 100 Gbit/s. Prices are round figures of what clouds ask per
GPU and hour on demand in 2025; they differ by a factor of two between clouds, so bring your own (`--price`).

No GPU reaches its figures: `COMPUTE` of the FLOP/s and `MEMORY` of the bandwidth are what well-tuned engines get of
them on large prompts and large batches (MFU of 40 to 60 % and 70 to 85 % of the bandwidth are what is published).
"""

from dataclasses import dataclass, field

from engine.backends.sim.timing import StepWork
from simulator.errors import BadSetup, shown
from simulator.model_shape import ModelShape

COMPUTE = 0.5
MEMORY = 0.75
STEP_S = 0.002
"""What a step takes whatever it computes: launching it, sampling, the engine's own work."""
TP_EFFICIENCY = 0.9
"""Of each further doubling of the GPUs that hold one model: they wait for each other twice a layer."""
USABLE_MEMORY = 0.9


@dataclass(frozen=True, slots=True)
class Gpu:
    """One accelerator."""

    name: str
    flops: float
    """bf16, dense, per second."""
    bytes_per_s: float
    """Of its memory."""
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
    """Raises BadSetup."""
    try:
        return GPUS[name.upper()]
    except KeyError:
        raise BadSetup("gpu", f"{shown(name)} is not known; known are {', '.join(GPUS)}") from None


@dataclass(frozen=True, slots=True)
class Roofline:
    """Steps of one model on `tp` equal GPUs: as long as the arithmetic takes or as the memory does, whichever is more,
    and `step_s`.

    Arithmetic is that of all tokens and of attention over what is before them. Memory is read once for the weights and
    once for the KV of each sequence that decodes; what a prompt reads of its own KV hides behind its arithmetic.
    """

    model: ModelShape
    gpu: Gpu
    tp: int = 1
    compute: float = COMPUTE
    memory: float = MEMORY
    step_s: float = STEP_S
    _token_s: float = field(init=False, repr=False)
    _pair_s: float = field(init=False, repr=False)
    _byte_s: float = field(init=False, repr=False)
    _context_s: float = field(init=False, repr=False)

    def __post_init__(self) -> None:
        """Seconds for each token, pair, byte of weights and token of context: asked for at every step."""
        gpus = self.effective_gpus
        flop_s = 1 / (self.gpu.flops * self.compute * gpus)
        byte_s = 1 / (self.gpu.bytes_per_s * self.memory * gpus)
        object.__setattr__(self, "_token_s", 2 * self.model.active_params * flop_s)
        object.__setattr__(self, "_pair_s", self.model.attention_flops_per_pair * flop_s)
        object.__setattr__(self, "_byte_s", byte_s)
        object.__setattr__(self, "_context_s", self.model.kv_bytes_per_token * byte_s)

    @property
    def effective_gpus(self) -> float:
        """What `tp` of them come to."""
        return self.tp * TP_EFFICIENCY ** (self.tp.bit_length() - 1)

    def seconds_of(self, work: StepWork) -> float:
        tokens, context = work.prompt_tokens + work.streams, work.context_tokens
        compute_s = self._token_s * tokens + self._pair_s * (work.prompt_pairs + context)
        memory_s = self._byte_s * self.model.weight_bytes_read(tokens) + self._context_s * context
        return self.step_s + (compute_s if compute_s > memory_s else memory_s)

    def num_blocks(self, block_tokens: int) -> int:
        """Of KV, in what the weights leave. Raises BadSetup."""
        left = self.gpu.memory_bytes * self.tp * USABLE_MEMORY - self.model.weight_bytes
        count = int(left // (self.model.kv_bytes_per_token * block_tokens))
        if count < 1:
            weights, memory = self.model.weight_bytes / 1e9, self.gpu.memory_bytes * self.tp / 1e9
            raise BadSetup(
                "tp", f"{self.model.name} has {weights:.0f} GB of weights, {self.tp} x {self.gpu.name} {memory:.0f} GB"
            )
        return count
