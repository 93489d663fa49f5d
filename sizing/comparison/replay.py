"""Replay of a trace through several clusters of the same GPUs, which differ in roles, sizes and policy."""

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Literal

from cluster.roles import Role
from engine.backends.sim.settings import StepTiming, StepWork
from engine.core.loan_host import EngineLimits
from engine.core_types import StepBudget
from engine.settings import BATCH_TOKENS_ON_CPU
from kvcache.layout import KvLayout
from router.admission.config import AdmissionConfig
from router.config import RouterConfig
from router.placement.rates import Priors
from sizing.calibration import Calibration
from sizing.cluster.autoscale import Autoscale, Autoscaler, Sizes
from sizing.cluster.cluster import START_S, ClusterSpec, Failure, FleetMaker, SimCluster, plain_fleet
from sizing.cluster.runner import UNLIMITED_CONTEXT
from sizing.cluster.store import StoreSpec
from sizing.cluster.worker import WorkerSpec
from sizing.comparison.policies import AlwaysLend, LeastLoaded, PrefixHash, RoundRobin
from sizing.gpus import SEQUENCE_TOKENS, Gpu, Roofline
from sizing.models.model_shape import ModelShape
from workloads.request import BadSetup, Outcome, TraceRequest, check_above_0, shown
from workloads.results import ResultCounter, Results, Slo

Mode = Literal["aggregated", "disaggregated", "conditional"]
Policy = Literal["ours", "round-robin", "least-loaded", "prefix-hash"]
MODES: tuple[Mode, ...] = ("aggregated", "disaggregated", "conditional")
POLICIES: tuple[Policy, ...] = ("ours", "round-robin", "least-loaded", "prefix-hash")
MAX_BATCH_TOKENS = 8192
LEAST_S = 1e-6
"""Smallest assumed duration in seconds."""
DEFAULT_SLO = Slo(1.0, 0.05)
_OPTIONS = {"num_routers": "routers", "event_lag_s": "lag"}
"""Names of the options on the command line."""


@dataclass(frozen=True, slots=True)
class Setup:
    """Settings common to all runs of a comparison."""

    model: ModelShape
    gpu: Gpu
    gpus: int
    tp: int = 1
    """Tensor-parallel GPUs of one worker, or of each of its stages."""
    pp: int = 1
    """Pipeline stages of every worker."""
    dp: int = 1
    """Workers of a group that share out the experts and step together."""
    decode_gpu: Gpu | None = None
    """GPU of decode workers beside prefill workers; default: as the others."""
    decode_tp: int | None = None
    """Tensor-parallel GPUs of such a decode worker."""
    slo: Slo = DEFAULT_SLO
    usd_per_gpu_hour: float | None = None
    """Price; default: the table's."""
    block_tokens: int = 64
    sequence_tokens: float = SEQUENCE_TOKENS
    """Mean tokens of a sequence; windows and states are shared out over them."""
    prefill_chunk: int = 4096
    """Prompt tokens of a prefill worker's step."""
    decode_chunk: int = 512
    """Prompt tokens of a decode worker's step, for which its running streams wait."""
    calibration: Calibration | None = None
    """Calibration of a live cluster, which replaces `gpu` and `model`: its workers, blocks, chunks, messages, lag, and
    learned speeds."""
    calibration_name: str = ""
    """Origin of the calibration."""
    num_routers: int = 1
    message_s: float = 0.0005
    event_lag_s: float = 0.01
    learn_rates: bool = True
    admission: AdmissionConfig = field(default_factory=AdmissionConfig)
    """Admission settings of every router."""
    failures: tuple[Failure, ...] = ()
    store: StoreSpec | None = None
    """Store that all workers share."""
    skip: bool = True
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("gpus", "tp", "pp", "dp", "block_tokens", "prefill_chunk", "decode_chunk", "num_routers"):
            if getattr(self, name) < 1:
                raise BadSetup(_OPTIONS.get(name, name), f"{getattr(self, name)} is not at least 1")
        for name in ("message_s", "event_lag_s"):
            if not 0 <= (value := getattr(self, name)) < math.inf:
                raise BadSetup(_OPTIONS.get(name, name), f"{1e3 * value:g} ms is not a number from 0")
        check_above_0("price", self.usd_per_gpu_hour, or_0=True)
        if self.decode_tp is not None and self.decode_tp < 1:
            raise BadSetup("decode_tp", f"{self.decode_tp} is not at least 1")
        for name in ("tp", "decode_tp"):
            if self.calibration is None and self.model.heads % (tp := getattr(self, name) or 1):
                raise BadSetup(name, f"{tp} does not divide the {self.model.heads} heads of {self.model.name}")
        if self.pp > self.model.layers:
            raise BadSetup("pp", f"{self.pp} is above the {self.model.layers} layers of {self.model.name}")
        if self.dp > 1 and not self.model.experts:
            raise BadSetup("dp", f"{self.model.name} has no experts to share out: more workers do the same")
        if self.dp > 1 and self.model.experts % self.dp:
            raise BadSetup("dp", f"{self.dp} does not divide the {self.model.experts} experts of {self.model.name}")
        if self.gpus % (self.tp * self.pp * self.dp):
            what = f"groups of {self.dp} workers" if self.dp > 1 else "workers"
            name = "dp" if self.dp > 1 else "pp" if self.pp > 1 else "tp"
            raise BadSetup(name, f"{self.gpus} GPUs cannot be divided into {what} of {self.tp * self.pp}")

    @property
    def workers(self) -> int:
        return self.gpus // (self.tp * self.pp)

    @property
    def beyond_tp(self) -> str:
        """Stages and workers of a group, for display behind the TP; empty for one."""
        return (f", PP {self.pp}" if self.pp > 1 else "") + (f", DP {self.dp}" if self.dp > 1 else "")

    @property
    def hardware_name(self) -> str:
        """Name of the hardware, for display."""
        if self.calibration is not None:
            whence = f" of {self.calibration_name}" if self.calibration_name else ""
            return f"{self.workers} workers as those{whence or ' of a live cluster'}"
        return f"{self.model.name} on {self.gpus} x {self.gpu.name}"

    @property
    def priced(self) -> bool:
        """Whether a GPU's price is known: from the table or an option; a calibration has none."""
        return self.calibration is None or self.usd_per_gpu_hour is not None

    @property
    def price(self) -> float:
        return self.price_of(self.gpu)

    def hardware(self, role: Role, apart: bool) -> tuple[Gpu, int]:
        """Return the GPU of a worker and their number; `apart`: there are prefill workers."""
        roofline = roofline_of(self, role, apart)
        return roofline.gpu, roofline.gpus

    def price_of(self, gpu: Gpu) -> float:
        """Return USD per hour."""
        return gpu.usd_per_hour if self.usd_per_gpu_hour is None else self.usd_per_gpu_hour


@dataclass(frozen=True, slots=True)
class Scenario:
    """One run of a comparison."""

    mode: Mode
    prefill: int
    decode: int
    policy: Policy = "ours"
    autoscale: Autoscale | None = None
    """Planner; `prefill` and `decode` are then the initial sizes."""

    @property
    def name(self) -> str:
        shape = f"{self.decode}" if not self.prefill else f"{self.prefill}P:{self.decode}D"
        words = [self.mode, shape, *([] if self.policy == "ours" else [self.policy])]
        return " ".join([*words, *(["autoscaled"] if self.autoscale else [])])

    @property
    def apart(self) -> bool:
        """Whether there are prefill workers."""
        return self.prefill > 0

    @property
    def workers(self) -> list[tuple[str, Role]]:
        """Return id and role of each worker."""
        counts: tuple[tuple[Role, int], ...] = (("prefill", self.prefill), ("decode", self.decode))
        return [(f"{role}-{number:04}", role) for role, count in counts for number in range(count)]


def scenarios(
    setup: Setup,
    modes: Iterable[Mode] = MODES,
    policies: Iterable[Policy] = ("ours",),
    splits: Iterable[tuple[int, int]] = (),
) -> list[Scenario]:
    """Return the scenarios to compare.

    Raises BadSetup.

    By default a quarter, half and three quarters of the workers prefill.
    """
    wanted = list(splits)
    for prefill, decode in wanted:
        if prefill < 1 or decode < 1 or prefill + decode != setup.workers:
            raise BadSetup(
                "split",
                f"{prefill}:{decode} must add up to the {setup.workers} workers, with at least 1 on each side",
            )
    if any(count % setup.dp for pair in wanted for count in pair):
        raise BadSetup("split", f"workers come in groups of {setup.dp}, and a group has one role")
    if not wanted:
        groups = setup.workers // setup.dp
        quarters = (max(1, min(groups - 1, round(groups * part / 4))) for part in (1, 2, 3))
        wanted = [
            (prefill * setup.dp, (groups - prefill) * setup.dp) for prefill in dict.fromkeys(quarters) if groups > 1
        ]
    chosen: list[Scenario] = []
    for mode in modes:
        for policy in policies:
            if mode == "aggregated":
                chosen.append(Scenario(mode, 0, setup.workers, policy))
            elif mode == "disaggregated" or policy == "ours":  # only the real placement decides for each request
                chosen += [Scenario(mode, prefill, decode, policy) for prefill, decode in wanted]
    if not chosen:
        raise BadSetup("modes", "nothing is left to compare")
    names = {name for scenario in chosen for name, _ in scenario.workers}
    for failure in setup.failures:
        if failure.worker_id not in names or not 0 <= failure.at_s < math.inf:
            workers = sorted(names)
            known = ", ".join(workers if len(workers) <= 8 else [*workers[:4], "...", *workers[-4:]])
            raise BadSetup("kill", f"no worker {shown(failure.worker_id)} at {failure.at_s:g} s; known are {known}")
    killed = [failure.worker_id for failure in setup.failures]
    if twice := next((name for name in killed if killed.count(name) > 1), None):
        raise BadSetup("kill", f"{twice} is named twice, but can be killed once")
    return chosen


@dataclass(slots=True)
class Run:
    """A scenario and its results."""

    scenario: Scenario
    results: Results
    reasons: dict[str, int] = field(default_factory=dict)
    """Reasons of refusals and failures, with counts."""
    busy: dict[str, float] = field(default_factory=dict)
    """Mean share of time in steps, by role, of the workers there at the end."""
    sizes: list[Sizes] = field(default_factory=list)
    """Sizes of an autoscaled cluster over time."""


def replay(
    setup: Setup,
    scenario: Scenario,
    trace: Iterable[TraceRequest],
    on_progress: Callable[[float], object] = lambda _: None,
    on_end: Callable[[Outcome], object] = lambda _: None,
    make_fleet: FleetMaker | None = None,
) -> Run:
    """Run a scenario.

    `on_progress` receives the trace's time, `on_end` each request's outcome.
    """
    tally = ResultCounter(setup.slo, START_S)

    def ended(outcome: Outcome) -> None:
        tally.add(outcome)
        on_end(outcome)

    cluster = SimCluster(cluster_spec(setup, scenario, make_fleet), ended)
    scaler = None
    if scenario.autoscale is not None:
        scaler = Autoscaler(cluster, scenario.autoscale, lambda role: spec_of(setup, role, scenario.apart))
        scaler.begin()
    cluster.run(trace, on_progress)
    gpu_seconds, usd = paid(setup, scenario, cluster, START_S + tally.duration_s)
    while_they_came, _ = paid(setup, scenario, cluster, START_S + tally.arrivals_s)
    results = tally.results(cluster.fronts.gaps, gpu_seconds, usd, while_they_came)
    busy: dict[str, float] = {}
    for role in ("prefill", "decode"):
        workers = [worker for worker in cluster.workers.values() if worker.spec.role == role]
        if workers and results.duration_s:
            busy[role] = sum(worker.busy_s for worker in workers) / len(workers) / results.duration_s
    return Run(scenario, results, tally.reasons, busy, scaler.sizes if scaler else [])


def paid(setup: Setup, scenario: Scenario, cluster: SimCluster, until: float) -> tuple[float, float]:
    """Return the GPU-seconds of all workers since the trace's beginning, and their price in USD."""
    gpu_seconds = usd = 0.0
    for rental in cluster.hires.values():
        ended_at = until if rental.ended_at is None else min(until, rental.ended_at)
        gpu, count = setup.hardware(rental.spec.role, scenario.apart)
        seconds = count * max(0.0, ended_at - max(START_S, rental.began_at))
        gpu_seconds += seconds
        usd += seconds * setup.price_of(gpu) / 3600
    return gpu_seconds, usd


def bill(setup: Setup, scenario: Scenario) -> tuple[int, float]:
    """Return the GPUs of the whole cluster, and USD per hour."""
    gpus, usd_per_hour = 0, 0.0
    for _, role in scenario.workers:
        gpu, count = setup.hardware(role, scenario.apart)
        gpus += count
        usd_per_hour += count * setup.price_of(gpu)
    return gpus, usd_per_hour


def cluster_spec(setup: Setup, scenario: Scenario, make_fleet: FleetMaker | None = None) -> ClusterSpec:
    """Return the specification.

    Raises BadSetup for a model that does not fit.
    """
    measured = setup.calibration
    names = {name for name, _ in scenario.workers}
    specs = {role: spec_of(setup, role, scenario.apart) for role in dict(scenario.workers).values()}
    workers = tuple((name, specs[role]) for name, role in scenario.workers)
    if measured is None:
        priors = priors_of(setup, scenario.apart)
        message_s, event_lag_s = setup.message_s, setup.event_lag_s
    else:
        priors = learnt_by(measured)
        message_s, event_lag_s = measured.message_s, measured.event_lag_s
    return ClusterSpec(
        workers=workers,
        priors=priors,
        num_routers=setup.num_routers,
        message_s=message_s,
        event_lag_s=event_lag_s,
        learn_rates=setup.learn_rates,
        admission=setup.admission,
        make_fleet=make_fleet or _fleet_of(scenario),
        failures=tuple(failure for failure in _with_groups(setup) if failure.worker_id in names),
        skip=setup.skip,
        seed=setup.seed,
        store=setup.store,
    )


def _with_groups(setup: Setup) -> Iterator[Failure]:
    """Yield the failures, each of them that of all workers of a group."""
    for failure in setup.failures:
        role, _, number = failure.worker_id.rpartition("-")
        first = int(number) // setup.dp * setup.dp
        for each in range(first, first + setup.dp):
            yield dataclasses.replace(failure, worker_id=f"{role}-{each:04}")


def roofline_of(setup: Setup, role: Role, apart: bool) -> Roofline:
    """Return a worker's roofline; `apart`: there are prefill workers."""
    gpu, tp = setup.gpu, setup.tp
    if role == "decode" and apart:
        gpu, tp = setup.decode_gpu or gpu, setup.decode_tp or tp
    return Roofline(setup.model, gpu, tp, setup.pp, setup.dp)


def priors_of(setup: Setup, apart: bool) -> Priors:
    """Return the speeds that an operator who knows the GPUs would set in the router."""
    prefill, decode = (roofline_of(setup, role, apart) for role in ("prefill", "decode"))
    return Priors(
        prefill_tokens_per_s=_tokens_per_s(prefill, setup.prefill_chunk),
        decode_prefill_tokens_per_s=_tokens_per_s(decode, setup.decode_chunk),
        kv_bytes_per_s=min(nic_bytes_per_s(prefill), nic_bytes_per_s(decode)),
        loan_overhead_s=0.003,
        step_s=decode.seconds_of(StepWork(streams=1, context_tokens=1)),
        stream_delay_s=max(LEAST_S, decode.seconds_of(StepWork(streams=64, context_tokens=64 * 2048)) / 64 * 0.1),
    )


def learnt_by(measured: Calibration) -> Priors:
    """Return the speeds that the routers of the calibrated cluster have learned.

    They saw the same receipts, and keep their defaults for what they did not see. A loan's overhead includes the
    difference between a lender's step and others, since there is one figure for both.
    """
    decode, prefill = measured.decode, measured.prefill or measured.decode
    defaults = RouterConfig.model_construct().priors()
    return dataclasses.replace(
        defaults,
        prefill_tokens_per_s=_tokens_per_s(prefill, measured.prefill_chunk),
        decode_prefill_tokens_per_s=(
            _tokens_per_s(decode, measured.decode_chunk)
            if measured.decode_prompts
            else defaults.decode_prefill_tokens_per_s
        ),
        kv_bytes_per_s=measured.nic_bytes_per_s,
        loan_overhead_s=defaults.loan_overhead_s + max(0.0, prefill.step_s - decode.step_s),
        step_s=max(decode.step_s, LEAST_S),
        stream_delay_s=max(decode.stream_s, LEAST_S),
    )


def _tokens_per_s(timing: Roofline | StepTiming, chunk: int) -> float:
    """Return prompt tokens per second in chunks of this size, beside the fixed time of steps."""
    spent_s = timing.seconds_of(StepWork(chunk, chunk * (chunk + 1) // 2)) - timing.step_s
    return chunk / max(spent_s, LEAST_S)


def nic_bytes_per_s(roofline: Roofline) -> float:
    """Return a worker's NIC bandwidth: each of its GPUs has a NIC."""
    return roofline.gpu.nic_bytes_per_s * roofline.gpus


def spec_of(setup: Setup, role: Role, apart: bool) -> WorkerSpec:
    """Return a worker's specification; `apart`: there are prefill workers.

    Raises BadSetup for a model that does not fit.
    """
    if setup.calibration is not None:
        return _measured_spec(setup.calibration, role)
    model = setup.model  # all layers and heads as one: a block has as many bytes, and one fingerprint
    width = round(model.mean_token_bytes(setup.sequence_tokens) / (2 * model.kv_dtype_bytes))
    layout = KvLayout(1, 1, max(1, width), setup.block_tokens, model.kv_dtype)
    chunk = setup.prefill_chunk if role == "prefill" else setup.decode_chunk
    roofline = roofline_of(setup, role, apart)
    limits = EngineLimits(StepBudget(max(MAX_BATCH_TOKENS, chunk), chunk))
    num_blocks = roofline.num_blocks(setup.block_tokens, setup.sequence_tokens)
    context = model.max_context_tokens or UNLIMITED_CONTEXT
    return WorkerSpec(role, layout, num_blocks, roofline, limits, nic_bytes_per_s(roofline), max_context_tokens=context)


def _measured_spec(measured: Calibration, role: Role) -> WorkerSpec:
    chunk = measured.chunk(role)
    limits = EngineLimits(StepBudget(max(BATCH_TOKENS_ON_CPU, chunk), chunk))
    return WorkerSpec(
        role,
        measured.layout(),
        measured.num_blocks,
        measured.timing(role),
        limits,
        measured.nic_bytes_per_s,
        measured.read_latency_s,
    )


def _fleet_of(scenario: Scenario) -> FleetMaker:
    match scenario.policy:
        case "round-robin":
            return RoundRobin
        case "least-loaded":
            return LeastLoaded
        case "prefix-hash":
            return PrefixHash
        case "ours":
            return AlwaysLend if scenario.mode == "disaggregated" else plain_fleet
