"""`python compiled_kernels.py`: kernels of Triton compiled for GPUs, as JSON {name: what it uses}."""

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

sys.path.insert(0, str(Path(__file__).parents[2]))

from engine.torch.cuda import attention_kernels
from engine.torch.cuda.triton_attention import KEYS, PROMPT_ROWS, PROMPT_WARPS

HOPPER, AMPERE = 90, 80
ASSEMBLERS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
HEAD_DIM, BLOCK_TOKENS, LAYERS, KV_HEADS, HEADS = 128, 16, 32, 8, 32
INDICES = ("rows_ptr", "positions_ptr", "starts_ptr", "tables_ptr", "tiles_ptr")
INTEGERS = ("token_stride", "head_stride", "part", "key_part", "first_token", "num_tokens")


def compiled(
    kernel: Any, types: dict[str, str], constants: dict[str, Any], capability: int, warps: int = 4
) -> dict[str, int]:
    """Of a kernel whose arguments are of `types`, but for those that are known: pointers and strides as aligned as
    torch's are. Raises what the compiler raises."""
    names = kernel.arg_names
    aligned = [name for name in names if types.get(name, "").startswith("*") or name.endswith("_stride")]
    source = ASTSource(
        kernel,
        {name: types.get(name, "constexpr") for name in names},
        {(names.index(name),): value for name, value in constants.items()},
        {(names.index(name),): [["tt.divisibility", 16]] for name in aligned},
    )
    made = triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": warps})
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(made.asm["ptx"])
        file.flush()
        said = assembled(file.name, re.search(r"\.target (sm_\w+)", made.asm["ptx"])[1])  # type: ignore[index]
    spills = [int(number) for number in re.findall(r"(\d+) bytes spill", said)]
    return {"shared_bytes": made.metadata.shared, "spilled_bytes": sum(spills)}


def assembled(path: str, target: str) -> str:
    """What the assembler says of a program: the newest of those that come with Triton."""
    for name in ("ptxas-blackwell", "ptxas"):
        if (ASSEMBLERS / name).exists():
            command = [str(ASSEMBLERS / name), "-v", f"--gpu-name={target}", path, "-o", "/dev/null"]
            return subprocess.run(command, capture_output=True, text=True, check=True).stderr
    raise FileNotFoundError(f"no assembler in {ASSEMBLERS}")


def attention(kept: str, element: str, capability: int) -> dict[str, dict[str, int]]:
    quantised = kept != "auto"
    row_bytes = BLOCK_TOKENS * (HEAD_DIM + 2 if quantised else 2 * HEAD_DIM)
    pool = {
        "HEAD_DIM": HEAD_DIM,
        "WIDTH": HEAD_DIM,
        "BLOCK_TOKENS": BLOCK_TOKENS,
        "BLOCK_ROWS": KV_HEADS * LAYERS * 2,
        "HEAD_ROWS": LAYERS * 2,
        "ROW": row_bytes if quantised else row_bytes // 2,
        "SCALE_ROW": row_bytes // 2,
    }
    common = dict.fromkeys(INDICES, "*i32") | dict.fromkeys(INTEGERS, "i32")
    common |= {"kept_ptr": element, "scales_ptr": "*bf16", "scaling": "fp32", "softcap": "fp32", "sums_ptr": "*fp32"}
    largest = {"auto": 0, "int8": 127, "fp8": 448}[kept]
    made = {
        f"write {kept}": compiled(
            attention_kernels.write_kv, common | {"new_ptr": "*bf16"}, pool | {"LARGEST": largest}, capability
        )
    }
    shape = {"HEADS": HEADS, "GROUP": HEADS // KV_HEADS, "GROUP_WIDTH": HEADS // KV_HEADS, "KEYS": KEYS}
    for name, tiled, rows, splits in (
        ("decode", False, 16, 1),
        ("split", False, 16, 16),
        ("prompt", True, PROMPT_ROWS, 1),
    ):
        chosen = {"TILED": tiled, "QUERY_ROWS": rows, "SPLITS": splits, "WINDOW": 0, "SOFTCAP": False}
        made[f"{name} {kept}"] = compiled(
            attention_kernels.attend,
            common | {"query_ptr": "*bf16", "out_ptr": "*fp32" if splits > 1 else "*bf16"},
            pool | shape | chosen | {"QUANTISED": quantised, "PRECISION": "tf32"},
            capability,
            PROMPT_WARPS if tiled else 4,
        )
    return made


def main() -> None:
    made = attention("auto", "*bf16", AMPERE) | attention("int8", "*i8", AMPERE)
    made |= attention("fp8", "*fp8e4nv", HOPPER)
    made["join splits"] = compiled(
        attention_kernels.join_splits,
        {"parts_ptr": "*fp32", "sums_ptr": "*fp32", "out_ptr": "*bf16"},
        {"HEADS": HEADS, "HEAD_DIM": HEAD_DIM, "WIDTH": HEAD_DIM, "SPLITS": 16},
        HOPPER,
    )
    print(json.dumps(made))


if __name__ == "__main__":
    main()
