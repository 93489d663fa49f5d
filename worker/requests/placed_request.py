"""Conversion of a placed request into an engine message, with its checks."""

from dataclasses import replace

from cluster.errors import InvalidRequest
from engine.core_types import MAX_CHAINS, Pooling, SamplingParams
from engine.engine_kind import Feature, kind_of
from engine.messages.to_engine import Generate
from engine.model.detokenizer import check_token_ids
from engine.sampling.structured_output import FIELD, read_structured
from kvcache.block_keys import KEY_BYTES, token_array
from kvcache.item_messages import read_items
from kvcache.items import items_fault
from kvcache.pins import Retention
from loans.network import Lender, PlacementMark
from loans.peers.connection import peer_of, unpack_keys
from protos import decode_pb2 as pb
from protos import inference_pb2 as public_pb

POOLINGS: dict[pb.Pooling.ValueType, Pooling] = {pb.POOLING_LAST: "last", pb.POOLING_MEAN: "mean"}


def check_request(request: pb.DecodeRequest, vocab_size: int, engine: str) -> None:
    """Check a request.

    Raises InvalidRequest for values the router should refuse or this engine cannot serve.
    """
    sampling = request.sampling
    check_token_ids(request.prompt_token_ids, "prompt_token_ids", vocab_size)
    check_token_ids(request.emitted_token_ids, "emitted_token_ids", vocab_size)
    for emitted in request.emitted_choices:
        check_token_ids(emitted.token_ids, "emitted_choices", vocab_size)
    if not request.prompt_token_ids:
        raise InvalidRequest("prompt_token_ids", "the prompt is empty")
    if request.emitted_prompt_logprobs >= len(request.prompt_token_ids):
        raise InvalidRequest("emitted_prompt_logprobs", "has more entries than the prompt has tokens")
    if sampling.HasField("beam_width"):
        raise InvalidRequest("sampling.beam_width", "Tandem serves no beam search")
    if sampling.HasField("n") and not 1 <= sampling.n <= MAX_CHAINS:
        raise InvalidRequest("sampling.n", f"must be 1 to {MAX_CHAINS}, not {sampling.n}")
    choices = set(range(num_choices(sampling)))
    if not choices - set(request.finished_choices):
        raise InvalidRequest("finished_choices", "nothing to generate: all choices are finished")
    if not {*request.finished_choices, *(emitted.index for emitted in request.emitted_choices)} <= choices:
        raise InvalidRequest("emitted_choices", f"an index is outside the request's {len(choices)} choices")
    longest = max(len(emitted_of(request, choice)[0]) for choice in choices - set(request.finished_choices))
    if request.HasField("warm"):
        _check_warm(request)
    elif sampling.max_tokens < 1 or longest >= sampling.max_tokens:
        left = sampling.max_tokens - longest
        raise InvalidRequest("sampling.max_tokens", f"nothing to generate: {left} tokens are left")
    if request.HasField("embedding"):
        _check_embedding(request)
    if len(request.block_keys) % KEY_BYTES:
        raise InvalidRequest("block_keys", f"{len(request.block_keys)} bytes are not a whole number of keys")
    if fault := items_fault(read_items(request.items), len(request.prompt_token_ids)):
        raise InvalidRequest("items", fault)
    asked: dict[Feature, tuple[bool, str]] = {
        "structured output": (read_structured(sampling) is not None, FIELD),
    }
    for feature, reason in kind_of(engine).lacking.items():
        is_asked, field = asked.get(feature, (False, ""))
        if is_asked:
            raise InvalidRequest(field, reason)


def _check_warm(request: pb.DecodeRequest) -> None:
    sampling = request.sampling
    if sampling.max_tokens or num_choices(sampling) != 1:
        raise InvalidRequest("sampling", "a request without output needs max_tokens 0 and n 1")
    if request.emitted_token_ids or request.HasField("embedding"):
        raise InvalidRequest("warm", "cannot be combined with tokens of an earlier attempt, or with an embedding")


def _check_embedding(request: pb.DecodeRequest) -> None:
    if request.embedding.pooling not in POOLINGS:
        raise InvalidRequest("embedding.pooling", f"unknown pooling {request.embedding.pooling}")
    if request.sampling.max_tokens != 1 or num_choices(request.sampling) != 1:
        raise InvalidRequest("sampling", "an embedding needs max_tokens 1 and n 1")


def engine_request(engine_id: str, request: pb.DecodeRequest) -> Generate:
    """Convert a placed request into the engine's Generate message."""
    sampling = request.sampling
    structured = read_structured(sampling)
    others = [emitted_of(request, choice)[0] for choice in range(1, num_choices(sampling))]
    return Generate(
        request_id=engine_id,
        prompt=token_array(request.prompt_token_ids),
        emitted=tuple(request.emitted_token_ids),
        sampling=SamplingParams(
            max_tokens=sampling.max_tokens,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            seed=sampling.seed,
            seed_is_drawn=request.seed_is_drawn,
            stop=tuple(sampling.stop),
            stop_token_ids=frozenset(sampling.stop_token_ids),
            logprobs=sampling.logprobs if sampling.HasField("logprobs") else None,
            ignore_eos=sampling.ignore_eos,
            min_p=sampling.min_p,
            repetition_penalty=sampling.repetition_penalty if sampling.HasField("repetition_penalty") else 1.0,
            presence_penalty=sampling.presence_penalty,
            frequency_penalty=sampling.frequency_penalty,
            logit_bias=tuple(sampling.logit_bias.items()),
            min_tokens=sampling.min_tokens,
            structured=structured and replace(structured, scope=request.cache_salt),
            prompt_logprobs=sampling.prompt_logprobs if sampling.HasField("prompt_logprobs") else None,
            n=num_choices(sampling),
            pooling=POOLINGS[request.embedding.pooling] if request.HasField("embedding") else None,
        ),
        cache_salt=request.cache_salt,
        adapter=request.adapter,
        priority=request.priority,
        lender=_lender(request.lender) if request.HasField("lender") else None,
        mark=PlacementMark(request.router_id, request.placement_sequence),
        emitted_others=tuple(others) if any(others) else (),
        finished=frozenset(request.finished_choices),
        num_scored=request.emitted_prompt_logprobs,
        reads_store=request.reads_store,
        to_store=request.warm.to_store,
        reserve_output_tokens=request.reserve_output_tokens,
        items=read_items(request.items),
        retention=Retention(request.cache_retention_s, request.tenant) if request.cache_retention_s > 0 else None,
        keys=tuple(unpack_keys(request.block_keys)),
        log_id=request.request_id,
    )


def _lender(lender: pb.Lender) -> Lender:
    source = peer_of(lender.source) if lender.HasField("source") else None
    return Lender(peer_of(lender.worker), lender.may_compute, source, lender.reads_store)


def num_choices(sampling: public_pb.Sampling) -> int:
    """Return the number of completions requested."""
    return sampling.n if sampling.HasField("n") else 1


def emitted_of(request: pb.DecodeRequest, choice: int) -> tuple[tuple[int, ...], int]:
    """Return the token ids and the number of characters that an earlier attempt streamed of `choice`."""
    if choice == 0:
        return tuple(request.emitted_token_ids), request.emitted_chars
    for emitted in request.emitted_choices:
        if emitted.index == choice:
            return tuple(emitted.token_ids), emitted.chars
    return (), 0
