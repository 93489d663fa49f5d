"""Checks of a machine against a worker configuration.

Pure.
"""

from collections.abc import Callable, Mapping

from cluster.install import EXTRAS, how_to_install
from engine.config import WorkerConfig
from engine.host.memory import UNMEASURED_KV_BYTES
from kvtransfer.hardware.topology import choices
from kvtransfer.ucx.lanes import GROUPS
from tandem.doctor.machine import Finding, Level, Machine, uses_cpu_kernels

SHARED_MEMORY_PER_WORKER = 64 << 20
OPEN_FILES = 4096
SLOW = 0.8
"""Speed of the CPU kernels beside torch's, below which something is wrong."""
PACKAGES = ("nixl", "ucxx", "torch")
"""Packages of extras that workers may need."""
INSTALL = {
    package: how_to_install(extra) for extra, names in EXTRAS.items() for package in names if package in PACKAGES
}


def check_all(
    machine: Machine, config: WorkerConfig, num_workers: int, environment: Mapping[str, str], alone: bool = True
) -> list[Finding]:
    """Return all findings, the most important first.

    `alone`: no other host takes part.
    """
    checks: list[Callable[[], list[Finding]]] = [
        lambda: check_packages(machine, config),
        lambda: check_environment(machine, config),
        lambda: check_gpus(machine, config),
        lambda: check_rdma(machine, config),
        lambda: check_nics(machine, environment),
        lambda: check_memlock(machine, config),
        lambda: check_shared_memory(machine, num_workers),
        lambda: check_ptrace(machine, config),
        lambda: check_open_files(machine),
        lambda: check_compiler(machine, config),
        lambda: check_kernels(machine, config),
        lambda: [Finding("clock", "ok", "one host has one clock")] * alone,
    ]
    return [finding for check in checks for finding in check()]


def check_packages(machine: Machine, config: WorkerConfig) -> list[Finding]:
    """Check the packages that the configuration needs; list the others."""
    needed = ({config.transport} & INSTALL.keys()) | set(config.kind.installation.packages)
    missing = [name for name in sorted(needed) if machine.versions.get(name) is None]
    versions = ", ".join(f"{name} {number}" for name, number in machine.versions.items() if number is not None)
    findings = [Finding("packages", "ok", versions)]
    for name in missing:
        other = "transport" if name in ("nixl", "ucxx") else "engine"
        advice = f"{INSTALL.get(name, f'pip install {name}')}, or set another {other}"
        findings.append(Finding("packages", "broken", f"{name} is not installed", advice))
    return findings


def check_environment(machine: Machine, config: WorkerConfig) -> list[Finding]:
    """Check the environment of an engine whose process has one of its own."""
    needed, name = config.kind.installation.environment, config.engine
    if needed is None or machine.environment is None:
        return []
    if isinstance(machine.environment, str):
        return [Finding(name, "broken", machine.environment, needed.advice)]
    numbers = machine.environment
    findings = [Finding(name, "ok", ", ".join(f"{each} {number}" for each, number in numbers.items() if number))]
    for each, number in numbers.items():
        if number is None:
            findings.append(Finding(name, "broken", f"{each} is not installed in {needed.name}", needed.advice))
    if machine.environment_fault:
        findings.append(Finding(name, "broken", machine.environment_fault, needed.advice))
    for extension, fault in machine.extension_faults.items():
        advice = f"workers need none; for `vllm serve` with it install a version of {name} that was tried"
        findings.append(
            Finding(extension, "warning", fault, advice) if fault else Finding(extension, "ok", f"{name} can load it")
        )
    return findings


def check_gpus(machine: Machine, config: WorkerConfig) -> list[Finding]:
    """List the GPUs of the machine, and those that torch sees."""
    on_bus, seen = len(machine.host.gpus), machine.torch_gpus or ()
    gpus = f"torch sees {', '.join(seen)}" if seen else "torch sees none"
    if on_bus and not config.kind.may_use_gpu:
        advice = "set engine: vllm to compute on them"
        return [Finding("gpus", "warning", f"the PCI bus has {on_bus}, the {config.engine} engine uses none", advice)]
    if on_bus > len(seen):
        advice = "install the driver and a CUDA build of torch, or widen CUDA_VISIBLE_DEVICES"
        return [Finding("gpus", "warning", f"{gpus}, the PCI bus has {on_bus}", advice)]
    return [Finding("gpus", "ok", gpus)]


def check_rdma(machine: Machine, config: WorkerConfig) -> list[Finding]:
    """Check RDMA devices, their state, and whether they are demanded."""
    rdma = [nic for nic in machine.host.nics if nic.rdma]
    active = [nic for nic in rdma if nic.active]
    demanded = [lane for lane in config.strict_lanes if lane == "rdma" or lane in GROUPS["rdma"]]
    if demanded and not active:
        advice = "bring a device up, or take it out of strict_lanes"
        return [Finding("rdma", "broken", f"strict_lanes demands {', '.join(demanded)}; no RDMA device is up", advice)]
    if not rdma:
        return [Finding("rdma", "ok", "no device; between hosts KV travels over TCP")]
    down = [nic.name for nic in rdma if not nic.active]
    findings = [Finding("rdma", "ok", f"up: {', '.join(f'{nic.name} {nic.rate}'.strip() for nic in active)}")] * bool(
        active
    )
    if down:
        findings.append(
            Finding("rdma", "warning", f"down: {', '.join(down)}", "see ibstat; check cable and switch port")
        )
    return findings


def check_nics(machine: Machine, environment: Mapping[str, str]) -> list[Finding]:
    """List which NIC serves which GPU, and what could not be read."""
    findings = [Finding("nics", "ok", str(choice)) for choice in choices(machine.host)]
    if (chosen := environment.get("UCX_NET_DEVICES")) is not None:
        findings.append(Finding("nics", "ok", f"UCX_NET_DEVICES={chosen}, as set by the user"))
    if machine.host.unread:
        advice = "NICs are left for UCX to choose where this matters; mount /sys if this is a container"
        findings.append(Finding("nics", "warning", f"could not read {'; '.join(machine.host.unread)}", advice))
    return findings


def check_memlock(machine: Machine, config: WorkerConfig) -> list[Finding]:
    """Check the memlock limit: RDMA pins the pool, nothing else does."""
    limit, needed = machine.memlock_bytes, config.kv_bytes or UNMEASURED_KV_BYTES
    limit_text = "unlimited" if limit is None else f"{limit >> 20} MiB"
    if limit is not None and limit < needed and machine.host.active_rdma:
        advice = "ulimit -l unlimited; LimitMEMLOCK=infinity for systemd; for a container --ulimit memlock=-1"
        return [Finding("memlock", "broken", f"{limit_text}, and RDMA pins a KV pool of {needed >> 20} MiB", advice)]
    return [
        Finding(
            "memlock", "ok", limit_text if machine.host.active_rdma else f"{limit_text}; without RDMA nothing is pinned"
        )
    ]


def check_shared_memory(machine: Machine, num_workers: int) -> list[Finding]:
    """Check /dev/shm, where UCX keeps queues."""
    free, needed = machine.shared_memory_bytes, num_workers * SHARED_MEMORY_PER_WORKER
    if free is None or free < needed:
        room = "no /dev/shm" if free is None else f"{free >> 20} MiB free in /dev/shm"
        advice = (
            f"give it {needed >> 20} MiB for {num_workers} workers: docker --shm-size, an emptyDir of medium Memory"
        )
        return [Finding("shared memory", "warning", room, advice)]
    return [Finding("shared memory", "ok", f"{free >> 20} MiB free in /dev/shm")]


def check_ptrace(machine: Machine, config: WorkerConfig) -> list[Finding]:
    """Check ptrace: the kernel allows CMA reads of another process as it allows ptrace.

    Only memory outside files is read by CMA.
    """
    scope = machine.ptrace_scope
    if scope and config.transport == "nixl":
        advice = (
            "sysctl kernel.yama.ptrace_scope=0, or the capability SYS_PTRACE; "
            "else TCP is used where blocks of a decode worker are wanted on the same host"
        )
        return [Finding("ptrace scope", "warning", f"{scope}: no reading of other processes' private memory", advice)]
    return [Finding("ptrace scope", "ok", "not restricted" if not scope else f"{scope}; {config.transport} needs none")]


def check_open_files(machine: Machine) -> list[Finding]:
    if machine.open_files < OPEN_FILES:
        advice = f"ulimit -n {OPEN_FILES}: each stream and each peer takes some"
        return [Finding("open files", "warning", f"at most {machine.open_files}", advice)]
    return [Finding("open files", "ok", f"at most {machine.open_files}")]


def check_compiler(machine: Machine, config: WorkerConfig) -> list[Finding]:
    """Check for a compiler: the native backend is compiled at the first start."""
    if not uses_cpu_kernels(config):
        return []
    if machine.compiler is None:
        level: Level = "broken" if config.backend == "native" else "warning"
        return [
            Finding("compiler", level, "no C++ compiler", "apt install g++; without it a CPU is several times slower")
        ]
    return [Finding("compiler", "ok", machine.compiler)]


def check_kernels(machine: Machine, config: WorkerConfig) -> list[Finding]:
    """Check the CPU kernels: what they compute with, and how fast beside torch."""
    if machine.kernels is None or machine.compiler is None:
        return []
    level: Level = "broken" if config.backend == "native" else "warning"
    if isinstance(machine.kernels, str):
        return [Finding("cpu kernels", level, machine.kernels, "without them a CPU is several times slower")]
    speed = machine.kernels
    of_rows = [
        f"{rows} row{'s' * (rows != '1')}: {', '.join(f'{name} {figure:.0f}' for name, figure in each.items())}"
        for rows, each in speed.gflops.items()
    ]
    speeds = f"{speed.instructions}; {speed.threads} threads; GFLOP/s of a bfloat16 layer, {'; '.join(of_rows)}"
    slower = [rows for rows, each in speed.gflops.items() if each["kernels"] < SLOW * each["torch bfloat16"]]
    if slower:
        advice = "another process may have used the cores; if not, set backend: sdpa and report it"
        return [Finding("cpu kernels", "warning", f"{speeds}: torch is faster", advice)]
    return [Finding("cpu kernels", "ok", speeds)]
