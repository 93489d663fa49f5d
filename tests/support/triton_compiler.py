"""Compiles kernels of Triton for GPUs that are not here, in a process whose Triton does not interpret."""

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

ASSEMBLERS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
SHARED_BYTES = {80: 163 << 10, 90: 227 << 10}
"""That a program may have, by compute capability."""


class Used(NamedTuple):
    """By a kernel."""

    shared_bytes: int
    spilled_bytes: int
    """Stores and loads of what registers had no room for."""


def compiled(kernel: Any, arguments: dict[str, Any], capability: int, warps: int = 4) -> Used:
    """An argument is a type of Triton's, or a constant; those that end with `?` are of any value, all other numbers and
    addresses multiples of 16. Raises what the compiler raises, and AssertionError for more shared memory than there
    is."""
    names = kernel.arg_names
    types = {name: arguments[name] for name in names if _is_type(arguments[name])}
    source = ASTSource(
        kernel,
        {name: types.get(name, "constexpr").removesuffix("?") for name in names},
        {(names.index(name),): arguments[name] for name in names if name not in types},
        {(names.index(name),): [["tt.divisibility", 16]] for name, kind in types.items() if not kind.endswith("?")},
    )
    made = triton.compile(
        source, target=GPUTarget("cuda", capability, 32), options={"num_warps": warps, "num_stages": 3}
    )
    shared = int(made.metadata.shared)
    assert shared <= SHARED_BYTES[capability], f"{kernel} {arguments}: {shared} bytes of shared memory on {capability}"
    said = _assembled(made.asm["ptx"])
    return Used(shared, sum(int(number) for number in re.findall(r"(\d+) bytes spill", said)))


def _is_type(argument: object) -> bool:
    return isinstance(argument, str) and (argument.startswith("*") or argument.removesuffix("?") in ("i32", "fp32"))


def in_a_process(module: str, *arguments: str) -> str:
    """Run a module of tests/support whose Triton compiles; what it says where it fails, else nothing."""
    tests = Path(__file__).parents[1]
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join([str(tests.parent), str(tests)])
    command = [sys.executable, "-m", f"support.{module}", *arguments]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    return run.stderr[-4000:] if run.returncode else ""


def _assembled(program: str) -> str:
    """What the assembler says of it: the newest of those that come with Triton."""
    target = re.search(r"\.target (sm_\w+)", program)
    assert target is not None
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(program)
        file.flush()
        for name in ("ptxas-blackwell", "ptxas"):
            if (ASSEMBLERS / name).exists():
                command = [str(ASSEMBLERS / name), "-v", f"--gpu-name={target[1]}", file.name, "-o", "/dev/null"]
                return subprocess.run(command, capture_output=True, text=True, check=True).stderr
    raise FileNotFoundError(f"no assembler in {ASSEMBLERS}")
