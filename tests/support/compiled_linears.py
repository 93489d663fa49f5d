"""`python -m support.compiled_linears 80 90`: the kernels of linear layers compiled for GPUs of those compute
capabilities; fails where they need more shared memory than such a GPU has."""

import sys
from typing import Any

import torch

from engine.backends.torch.cuda import linear_kernels
from support.triton_compiler import compiled

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


def main(capabilities: list[int]) -> None:
    types = {torch.bfloat16: "*bf16", torch.float32: "*fp32"}
    for capability in capabilities:
        for dtype, x in types.items():
            for weights in (BY_ROWS, INT4, GPTQ, BLOCKS)[: 3 if capability < 89 else 4]:
                for m in (1, 64, 1000) if dtype is torch.bfloat16 else (1000,):
                    compile_linear(capability, dtype, x, weights, m)
        adding = {"parts": "*fp32", "scales": "*fp32", "bias": "*bf16", "out": "*bf16", "m": "i32?", "n": "i32"}
        compiled(linear_kernels._add_up, adding | {"GROUP": 0, "SPLITS": 4, "BLOCK": 1024}, capability)
        if capability >= 89:
            rows_of = {"x": "*bf16", "values": "*fp8e4nv", "scales": "*fp32", "k": "i32", "x_stride": "i32"}
            compiled(linear_kernels._rows_to_float8, rows_of | {"BLOCK": 4096}, capability, warps=8)


def compile_linear(capability: int, dtype: torch.dtype, x: str, weights: dict[str, Any], m: int) -> None:
    rows, columns, warps = linear_kernels.tiles_of(m, weights["BITS"], dtype)
    block = linear_kernels.block_of(weights["BLOCK_K"], weights["BITS"], m)
    arguments: dict[str, Any] = {"x": x, "bias": x, "out": x} | weights
    arguments |= dict.fromkeys(("n", "k", "x_stride"), "i32") | dict.fromkeys(("m", "blocks_each"), "i32?")
    if m == 1:  # numbers that are 1 are constants, and few rows share the reduction
        arguments |= {"m": 1, "blocks_each": 1, "bias": None, "out": "*fp32"}
    arguments |= {"SPLITS": 4 if m == 1 else 1, "BLOCK_M": rows, "BLOCK_N": columns, "BLOCK_K": block}
    compiled(linear_kernels._linear, arguments, capability, warps, linear_kernels.stages_of(dtype))


if __name__ == "__main__":
    main([int(each) for each in sys.argv[1:]])
