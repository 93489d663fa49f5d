"""Compiles kernels.cpp once per machine, and remembers the library beside the weights' fingerprints."""

import ctypes
import fcntl
import os
import platform
import shutil
import subprocess
from hashlib import blake2b
from pathlib import Path

from engine.errors import KernelsUnavailable
from engine.model_dir import cache_folder

SOURCE = Path(__file__).with_name("kernels.cpp")
FLAGS = ("-O3", "-march=native", "-std=c++20", "-fopenmp", "-fPIC", "-shared", "-fno-math-errno", "-w")
COMPILE_TIMEOUT_S = 120


def load_library() -> ctypes.CDLL:
    """The compiled kernels. Raises KernelsUnavailable with the reason, say that there is no compiler.

    torch must have been imported: the library shares its OpenMP runtime, and with it its threads.
    """
    compiler = _compiler()
    library = cache_folder("kernels") / f"{_identity(compiler)}.so"
    if not library.exists():
        _compile(compiler, library)
    try:
        return ctypes.CDLL(str(library))
    except OSError as error:
        raise KernelsUnavailable(f"{library} cannot be loaded: {error}") from error


def _compiler() -> str:
    wanted = [os.environ["CXX"]] if os.environ.get("CXX") else ["g++", "clang++", "c++"]
    for name in wanted:
        if path := shutil.which(name):
            return path
    raise KernelsUnavailable(f"no C++ compiler: {', '.join(wanted)} not found")


def _identity(compiler: str) -> str:
    """Changes with the source, the compiler and the CPU: `-march=native` makes code for this one only."""
    version = subprocess.run([compiler, "--version"], capture_output=True, check=False).stdout
    digest = blake2b(SOURCE.read_bytes(), digest_size=12)
    for part in (" ".join(FLAGS).encode(), version, _cpu().encode()):
        digest.update(part)
    return digest.hexdigest()


def _cpu() -> str:
    """What the compiler looks at."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    telling = ("model name", "flags", "Features", "cpu family", "model")
    return "\n".join(dict.fromkeys(line for line in lines if line.split("\t")[0].strip() in telling))


def _compile(compiler: str, library: Path) -> None:
    """Into place by a rename; engines that start together wait for the first."""
    library.parent.mkdir(parents=True, exist_ok=True)
    with (library.parent / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if library.exists():
            return
        scratch = library.with_suffix(".partial")
        command = [compiler, *FLAGS, str(SOURCE), "-o", str(scratch)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=COMPILE_TIMEOUT_S, check=False)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise KernelsUnavailable(f"{compiler}: {error}") from error
        if done.returncode:
            raise KernelsUnavailable(f"{compiler} cannot compile {SOURCE.name}: {done.stderr.strip()[:500]}")
        scratch.replace(library)
