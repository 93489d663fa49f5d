"""What beam search may be asked for, and with what else. Pure."""

from cluster.errors import InvalidRequest
from engine.core.core_types import MAX_CHAINS
from protos import inference_pb2 as pb

MAX_LENGTH_PENALTY = 10.0
MAX_STOP_TOKEN_IDS = 16
"""Each makes the candidates more that are compared at every step."""
NEUTRAL = {
    "temperature": 0.0,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "min_tokens": 0,
}
"""Options that beam search does not know, and what they must be if they are given."""
UNKNOWN = ("logit_bias", "stop", "structured", "logprobs")
"""Those that may not be given at all."""


def check_beam_search(sampling: pb.Sampling, num_choices: int, vocab_size: int) -> None:
    """Of the options as they were given. Raises InvalidRequest."""
    limit = min(MAX_CHAINS, vocab_size)
    if not 1 <= sampling.beam_width <= limit:
        raise InvalidRequest("sampling.beam_width", f"must be 1 to {limit}, not {sampling.beam_width}")
    if num_choices > sampling.beam_width:
        raise InvalidRequest("sampling.n", f"must be at most beam_width, {sampling.beam_width}, not {num_choices}")
    if not -MAX_LENGTH_PENALTY <= sampling.length_penalty <= MAX_LENGTH_PENALTY:
        limits = f"{-MAX_LENGTH_PENALTY:g} to {MAX_LENGTH_PENALTY:g}"
        raise InvalidRequest("sampling.length_penalty", f"must be {limits}, not {sampling.length_penalty}")
    if len(sampling.stop_token_ids) > MAX_STOP_TOKEN_IDS:
        given = len(sampling.stop_token_ids)
        raise InvalidRequest("sampling.stop_token_ids", f"at most {MAX_STOP_TOKEN_IDS} with beam search, not {given}")
    for name, value in NEUTRAL.items():
        if sampling.HasField(name) and getattr(sampling, name) != value:  # type: ignore[arg-type]
            raise InvalidRequest(f"sampling.{name}", "cannot be combined with beam search")
    given_fields = {field.name for field, _ in sampling.ListFields()}
    for name in UNKNOWN:
        if name in given_fields:
            raise InvalidRequest(f"sampling.{name}", "cannot be combined with beam search")
