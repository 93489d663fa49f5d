"""Accounts of KV for requests at stock servers: what placement predicted, corrected by what the servers tell.

Pure.
"""

from loans.account import KvAccount
from protos import decode_pb2 as pb


def account_of(request: pb.DecodeRequest, block_tokens: int, sent_at: float, first_token_at: float) -> KvAccount:
    """Return the account of a request before its server tells anything: what placement predicted.

    A lender's blocks are told by no stream. Times are seconds of the monotonic clock.
    """
    num_tokens = len(request.prompt_token_ids) + len(request.emitted_token_ids)
    usable = (num_tokens - 1) // block_tokens if block_tokens else 0
    hits = min(usable, request.placement.predicted_hit_blocks)
    times = {"admitted": sent_at, "first_token": first_token_at}
    if not request.HasField("lender"):
        computed = num_tokens - hits * block_tokens
        times["compute_started"] = sent_at
        return KvAccount(
            reused_blocks=hits,
            computed_blocks=usable - hits,
            computed_tokens=computed,
            times=times,
            is_predicted=True,
        )
    computed = usable - hits if request.lender.may_compute else 0
    times |= {"loan_opened": sent_at, "loan_started": sent_at, "last_blocks_ready": first_token_at}
    return KvAccount(
        moved_blocks=hits + computed,
        lender_cached_blocks=hits,
        lender_computed_blocks=computed,
        times=times,
        is_predicted=True,
    )


def tell_cached(account: KvAccount, num_cached: int, num_tokens: int, block_tokens: int) -> None:
    """Correct an account without a lender by what the server told."""
    if not account.moved_blocks and block_tokens:
        account.reused_blocks = num_cached // block_tokens
        account.computed_tokens = num_tokens - num_cached
        account.computed_blocks = (num_tokens - 1) // block_tokens - account.reused_blocks
        account.is_predicted = False
