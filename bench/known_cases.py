"""Settings of published papers, each with the paper's finding: whether disaggregation gains.

DistServe (OSDI 24, table 1): OPT on A100, ShareGPT (chat) and LongBench (summaries), its SLOs; for chat the TPs and
GPUs of its artifact (LLMServe/DistServe, evaluation/), and the step times that its authors measured of their engine and
of vLLM of early 2024 (there, simdistserve/estimators/profile_data; KV moves by NVLink).

Splitwise (ISCA 24): Llama 2 70B on machines of 8 GPUs, the lengths of Azure's coding and conversation services, p90
SLOs of 3 x the TTFT and 1.5 x the TBT of a request alone on a machine of 8 A100; prefill on H100, decode on A100 there.

Lengths are lognormal with the papers' means, not their traces; ShareGPT's are those of `chat`.
"""

import dataclasses
import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from bench.support.traces import CONVERSATION, TICK_S
from engine.backends.sim.timing import StepTiming
from simulator.calibration import Calibration
from simulator.comparison.replay import Setup
from simulator.comparison.results import Slo
from simulator.gpus import GPUS
from simulator.models.model_shape import DEFAULT_CONFIG, ModelShape, open_shape, shape_of
from simulator.plan.check import requests_of
from simulator.plan.load import Load
from simulator.request import TraceRequest
from simulator.traces.reading import Trace, Window

WHOLE = 8192
"""Prompt tokens of a step, more than any prompt has."""
OPT = {"model_type": "opt", "vocab_size": 50272, "torch_dtype": "float16"}


def opt(name: str, layers: int, heads: int, hidden: int) -> ModelShape:
    sizes = {"num_hidden_layers": layers, "num_attention_heads": heads, "ffn_dim": 4 * hidden}
    return shape_of(name, OPT | sizes | {"hidden_size": hidden})


LLAMA = open_shape(None)
LLAMA_70B = shape_of(
    "Llama 2 70B",
    DEFAULT_CONFIG
    | {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64}
    | {"vocab_size": 32000},
)
OPT_13B, OPT_66B = opt("OPT 13B", 40, 40, 5120), opt("OPT 66B", 64, 72, 9216)
A100, H100, A10 = GPUS["A100"], GPUS["H100"], GPUS["A10"]
CHAT = Load(1, 755, 200, variation=0.7)
"""Lengths of `chat`, for the formulas."""


@dataclass(frozen=True)
class Case:
    """Setting with the paper's finding."""

    name: str
    setup: Setup
    """Setup of the split clusters, and of the aggregated one unless `own` is set."""
    load: Load
    """Load whose rate is searched, unless `fixed`."""
    together: int
    """Workers of the aggregated cluster."""
    splits: tuple[tuple[int, int], ...]
    gains: bool | None
    """Whether the paper finds a gain over `gains_over`; where it finds none, also over chunks. None: no finding."""
    count: int = 400
    """Smallest number of requests; more where streams last long."""
    fixed: bool = False
    requests: Callable[[Load, int], Iterator[TraceRequest]] = requests_of
    own: Setup | None = None
    """Setup of the aggregated cluster."""
    gains_over: str = "whole prompts"
    """Baseline of the gain: "chunks" where no paper's baseline is meant."""


def chat(load: Load, count: int) -> Iterator[TraceRequest]:
    """Yield conversations as DistServe's artifact cuts ShareGPT (0-prepare-dataset.py).

    The first messages of a conversation are a prompt and the next message its output, together less than 2,048 tokens.
    Numbers and lengths of messages give means of 755 prompt tokens and 200 output tokens, as in the paper; `load` has
    the rate.
    """
    rng, at_s = random.Random(0), 0.0
    sigma = math.sqrt(math.log(2))

    def message() -> int:
        return max(1, round(220 * math.exp(sigma * rng.gauss(0, 1) - sigma**2 / 2)))

    for number in range(count):
        at_s += rng.expovariate(load.rate)
        prompt = output = 2048
        while prompt + output >= 2048:
            prompt, output = sum(message() for _ in range(rng.randint(1, 7))), message()
        yield TraceRequest(number, at_s, prompt, output, (), 64)


def agents(load: Load, count: int) -> Iterator[TraceRequest]:
    """Yield coding agents: 60 sessions, each turn 1,024 tokens longer than the last, from 6,144 to 22,528, then anew.

    All sessions together are as large as the KV pools of two H100.
    """
    rng, at_s = random.Random(0), 0.0
    sessions = [(place, rng.randrange(6, 22)) for place in range(60)]
    for number in range(count):
        at_s += rng.expovariate(load.rate)
        place = rng.randrange(len(sessions))
        name, size = sessions[place]
        hash_ids = tuple(name * 64 + block for block in range(size))
        yield TraceRequest(number, at_s, 1024 * size, round(load.output), hash_ids, 1024)
        sessions[place] = (name, size + 1) if size < 22 else (name + len(sessions), 6)


def mooncake(load: Load, count: int) -> Iterator[TraceRequest]:
    """Yield the first requests of Mooncake's chat trace at 0.7 of their rate; `load` only states that rate."""
    return iter(Trace(CONVERSATION, Window(rate=0.7, most=count, spread_s=TICK_S)))


def steps(prefill_ms: tuple[float, float, float], decode_ms: tuple[float, float, float]) -> StepTiming:
    """Return an engine's step times from milliseconds.

    Prefill is (constant, by token, by token squared); decode is (constant, by token of context, by stream), for fewer
    than 95 streams. Decode's constant serves both, as they are nearly equal.
    """
    constant, context, stream = (value / 1000 for value in decode_ms)
    _, token, squared = (value / 1000 for value in prefill_ms)
    return StepTiming(constant, token, 2 * squared, stream, context)


DISTSERVE_13B = steps((18.10, 0.1019, 7.12e-6), (19.93, 6.27e-4, 0.0385))
DISTSERVE_13B_TP2 = steps((14.74, 0.0686, 2.45e-6), (13.29, 3.41e-4, 0.0630))
DISTSERVE_66B_TP4 = steps((29.44, 0.1514, 8.32e-6), (30.76, 4.52e-4, 0.0633))
VLLM_13B = steps((22.05, 0.1405, 8.08e-6), (23.48, 5.93e-4, 0.0607))
VLLM_66B_TP4 = steps((42.97, 0.2129, 4.60e-5), (39.58, 6.95e-4, 0.1358))


def measured(setup: Setup, kv_tokens: int, decode: StepTiming, prefill: StepTiming | None = None) -> Setup:
    """Return the setup with these step times and a decode pool of `kv_tokens`.

    The artifact's max_num_tokens.csv gives the pool's size.
    """
    calibration = Calibration(
        decode=decode,
        prefill=prefill,
        nic_bytes_per_s=300e9,
        read_latency_s=setup.message_s,
        message_s=setup.message_s,
        event_lag_s=setup.event_lag_s,
        block_tokens=setup.block_tokens,
        block_bytes=setup.block_tokens * setup.model.kv_bytes_per_token,
        num_blocks=kv_tokens // setup.block_tokens,
        prefill_chunk=WHOLE,
        decode_chunk=setup.decode_chunk,
    )
    return dataclasses.replace(setup, calibration=calibration)


def with_whole_prompts(setup: Setup) -> Setup:
    """Return the setup with whole prompts in a decode worker's steps."""
    calibration = setup.calibration and setup.calibration.model_copy(update={"decode_chunk": WHOLE})
    return dataclasses.replace(setup, decode_chunk=WHOLE, calibration=calibration)


CHAT_13B = Setup(OPT_13B, A100, gpus=1, slo=Slo(0.25, 0.1))
CHAT_13B_APART = dataclasses.replace(CHAT_13B, gpus=2, tp=2, decode_tp=1)
CHAT_66B = Setup(OPT_66B, A100, gpus=4, tp=4, slo=Slo(0.4, 0.1))
KV_13B, KV_66B_TP4 = 66_144, 78_512

CASES = (
    Case(
        "DistServe, summaries: OPT 66B, 15 s, 150 ms",
        Setup(OPT_66B, A100, gpus=4, tp=4, slo=Slo(15, 0.15)),
        Load(1, 1700, 90),
        together=4,
        splits=((2, 2), (3, 1)),
        gains=True,
    ),
    Case(
        "DistServe, summaries, a stricter SLO: 15 s, 60 ms",
        Setup(OPT_66B, A100, gpus=4, tp=4, slo=Slo(15, 0.06)),
        Load(1, 1700, 90),
        together=4,
        splits=((2, 2), (3, 1)),
        gains=True,
    ),
    Case(
        "DistServe, chat: OPT 13B, 0.25 s, 100 ms",
        CHAT_13B_APART,
        CHAT,
        together=1,
        splits=((1, 1),),
        gains=True,
        requests=chat,
        own=CHAT_13B,
    ),
    Case(
        "DistServe, chat: OPT 13B, measured steps, against vLLM's",
        measured(CHAT_13B_APART, KV_13B, DISTSERVE_13B, DISTSERVE_13B_TP2),
        CHAT,
        together=1,
        splits=((1, 1),),
        gains=True,
        requests=chat,
        own=measured(CHAT_13B, KV_13B, VLLM_13B),
    ),
    Case(
        "DistServe, chat: OPT 13B, measured steps, against its own",
        measured(CHAT_13B_APART, KV_13B, DISTSERVE_13B, DISTSERVE_13B_TP2),
        CHAT,
        together=1,
        splits=((1, 1),),
        gains=None,
        requests=chat,
        own=measured(CHAT_13B, KV_13B, DISTSERVE_13B),
    ),
    Case(
        "DistServe, chat: OPT 66B, measured steps, against vLLM's",
        measured(CHAT_66B, KV_66B_TP4, DISTSERVE_66B_TP4, DISTSERVE_66B_TP4),
        CHAT,
        together=1,
        splits=((1, 1),),
        gains=True,
        requests=chat,
        own=measured(CHAT_66B, KV_66B_TP4, VLLM_66B_TP4),
    ),
    Case(
        "DistServe, chat: OPT 66B, measured steps, against its own",
        measured(CHAT_66B, KV_66B_TP4, DISTSERVE_66B_TP4, DISTSERVE_66B_TP4),
        CHAT,
        together=1,
        splits=((1, 1),),
        gains=None,
        requests=chat,
    ),
    Case(
        "DistServe, chat, a stricter SLO: OPT 66B, 1 s, 60 ms",
        Setup(OPT_66B, A100, gpus=4, tp=4, slo=Slo(1.0, 0.06)),
        Load(1, 300, 200, variation=0.8),
        together=4,
        splits=((2, 2),),
        gains=True,
    ),
    Case(
        "Splitwise, coding: Llama 2 70B, per USD",
        Setup(LLAMA_70B, H100, gpus=8, tp=8, decode_gpu=A100, slo=Slo(0.9, 0.026)),
        Load(1, 2048, 28, variation=0.8),
        together=4,
        splits=((3, 1), (4, 1)),
        gains=True,
    ),
    Case(
        "Splitwise, conversation: Llama 2 70B, per USD",
        Setup(LLAMA_70B, H100, gpus=8, tp=8, decode_gpu=A100, slo=Slo(0.54, 0.026)),
        Load(1, 1155, 211, variation=0.8),
        together=4,
        splits=((2, 1), (3, 2)),
        gains=True,
    ),
    Case(
        "long prompts, strict ITL: Llama 3.1 8B, 1 s, 12 ms",
        Setup(LLAMA, H100, gpus=4, slo=Slo(1.0, 0.012)),
        Load(1, 3000, 200),
        together=4,
        splits=((2, 2),),
        gains=True,
    ),
    Case(
        "Mooncake's chat, strict ITL: Llama 3.1 8B on 8 A100, 8 s, 22 ms",
        Setup(LLAMA, A100, gpus=8, slo=Slo(8, 0.022)),
        Load(1.99, 14_276, 365),
        together=8,
        splits=((5, 3), (4, 4)),
        gains=True,
        fixed=True,
        requests=mooncake,
        gains_over="chunks",
    ),
    Case(
        "short prompts: Llama 3.1 8B, 1 s, 100 ms",
        Setup(LLAMA, A10, gpus=3, slo=Slo(1.0, 0.1)),
        Load(1, 100, 150),
        together=3,
        splits=((1, 2), (2, 1)),
        gains=False,
    ),
    Case(
        "low load: one request/s of 1,000 + 200 tokens",
        Setup(LLAMA, H100, gpus=1, slo=Slo(1.0, 0.05)),
        Load(1, 1000, 200),
        together=1,
        splits=((1, 1),),
        gains=False,
        fixed=True,
    ),
    Case(
        "coding agents, KV pools full: 95 % of a prompt seen before",
        Setup(LLAMA, H100, gpus=2, slo=Slo(1.0, 0.04)),
        Load(2.5, 14_000, 200, hit_rate=0.9, variation=0.0),
        together=2,
        splits=((1, 1),),
        gains=False,
        count=400,
        fixed=True,
        requests=agents,
    ),
)
