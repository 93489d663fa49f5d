"""Compiles C++ sources once per machine, by the machine's own compiler, and remembers the libraries."""

import ctypes
import fcntl
import os
import platform
import shutil
import subprocess
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

FLAGS = ("-O3", "-march=native", "-std=c++20", "-fPIC", "-shared", "-w")
COMPILE_TIMEOUT_S = 120


class NotCompiled(Exception):
    """There is no compiler, or it cannot do it; says why."""


def cache_folder(kind: str) -> Path:
    """Where things that can be made anew are remembered on this machine."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "tandem" / kind


@dataclass(frozen=True, slots=True)
class Source:
    """What becomes one library. It may include any header of its own folder."""

    path: Path
    flags: tuple[str, ...] = ()


def load_library(source: Path) -> ctypes.CDLL:
    """The compiled `source`. Raises NotCompiled."""
    (library,) = load_libraries([Source(source)])
    return library


def load_libraries(sources: Sequence[Source]) -> list[ctypes.CDLL]:
    """The compiled `sources`, in order; those that are not remembered are compiled at the same time. Raises
    NotCompiled."""
    compiler = _compiler()
    version = subprocess.run([compiler, "--version"], capture_output=True, check=False).stdout
    with ThreadPoolExecutor(len(sources)) as pool:
        return list(pool.map(lambda source: _load(compiler, version, source), sources))


def _load(compiler: str, version: bytes, source: Source) -> ctypes.CDLL:
    flags = (*FLAGS, *source.flags)
    library = cache_folder("kernels") / f"{source.path.stem}-{_identity(version, source.path, flags)}.so"
    if not library.exists():
        _compile([compiler, *flags, str(source.path)], library)
    try:
        return ctypes.CDLL(str(library))
    except OSError as error:
        raise NotCompiled(f"{library} cannot be loaded: {error}") from error


def _compiler() -> str:
    wanted = [os.environ["CXX"]] if os.environ.get("CXX") else ["g++", "clang++", "c++"]
    for name in wanted:
        if path := shutil.which(name):
            return path
    raise NotCompiled(f"no C++ compiler: {', '.join(wanted)} not found")


def _identity(version: bytes, source: Path, flags: Sequence[str]) -> str:
    """Changes with the source, the compiler and the CPU: `-march=native` makes code for this one only."""
    digest = blake2b(digest_size=12)
    for file in (source, *sorted(source.parent.glob("*.h"))):
        digest.update(file.read_bytes())
    for part in (" ".join(flags).encode(), version, _cpu().encode()):
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


def _compile(command: list[str], library: Path) -> None:
    """Into place by a rename; processes that start together wait for the first."""
    library.parent.mkdir(parents=True, exist_ok=True)
    with library.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if library.exists():
            return
        scratch = library.with_suffix(".partial")
        try:
            done = subprocess.run(
                [*command, "-o", str(scratch)], capture_output=True, text=True, timeout=COMPILE_TIMEOUT_S, check=False
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise NotCompiled(f"{command[0]}: {error}") from error
        if done.returncode:
            raise NotCompiled(f"{command[0]} cannot compile {Path(command[-1]).name}: {done.stderr.strip()[:500]}")
        scratch.replace(library)
