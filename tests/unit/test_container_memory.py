"""How much memory a worker may take in a container of its own."""

import os
from pathlib import Path

import pytest

from engine.host.container_memory import container_memory

GIB = 1 << 30


def write(root: Path, version: int, limit: str, members: list[int]) -> None:
    folder = root if version == 2 else root / "memory"
    folder.mkdir(exist_ok=True)
    names = ("memory.max", "memory.current") if version == 2 else ("memory.limit_in_bytes", "memory.usage_in_bytes")
    (folder / names[0]).write_text(f"{limit}\n")
    (folder / names[1]).write_text(f"{3 * GIB}\n")
    cached = "inactive_file" if version == 2 else "total_inactive_file"
    (folder / "memory.stat").write_text(f"anon 5\n{cached} {GIB}\n")
    (folder / "cgroup.procs").write_text("".join(f"{pid}\n" for pid in members))


@pytest.mark.parametrize("version", [1, 2])
def test_what_is_free_counts_cached_files(tmp_path: Path, version: int) -> None:
    write(tmp_path, version, str(8 * GIB), [os.getpid()])
    assert container_memory(tmp_path) == (8 * GIB, 6 * GIB)


@pytest.mark.parametrize("version", [1, 2])
def test_a_container_with_other_processes_tells_nothing(tmp_path: Path, version: int) -> None:
    write(tmp_path, version, str(8 * GIB), [os.getpid(), 1 << 22])
    assert container_memory(tmp_path) is None


@pytest.mark.parametrize("limit", ["max", str(1 << 62)])
def test_no_limit(tmp_path: Path, limit: str) -> None:
    write(tmp_path, 2, limit, [os.getpid()])
    assert container_memory(tmp_path) is None


def test_no_cgroup(tmp_path: Path) -> None:
    assert container_memory(tmp_path) is None
