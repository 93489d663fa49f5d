"""Facts about this host, without judgement.

Findings of the doctor.

Every finding but an "ok" one says what to do.
"""

import json
import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Literal

from engine.config import WorkerConfig
from engine.engine_kind import Environment
from engine.errors import EngineStartError
from kvtransfer.hardware.topology import Host, read_host

PACKAGES = {
    "nixl": ("nixl-cu13", "nixl-cu12"),
    "ucxx": ("ucxx-cu12", "ucxx-cu13"),
    "ucx of ucxx": ("libucx-cu12", "libucx-cu13"),
    "torch": ("torch",),
    "grpc": ("grpcio",),
    "transformers": ("transformers",),
}
"""Distributions by the name used here, any of which will do."""
COMPILERS = ("c++", "g++", "clang++")
SHARED_MEMORY = Path("/dev/shm")
PTRACE_SCOPE = Path("/proc/sys/kernel/yama/ptrace_scope")
ASK_TORCH = (
    "import json, torch\n"
    "gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]\n"
    "print(json.dumps(gpus))"
)
ASK_VERSIONS = (
    "import json, sys, importlib.metadata as m\n"
    "def of(name):\n"
    "    try: return m.version(name)\n"
    "    except m.PackageNotFoundError: return None\n"
    "names = json.loads(sys.argv[1])\n"
    "print(json.dumps({name: next(filter(None, map(of, each)), None) for name, each in names.items()}))"
)
TORCH_TIMEOUT_S = 60.0
KERNELS_TIMEOUT_S = 180.0
"""Longest time for compiling and timing the CPU kernels, in seconds."""


@dataclass(frozen=True, slots=True)
class Machine:
    """Facts about a machine; None: absent or unknown."""

    versions: Mapping[str, str | None]
    memlock_bytes: int | None
    """Limit of pinned memory in bytes; None: unlimited."""
    shared_memory_bytes: int | None
    """Free bytes in /dev/shm."""
    ptrace_scope: int | None
    open_files: int
    compiler: str | None
    torch_gpus: tuple[str, ...] | None
    """GPUs that torch computes on; None without torch."""
    host: Host
    environment: Mapping[str, str | None] | str | None = None
    """Versions in the environment of the engine's process by distribution, or the reason why there is none; None for an
    engine that runs in the worker's environment."""
    environment_fault: str = ""
    """Reason why the engine's version in that environment cannot be used; empty: it can, or nothing is known."""
    extension_faults: Mapping[str, str] = field(default_factory=dict)
    """The same for extensions of the engine's own server, by name."""
    kernels: "KernelSpeed | str | None" = None
    """Speed of the CPU kernels, or the reason why there are none; None where they are not used."""


@dataclass(frozen=True, slots=True)
class KernelSpeed:
    """Measured speed of the CPU kernels, see `engine/backends/torch/native/speed.py`."""

    instructions: str
    threads: int
    gflops: Mapping[str, Mapping[str, float]]
    """GFLOP/s by the number of rows, then by who computes."""


def read_machine(config: WorkerConfig) -> Machine:
    memlock = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    torch_gpus = _torch_gpus()
    packages = {name: (name,) for name in config.kind.installation.packages} | PACKAGES
    needed = config.kind.installation.environment
    environment = None if needed is None else _versions(config, needed)
    is_whole = isinstance(environment, Mapping) and None not in environment.values()
    return Machine(
        versions={name: _version(distributions) for name, distributions in packages.items()},
        memlock_bytes=None if memlock == resource.RLIM_INFINITY else memlock,
        shared_memory_bytes=shutil.disk_usage(SHARED_MEMORY).free if SHARED_MEMORY.is_dir() else None,
        ptrace_scope=_ptrace_scope(),
        open_files=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        compiler=next(filter(None, map(shutil.which, [os.environ.get("CXX") or "", *COMPILERS])), None),
        torch_gpus=torch_gpus,
        host=read_host(),
        environment=environment,
        environment_fault=_fault(config, needed.check) if needed and is_whole else "",
        extension_faults={name: _fault(config, module) for name, module in needed.extensions.items()}
        if needed and is_whole
        else {},
        kernels=_kernels(config.kind.installation.kernels)
        if uses_cpu_kernels(config) and torch_gpus is not None
        else None,
    )


def uses_cpu_kernels(config: WorkerConfig) -> bool:
    """Return whether a worker of this configuration computes with the CPU kernels where these can be compiled."""
    return bool(config.kind.installation.kernels) and config.backend != "sdpa"


def _kernels(module: str) -> KernelSpeed | str:
    """Compile and time the CPU kernels, in a process of their own."""
    command = [sys.executable, "-m", module]
    try:
        process = subprocess.run(command, capture_output=True, text=True, timeout=KERNELS_TIMEOUT_S)
        values = json.loads(process.stdout.splitlines()[-1])
    except subprocess.TimeoutExpired:
        return f"they were not compiled and timed within {KERNELS_TIMEOUT_S:g} s"
    except (OSError, ValueError, IndexError):
        return process.stderr.strip().splitlines()[-1] if process.stderr.strip() else "their process printed nothing"
    return str(values["unavailable"]) if "unavailable" in values else KernelSpeed(**values)


def _versions(config: WorkerConfig, environment: Environment) -> Mapping[str, str | None] | str:
    """Ask the interpreter of the engine's process for the versions there."""
    names = json.dumps({name: list(each) for name, each in environment.distributions.items()})
    try:
        python = config.kind.launch(config).command[0]
        command = [python, "-c", ASK_VERSIONS, names]
        process = subprocess.run(command, capture_output=True, text=True, timeout=TORCH_TIMEOUT_S)
    except (EngineStartError, OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    if process.returncode:
        return f"{python}: {process.stderr.strip().splitlines()[-1]}"
    versions: dict[str, str | None] = json.loads(process.stdout)
    return versions


def _fault(config: WorkerConfig, check: str) -> str:
    """Run a check of the engine's version, by the interpreter of the engine's process."""
    command = [config.kind.launch(config).command[0], "-m", "cluster.launch", check]
    try:
        process = subprocess.run(command, capture_output=True, text=True, timeout=TORCH_TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    return (process.stderr if process.returncode else process.stdout).strip().rpartition("\n")[2]


def _version(distributions: tuple[str, ...]) -> str | None:
    for distribution in distributions:
        try:
            return version(distribution)
        except PackageNotFoundError:
            continue
    return None


def _ptrace_scope() -> int | None:
    try:
        return int(PTRACE_SCOPE.read_text())
    except (OSError, ValueError):
        return None


def _torch_gpus() -> tuple[str, ...] | None:
    """Ask torch in a process of its own: it takes seconds to load, and CUDA keeps what it touched."""
    command = [sys.executable, "-c", ASK_TORCH]
    try:
        output = subprocess.run(command, capture_output=True, text=True, timeout=TORCH_TIMEOUT_S, check=True).stdout
        return tuple(json.loads(output.splitlines()[-1]))
    except (OSError, subprocess.SubprocessError, ValueError, IndexError):
        return None


Level = Literal["ok", "warning", "broken"]


@dataclass(frozen=True, slots=True)
class Finding:
    check: str
    """Name of the check, such as "memlock"."""
    level: Level
    """Level. warning: it works, worse than it could. broken: it does not work."""
    found: str
    advice: str = ""

    def __post_init__(self) -> None:
        assert self.level == "ok" or self.advice, f"{self.check} does not say what to do"


def exit_code(findings: Iterable[Finding]) -> int:
    """Return 0 when nothing is broken, else 1."""
    return int(any(finding.level == "broken" for finding in findings))
