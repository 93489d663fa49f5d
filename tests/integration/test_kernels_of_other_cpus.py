"""The CPU kernels as other CPUs run them: AVX2 without AVX-512, and arm64 under an emulator."""

import platform
import shutil
import subprocess
from pathlib import Path

import pytest

from engine.backends.torch.native.kernels import FLAGS, FOLDER

DRIVER = Path(__file__).parents[1] / "support" / "kernel_driver.cpp"
SOURCES = ("linear.cpp", "layers.cpp")
DEFINED = ("-DCOMPUTED=float",)
ARM_COMPILER, ARM_EMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64"
ROUNDING = 2**-7
"""Largest error of a result in bfloat16: half a unit in the last place of numbers below 4."""

pytestmark = pytest.mark.skipif(platform.machine() != "x86_64", reason="the other CPU is an x86-64's")


def results(compiler: str, cpu: str, folder: Path, *emulator: str) -> dict[str, tuple[float, str]]:
    """Largest error and all bits of each kernel."""
    program = folder / cpu
    command = [compiler, "-O1", "-std=c++20", "-w", "-Wno-psabi", "-static", f"-march={cpu}", *FLAGS, *DEFINED]
    built = subprocess.run(
        [*command, f"-I{FOLDER}", str(DRIVER), *(str(FOLDER / name) for name in SOURCES), "-o", str(program)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert built.returncode == 0, built.stderr[-2000:]
    said = subprocess.run([*emulator, str(program)], capture_output=True, text=True, check=True, timeout=120).stdout
    found = [line.split() for line in said.splitlines()]
    return {name: (float(error), bits) for name, error, bits in found}


@pytest.fixture(scope="module")
def of_avx2(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[float, str]]:
    return results("g++", "haswell", tmp_path_factory.mktemp("avx2"))


@pytest.mark.skipif("avx2" not in Path("/proc/cpuinfo").read_text().split(), reason="this CPU has no AVX2")
def test_avx2_computes_what_sums_in_double_say(of_avx2: dict[str, tuple[float, str]]) -> None:
    assert len(of_avx2) == 10
    for name, (error, _) in of_avx2.items():
        assert error <= (ROUNDING if name.startswith(("linear", "gated")) else 1e-5), name


@pytest.mark.skipif(
    not (shutil.which(ARM_COMPILER) and shutil.which(ARM_EMULATOR)),
    reason="no arm64 compiler and emulator (Debian: g++-aarch64-linux-gnu, qemu-user)",
)
def test_arm64_computes_the_bits_of_avx2(of_avx2: dict[str, tuple[float, str]], tmp_path: Path) -> None:
    assert results(ARM_COMPILER, "armv8-a", tmp_path, ARM_EMULATOR) == of_avx2
