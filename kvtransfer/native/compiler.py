"""Compilation of C++ sources by the machine's own compiler, cached per machine."""

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
    """A failed compilation: no compiler, or an error, with the reason."""


def cache_folder(kind: str) -> Path:
    """Return the folder of this machine's cache for things that can be rebuilt."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "tandem" / kind


@dataclass(frozen=True, slots=True)
class Source:
    """Source of one library.

    It may include any header of its folder.
    """

    path: Path
    flags: tuple[str, ...] = ()


def load_library(source: Path) -> ctypes.CDLL:
    """Return the compiled `source`.

    Raises NotCompiled.
    """
    (library,) = load_libraries([Source(source)])
    return library


def load_libraries(sources: Sequence[Source]) -> list[ctypes.CDLL]:
    """Return the compiled `sources`, in order.

    Uncached ones compile in parallel. Raises NotCompiled.
    """
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
    """Return a hash of source, compiler and CPU: `-march=native` makes code for this CPU only."""
    digest = blake2b(digest_size=12)
    for file in (source, *sorted(source.parent.glob("*.h"))):
        digest.update(file.read_bytes())
    for part in (" ".join(flags).encode(), version, _cpu().encode()):
        digest.update(part)
    return digest.hexdigest()


def _cpu() -> str:
    """Return the CPU features that the compiler uses."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    telling = ("model name", "flags", "Features", "cpu family", "model")
    return "\n".join(dict.fromkeys(line for line in lines if line.split("\t")[0].strip() in telling))


def _compile(command: list[str], library: Path) -> None:
    """Compile and rename into place; processes that start together wait for the first."""
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
