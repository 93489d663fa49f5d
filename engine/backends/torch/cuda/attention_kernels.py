"""Triton kernels of paged attention: write new keys and values into their blocks, and attend over the blocks.

The pool is a flat array of stored elements (numbers, or one byte each of a quantised vector). A quantised pool is also
seen as a flat array of scales. A row, as in `engine/backends/torch/kv/rows.py`, is [block_tokens, head_dim], then its
scales.

This module imports Triton, so it is imported only where Triton is installed.
"""

import triton
import triton.language as tl

ROUNDING = tl.constexpr(12582912.0)
"""1.5 * 2**23. Added to a float32 below 2**22 and subtracted again, it leaves the nearest integer, ties to even."""


@triton.jit
def write_kv(
    new_ptr,
    kept_ptr,
    scales_ptr,
    rows_ptr,
    positions_ptr,
    starts_ptr,
    tables_ptr,
    token_stride,
    head_stride,
    part,
    HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    HEAD_ROWS: tl.constexpr,
    ROW: tl.constexpr,
    SCALE_ROW: tl.constexpr,
    LARGEST: tl.constexpr,
):
    """Write one vector of one token and KV head into row `part` of its head.

    The grid is (tokens, kv_heads). LARGEST is 0 for a pool that is not quantised. WIDTH is HEAD_DIM rounded up to a
    power of two. ROW and SCALE_ROW are lengths of a row in elements of either array.
    """
    token, head = tl.program_id(0), tl.program_id(1)
    position = tl.load(positions_ptr + token)
    start = tl.load(starts_ptr + tl.load(rows_ptr + token))
    block = tl.load(tables_ptr + start + position // BLOCK_TOKENS).to(tl.int64)
    row = block * BLOCK_ROWS + head * HEAD_ROWS + part
    place = position % BLOCK_TOKENS
    columns = tl.arange(0, WIDTH)
    inside = columns < HEAD_DIM
    vector = tl.load(new_ptr + token.to(tl.int64) * token_stride + head * head_stride + columns, mask=inside, other=0.0)
    target = kept_ptr + row * ROW + place * HEAD_DIM + columns
    if LARGEST == 0:
        tl.store(target, vector, mask=inside)
    else:
        wide = vector.to(tl.float32)
        exact = tl.div_rn(tl.max(tl.abs(wide), axis=0), tl.full((), LARGEST, tl.float32))
        bits = (exact.to(tl.int32, bitcast=True) + 0xFFFF) & -0x10000
        scale = bits.to(tl.float32, bitcast=True)
        multiples = tl.div_rn(wide, tl.where(scale > 0, scale, 1.0) + tl.zeros_like(wide))
        if kept_ptr.dtype.element_ty == tl.int8:
            multiples = (multiples + ROUNDING) - ROUNDING
        tl.store(target, multiples.to(kept_ptr.dtype.element_ty), mask=inside)
        tl.store(scales_ptr + row * SCALE_ROW + SCALE_ROW - BLOCK_TOKENS + place, scale.to(tl.bfloat16))


@triton.jit
def attend(
    query_ptr,
    kept_ptr,
    scales_ptr,
    out_ptr,
    sums_ptr,
    rows_ptr,
    positions_ptr,
    starts_ptr,
    tables_ptr,
    tiles_ptr,
    first_token,
    num_tokens,
    token_stride,
    head_stride,
    key_part,
    scaling,
    softcap,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_WIDTH: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    HEAD_ROWS: tl.constexpr,
    ROW: tl.constexpr,
    SCALE_ROW: tl.constexpr,
    QUANTISED: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    TILED: tl.constexpr,
    QUERY_ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    SPLITS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Attend for one tile of query rows and one KV head; the grid is (tiles, kv_heads, SPLITS).

    A query row is a token and a head of the group. A tile is one token: tile i is token `first_token` + i. If TILED, a
    tile is the tokens from tiles_ptr[i] on that belong to the same chunk, QUERY_ROWS // GROUP_WIDTH at most.

    SPLITS programs share a tile's keys. With more than one split, each program writes its partial result in float32 to
    out_ptr [tokens, HEADS, SPLITS, HEAD_DIM], and its largest score (base 2) and sum of weights to sums_ptr [tokens,
    HEADS, SPLITS, 2].
    """
    tile, head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    first = tl.load(tiles_ptr + tile) if TILED else first_token + tile
    chunk = tl.load(rows_ptr + first)
    first_position = tl.load(positions_ptr + first)
    tables_ptr += tl.load(starts_ptr + chunk)

    rows = tl.arange(0, QUERY_ROWS)
    tokens, members = first + rows // GROUP_WIDTH, rows % GROUP_WIDTH
    valid = members < GROUP
    if TILED:
        valid &= tokens < num_tokens
        valid &= tl.load(rows_ptr + tokens, mask=valid, other=-1) == chunk
    else:
        valid &= tokens == first
    positions = first_position + rows // GROUP_WIDTH
    columns = tl.arange(0, WIDTH)
    inside = columns < HEAD_DIM
    heads = head * GROUP + members
    query_rows = query_ptr + tokens.to(tl.int64)[:, None] * token_stride + heads[:, None] * head_stride
    query = tl.load(query_rows + columns[None, :], mask=valid[:, None] & inside[None, :], other=0.0)

    end = tl.max(tl.where(valid, positions, 0), axis=0) + 1
    begin = 0
    if WINDOW > 0:
        begin = tl.maximum(first_position - WINDOW + 1, 0) // KEYS * KEYS
    share = tl.cdiv(tl.cdiv(end - begin, KEYS), SPLITS) * KEYS
    begin += split * share
    end = tl.minimum(end, begin + share)

    base_two = scaling * 1.4426950408889634
    largest = tl.full((QUERY_ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((QUERY_ROWS,), tl.float32)
    gathered = tl.zeros((QUERY_ROWS, WIDTH), tl.float32)
    for start in range(begin, end, KEYS):
        keys = start + tl.arange(0, KEYS)
        in_range = keys < end
        blocks = tl.load(tables_ptr + keys // BLOCK_TOKENS, mask=in_range, other=0).to(tl.int64)
        pool_rows = blocks * BLOCK_ROWS + head * HEAD_ROWS + key_part
        places = keys % BLOCK_TOKENS
        spots = kept_ptr + (pool_rows * ROW + places * HEAD_DIM)[:, None] + columns[None, :]
        wanted = in_range[:, None] & inside[None, :]
        key = tl.load(spots, mask=wanted, other=0.0)
        value = tl.load(spots + ROW, mask=wanted, other=0.0)
        if QUANTISED:
            scale_spots = scales_ptr + pool_rows * SCALE_ROW + SCALE_ROW - BLOCK_TOKENS + places
            key_scale = tl.load(scale_spots, mask=in_range, other=0.0).to(tl.float32)
            value_scale = tl.load(scale_spots + SCALE_ROW, mask=in_range, other=0.0).to(tl.float32)
            key = (key.to(tl.float32) * key_scale[:, None]).to(query.dtype)
            value = (value.to(tl.float32) * value_scale[:, None]).to(query.dtype)
        scores = tl.dot(query, tl.trans(key), input_precision=PRECISION)
        if SOFTCAP:
            bent = scores * (scaling / softcap)  # tanh of the argument, by operations that every platform has
            scores = (1.0 - 2.0 / (tl.exp(2.0 * bent) + 1.0)) * (softcap * 1.4426950408889634)
        else:
            scores *= base_two
        seen = in_range[None, :] & (keys[None, :] <= positions[:, None])
        if WINDOW > 0:
            seen &= keys[None, :] > positions[:, None] - WINDOW
        scores = tl.where(seen, scores, float("-inf"))
        now_largest = tl.maximum(largest, tl.max(scores, axis=1))
        against = tl.where(now_largest == float("-inf"), 0.0, now_largest)  # for a row that sees no key here
        weights = tl.exp2(scores - against[:, None])
        shrunk = tl.exp2(largest - against)
        total = total * shrunk + tl.sum(weights, axis=1)
        gathered = gathered * shrunk[:, None]
        gathered += tl.dot(weights.to(value.dtype), value, input_precision=PRECISION)
        largest = now_largest

    spots = tokens.to(tl.int64) * HEADS + heads
    if SPLITS == 1:
        result = gathered / tl.where(total > 0, total, 1.0)[:, None]
        targets = out_ptr + spots[:, None] * HEAD_DIM + columns[None, :]
        tl.store(targets, result.to(out_ptr.dtype.element_ty), mask=valid[:, None] & inside[None, :])
    else:
        spots = (tokens - first_token).to(tl.int64) * HEADS + heads
        spots = spots * SPLITS + split
        targets = out_ptr + spots[:, None] * HEAD_DIM + columns[None, :]
        tl.store(targets, gathered, mask=valid[:, None] & inside[None, :])
        tl.store(sums_ptr + spots * 2, largest, mask=valid)
        tl.store(sums_ptr + spots * 2 + 1, total, mask=valid)


@triton.jit
def join_splits(
    parts_ptr,
    sums_ptr,
    out_ptr,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    SPLITS: tl.constexpr,
):
    """Combine the splits of one token and head into [tokens, HEADS, HEAD_DIM].

    The grid is (tokens, HEADS).
    """
    spot = tl.program_id(0).to(tl.int64) * HEADS + tl.program_id(1)
    splits, columns = tl.arange(0, SPLITS), tl.arange(0, WIDTH)
    inside = columns < HEAD_DIM
    largest = tl.load(sums_ptr + (spot * SPLITS + splits) * 2)
    totals = tl.load(sums_ptr + (spot * SPLITS + splits) * 2 + 1)
    shares = tl.exp2(largest - tl.max(largest, axis=0))
    targets = parts_ptr + ((spot * SPLITS + splits) * HEAD_DIM)[:, None] + columns[None, :]
    parts = tl.load(targets, mask=inside[None, :], other=0.0)
    result = tl.sum(parts * shares[:, None], axis=0) / tl.sum(totals * shares, axis=0)
    tl.store(out_ptr + spot * HEAD_DIM + columns, result.to(out_ptr.dtype.element_ty), mask=inside)
