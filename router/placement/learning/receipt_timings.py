"""Measurements of speed in a receipt.

Pure.
"""

from protos import inference_pb2 as pb
from router.placement.in_flight import Transfer
from router.placement.learning.rate_learning import ReceiptTimings


def measured(
    finish: pb.Finish,
    decode_queued_tokens: int,
    lender_queued_tokens: int,
    running: float,
    num_choices: int,
    moved: Transfer | None = None,
    with_items: bool = False,
) -> ReceiptTimings:
    """Return the measurements of `finish`, which ended the stream.

    The queued tokens are those at the workers before this placement; `running` streams include this one; `moved` is
    the transfer to the decode worker. Nothing is learned from requests that failed, were preempted, or mix several
    causes, and nothing about computing from those `with_items`, whose time is also the encoder's.
    """
    receipt = finish.receipt
    kv, placement = receipt.kv, receipt.placement
    seconds = {
        stage.name: stage.duration_ms / 1e3 for stage in receipt.stages if stage.where == placement.decode_worker
    }
    undisturbed = not (kv.loan_failure or kv.mismatched_blocks or kv.preemptions)
    prefill = transfer = fetch = tail = step = None
    if kv.store_blocks and "fetch from the store" in seconds:
        fetch = kv.store_blocks, seconds["fetch from the store"]
    if undisturbed and placement.lender and "lender prefill" in seconds and not kv.lender_fetched_blocks:
        ready_s = seconds.get("lender queue", 0.0) + seconds["lender prefill"]
        if kv.lender_computed_blocks and not with_items:
            tokens = lender_queued_tokens + kv.lender_computed_blocks * kv.block_tokens
            prefill = tokens, ready_s
        elif not kv.lender_computed_blocks and kv.moved_blocks and "transfer of the last blocks" in seconds:
            shared = 0 if moved is None else moved.shared_bytes(kv.moved_bytes)
            transfer = kv.moved_bytes + shared, ready_s + seconds["transfer of the last blocks"]
    if undisturbed and not with_items and kv.computed_tokens and "prompt tail" in seconds:
        tail = decode_queued_tokens + kv.computed_tokens, seconds.get("decode queue", 0.0) + seconds["prompt tail"]
    num_steps = finish.usage.completion_tokens - 1 - receipt.speculation.accepted_tokens
    if placement.attempt == 1 and not kv.preemptions and num_choices == 1 and num_steps > 0 and "decode" in seconds:
        step = running, seconds["decode"] / num_steps
    return ReceiptTimings(placement.decode_worker, placement.lender or None, prefill, transfer, tail, step, fetch)
