"""The DecodeRequest for a placed request.

Pure.
"""

from engine.core_types import Pooling
from kvcache.item_messages import item_messages
from protos import decode_pb2 as pb
from protos import inference_pb2 as public_pb
from router.placement.fleet.introductions import holder_of
from router.placement.fleet.worker_records import ActivePlacement
from router.placement.place import Decision
from router.prepared_request import PreparedRequest
from router.request_path.stream_state import StreamState

POOLINGS: dict[Pooling, pb.Pooling.ValueType] = {"last": pb.POOLING_LAST, "mean": pb.POOLING_MEAN}


def decode_request(
    prepared: PreparedRequest,
    emitted: StreamState,
    placed: ActivePlacement,
    decision: Decision,
    attempt: int,
    placed_at: float,
    now: float,
) -> pb.DecodeRequest:
    """Build the message; `placed_at` and `now` are seconds of the router's clock."""
    model = prepared.model
    internal = pb.DecodeRequest(
        request_id=prepared.request_id,
        worker_incarnation=placed.decode.hello.incarnation,
        prompt_token_ids=prepared.prompt,
        emitted_token_ids=emitted.choices[0].token_ids,
        emitted_chars=emitted.choices[0].num_chars,
        emitted_choices=[
            pb.EmittedChoice(index=index, token_ids=choice.token_ids, chars=choice.num_chars)
            for index, choice in enumerate(emitted.choices)
            if index and choice.token_ids
        ],
        finished_choices=[index for index, choice in enumerate(emitted.choices) if choice.finished],
        emitted_prompt_logprobs=emitted.num_prompt_logprobs,
        sampling=prepared.sampling,
        seed_is_drawn=not prepared.request.sampling.HasField("seed"),
        tells_origin=emitted.is_untouched and prepared.warm is None,
        cache_salt=prepared.cache_salt,
        adapter=model.adapter,
        reads_store=decision.lender_id is not None and placed.lender is None,
        cache_retention_s=prepared.request.cache_retention_s,
        tenant=prepared.request.tenant if prepared.request.cache_retention_s else "",
        priority=prepared.request.priority,
        placement=public_pb.Placement(
            decode_worker=decision.decode_id,
            lender=decision.lender_id or "",
            source=decision.source_id or "",
            reason=decision.reason,
            candidates=decision.num_candidates,
            predicted_ttft_ms=decision.predicted_ttft_s * 1e3,
            attempt=attempt,
            predicted_hit_blocks=decision.hit_blocks,
            waiting_bytes=round(decision.waiting_bytes),
            reserved_output_tokens=decision.reserved_output_tokens,
            reservation=decision.reservation,
            revision=(placed.decode.hello.revision + model.adapter).hex() if placed.decode.hello.revision else "",
        ),
        router_stages=_stages(prepared, placed_at, model.fleet.router_id),
        elapsed_ms=(now - prepared.arrived_at) * 1e3,
        router_id=model.fleet.mark,
        placement_sequence=placed.sequence,
        model=model.name,
        model_reason=prepared.model_reason,
        price=model.costs.prices,
        reserve_output_tokens=placed.demand.expected_output_tokens,
        items=item_messages(prepared.items),
        block_keys=_prompt_keys(prepared, placed),
    )
    if prepared.request.HasField("embedding") and (pooler := model.pooler) is not None:
        wanted = pb.Embedding(
            pooling=POOLINGS[pooler.pooling],
            dimensions=prepared.request.embedding.dimensions,
            normalize=pooler.normalize,
        )
        internal.embedding.CopyFrom(wanted)
    if prepared.warm is not None:
        internal.warm.CopyFrom(pb.Warm(to_store=prepared.warm.to_store))
    if placed.lender is not None:
        source = holder_of(placed.source.hello) if placed.source else None
        reads_store = decision.source_id is not None and placed.source is None
        lender = pb.Lender(
            worker=holder_of(placed.lender.hello),
            may_compute=decision.lender_computes,
            source=source,
            reads_store=reads_store,
        )
        internal.lender.CopyFrom(lender)
    return internal


def _prompt_keys(prepared: PreparedRequest, placed: ActivePlacement) -> bytes:
    """Return the keys of the prompt's full blocks, where all workers have one model: each model has keys of its own."""
    width = placed.demand.block_tokens
    if placed.demand.other_keys or placed.decode.hello.block_tokens != width:
        return b""
    return b"".join(placed.keys[: len(prepared.prompt) // width])


def _stages(prepared: PreparedRequest, placed_at: float, where: str) -> list[public_pb.Stage]:
    read_ms = (prepared.tokenised_at - prepared.arrived_at) * 1e3
    queue_ms = (placed_at - prepared.tokenised_at) * 1e3
    queued = public_pb.Stage(name="router queue", where=where, start_ms=read_ms, duration_ms=queue_ms)
    if prepared.media is None:
        return [public_pb.Stage(name="tokenise", where=where, start_ms=0.0, duration_ms=read_ms), queued]
    media_ms = min(read_ms, prepared.media.seconds * 1e3)
    return [
        public_pb.Stage(name="tokenise", where=where, start_ms=0.0, duration_ms=read_ms - media_ms),
        public_pb.Stage(name="media", where=where, start_ms=read_ms - media_ms, duration_ms=media_ms),
        queued,
    ]
