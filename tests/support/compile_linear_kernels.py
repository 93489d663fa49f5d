"""Compiles the kernels of linear layers for GPUs that are not here; fails where they need more than such a GPU has."""

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from engine.torch.cuda import linear_kernels

SHARED_BYTES = {80: 163 << 10, 89: 99 << 10, 90: 227 << 10, 120: 99 << 10}
"""That a program may have, by compute capability."""
BY_ROWS: dict[str, Any] = {"values": "*i8", "scales": "*fp32", "zeros": None, "GROUP": 0, "BITS": 8, "BLOCK_K": 128}
INT4: dict[str, Any] = {"values": "*u8", "scales": "*bf16", "zeros": None, "GROUP": 32, "BITS": 4, "BLOCK_K": 32}
GPTQ: dict[str, Any] = {"values": "*u8", "scales": "*fp16", "zeros": "*i8", "GROUP": 128, "BITS": 4, "BLOCK_K": 128}

BLOCKS: dict[str, Any] = {
    "values": "*fp8e4nv",
    "scales": "*fp32",
    "zeros": None,
    "GROUP": 128,
    "BITS": 8,
    "BLOCK_K": 128,
}


def compile_for(capability: int, kernel: Any, arguments: dict[str, Any], warps: int, stages: int = 3) -> None:
    """An argument is a type of Triton's, or a constant. Numbers and addresses are multiples of 16, as usual."""
    signature = {name: value if isinstance(value, str) else "constexpr" for name, value in arguments.items()}
    constants = {name: value for name, value in arguments.items() if not isinstance(value, str)}
    aligned = {
        (place,): [["tt.divisibility", 16]]
        for place, name in enumerate(arguments)
        if isinstance(arguments[name], str) and name not in ("m", "blocks_each")
    }
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=aligned)
    target, options = GPUTarget("cuda", capability, 32), {"num_warps": warps, "num_stages": stages}
    shared = triton.compile(source, target=target, options=options).metadata.shared
    assert shared <= SHARED_BYTES[capability], f"{kernel} {arguments}: {shared} bytes of shared memory on {capability}"


def main(capabilities: list[int]) -> None:
    types = {torch.bfloat16: "*bf16", torch.float32: "*fp32"}
    for capability in capabilities:
        for dtype, x in types.items():
            for weights in (BY_ROWS, INT4, GPTQ, BLOCKS)[: 3 if capability < 89 else 4]:
                for m in (1, 64, 1000) if dtype is torch.bfloat16 else (1000,):
                    compile_linear(capability, dtype, x, weights, m)
        adding = {"parts": "*fp32", "scales": "*fp32", "bias": "*bf16", "out": "*bf16", "m": "i32", "n": "i32"}
        compile_for(capability, linear_kernels._add_up, adding | {"GROUP": 0, "SPLITS": 4, "BLOCK": 1024}, 4)
        if capability >= 89:
            rows_of = {"x": "*bf16", "values": "*fp8e4nv", "scales": "*fp32", "k": "i32", "x_stride": "i32"}
            compile_for(capability, linear_kernels._rows_to_float8, rows_of | {"BLOCK": 4096}, 8)


def compile_linear(capability: int, dtype: torch.dtype, x: str, weights: dict[str, Any], m: int) -> None:
    rows, columns, warps = linear_kernels.tiles_of(m, weights["BITS"], dtype)
    block = linear_kernels.block_of(weights["BLOCK_K"], weights["BITS"], m)
    arguments: dict[str, Any] = {"x": x, "bias": x, "out": x} | weights
    arguments |= dict.fromkeys(("m", "n", "k", "x_stride", "blocks_each"), "i32")
    if m == 1:  # numbers that are 1 are constants, and few rows share the reduction
        arguments |= {"m": 1, "blocks_each": 1, "bias": None, "out": "*fp32"}
    arguments |= {"WIDE": False, "SPLITS": 4 if m == 1 else 1, "BLOCK_M": rows, "BLOCK_N": columns, "BLOCK_K": block}
    in_order = {name: arguments[name] for name in linear_kernels._linear.arg_names}
    compile_for(capability, linear_kernels._linear, in_order, warps, linear_kernels.stages_of(dtype))


if __name__ == "__main__":
    main([int(each) for each in sys.argv[1:]])
