"""The receipt of a request, made from its engine's account."""

from loans.account import KvAccount
from protos import decode_pb2 as internal_pb
from protos import inference_pb2 as pb


def build_receipt(
    request: internal_pb.DecodeRequest,
    account: KvAccount,
    block_tokens: int,
    received_at: float,
    finished_at: float,
    worker_id: str,
) -> pb.Receipt:
    """Build the receipt.

    All times are seconds of this host's monotonic clock.
    """
    return pb.Receipt(
        request_id=request.request_id,
        seed=request.sampling.seed,
        placement=request.placement,
        kv=_kv(account, block_tokens),
        stages=[*request.router_stages, *_stages(request, account, received_at, finished_at, worker_id)],
        model=request.model,
        model_reason=request.model_reason,
    )


def price_of(request: internal_pb.DecodeRequest, num_completion_tokens: int) -> pb.Price:
    """Return the price of the whole request: tokens of all choices at the prices that came with the request."""
    price = request.price
    return pb.Price(
        input_per_million=price.input_per_million,
        output_per_million=price.output_per_million,
        input=len(request.prompt_token_ids) * price.input_per_million / 1e6,
        output=num_completion_tokens * price.output_per_million / 1e6,
    )


def _kv(account: KvAccount, block_tokens: int) -> pb.KvReceipt:
    return pb.KvReceipt(
        block_tokens=block_tokens,
        reused_blocks=account.reused_blocks,
        moved_blocks=account.moved_blocks,
        computed_blocks=account.computed_blocks,
        computed_tokens=account.computed_tokens,
        moved_bytes=account.moved_bytes,
        verified_blocks=account.moved_blocks,
        mismatched_blocks=account.mismatched_blocks,
        lender_cached_blocks=account.lender_cached_blocks,
        lender_computed_blocks=account.lender_computed_blocks,
        transport=account.transport,
        ucx_transports=account.lanes,
        loan_failure=account.loan_failure,
        hedged_blocks=account.hedged_blocks,
        preemptions=account.preemptions,
        recomputed_tokens=account.recomputed_tokens,
        restored_blocks=account.restored_blocks,
        lender_fetched_blocks=account.lender_fetched_blocks,
        restore_failure=account.restore_failure,
        store_blocks=account.store_blocks,
        store_failure=account.store_failure,
        pinned_blocks=account.pinned_blocks,
        pins_gave_way=account.pins_gave_way,
        stored_blocks=account.stored_blocks,
        predicted=account.is_predicted,
    )


_SPANS = (
    ("admit", "received", "admitted"),
    ("restore from local store", "restore_started", "restored"),
    ("fetch from the store", "fetch_started", "fetched"),
    ("lender queue", "loan_opened", "loan_started"),
    ("lender prefill", "loan_started", "last_blocks_ready"),
    ("transfer of the last blocks", "last_blocks_ready", "last_bound"),
    ("decode queue", "admitted_or_loan_closed", "compute_started"),
    ("prompt tail", "compute_started", "first_token"),
    ("decode", "first_token", "finished"),
)
"""Name, start and end of each stage. A stage is left out when its start or end did not happen."""


def _stages(
    request: internal_pb.DecodeRequest,
    account: KvAccount,
    received_at: float,
    finished_at: float,
    worker_id: str,
) -> list[pb.Stage]:
    times = {"received": received_at, "finished": finished_at, **account.times}
    fetched = [times[end] for end in ("restored", "fetched", "loan_closed") if end in times]
    times["admitted_or_loan_closed"] = max(fetched, default=times["admitted"])
    return [
        pb.Stage(
            name=name,
            where=worker_id,
            start_ms=request.elapsed_ms + (times[start] - received_at) * 1e3,
            duration_ms=(times[end] - times[start]) * 1e3,
        )
        for name, start, end in _SPANS
        if start in times and end in times
    ]
