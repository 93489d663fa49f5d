"""`python -m support.compiled_attention`: attention's kernels compiled for GPUs; fails where they spill registers."""

from typing import Any

from engine.backends.torch.cuda import attention_kernels
from engine.backends.torch.cuda.triton_attention import KEYS, PROMPT_ROWS, PROMPT_WARPS
from support.triton_compiler import compiled

HEAD_DIM, BLOCK_TOKENS, LAYERS, KV_HEADS, HEADS = 128, 16, 32, 8, 32
INDICES = ("rows_ptr", "positions_ptr", "starts_ptr", "tables_ptr", "tiles_ptr")
INTEGERS = ("part", "key_part", "first_token", "num_tokens")


def compile_attention(kept: str, element: str, capability: int) -> int:
    quantised = kept != "auto"
    row_bytes = BLOCK_TOKENS * (HEAD_DIM + 2 if quantised else 2 * HEAD_DIM)
    pool: dict[str, Any] = {
        "HEAD_DIM": HEAD_DIM,
        "WIDTH": HEAD_DIM,
        "BLOCK_TOKENS": BLOCK_TOKENS,
        "BLOCK_ROWS": KV_HEADS * LAYERS * 2,
        "HEAD_ROWS": LAYERS * 2,
        "ROW": row_bytes if quantised else row_bytes // 2,
        "SCALE_ROW": row_bytes // 2,
    }
    common: dict[str, Any] = dict.fromkeys(INDICES, "*i32") | dict.fromkeys(INTEGERS, "i32?")
    common |= {"kept_ptr": element, "scales_ptr": "*bf16", "scaling": "fp32?", "softcap": "fp32?", "sums_ptr": "*fp32"}
    common |= {"token_stride": "i32", "head_stride": "i32", "new_ptr": "*bf16", "query_ptr": "*bf16"} | pool
    largest = {"auto": 0, "int8": 127, "fp8": 448}[kept]
    spilled = compiled(attention_kernels.write_kv, common | {"LARGEST": largest}, capability).spilled_bytes
    shape: dict[str, Any] = {"HEADS": HEADS, "GROUP": HEADS // KV_HEADS, "GROUP_WIDTH": HEADS // KV_HEADS, "KEYS": KEYS}
    shape |= {"QUANTISED": quantised, "PRECISION": "tf32", "WINDOW": 0, "SOFTCAP": False}
    for tiled, rows, splits in ((False, 16, 1), (False, 16, 16), (True, PROMPT_ROWS, 1)):
        chosen: dict[str, Any] = {
            "TILED": tiled,
            "QUERY_ROWS": rows,
            "SPLITS": splits,
            "out_ptr": "*fp32" if splits > 1 else "*bf16",
        }
        warps = PROMPT_WARPS if tiled else 4
        spilled += compiled(attention_kernels.attend, common | shape | chosen, capability, warps).spilled_bytes
    return spilled


def main() -> None:
    for kept, element, capabilities in (
        ("auto", "*bf16", (80,)),
        ("int8", "*i8", (80, 90)),
        ("fp8", "*fp8e4nv", (90,)),
    ):
        for capability in capabilities:
            spilled = compile_attention(kept, element, capability)
            assert not spilled, f"{kept} on {capability}: {spilled} bytes of registers are spilled"
    arguments: dict[str, Any] = {"parts_ptr": "*fp32", "sums_ptr": "*fp32", "out_ptr": "*bf16", "HEADS": HEADS}
    compiled(attention_kernels.join_splits, arguments | {"HEAD_DIM": HEAD_DIM, "WIDTH": HEAD_DIM, "SPLITS": 16}, 90)


if __name__ == "__main__":
    main()
