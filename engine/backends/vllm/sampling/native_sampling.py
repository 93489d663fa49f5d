"""Sampling by vLLM itself, on Model Runner V2.

vLLM's noise depends on seed, position and token only, and its penalties, grammars and limits are derived from a
request's prompt and output tokens. So a stream continues here with the same options: its emitted tokens are given to
vLLM as output tokens that it has already. A stream without a seed continues with other random numbers of the same
distribution.

Sampling of a vLLM engine: from Tandem's sequences to vLLM's requests, and from vLLM's outputs to results.

Model Runner V2 draws by (seed, position) itself, so `native_sampling.py` leaves all of it to vLLM. Model Runner V1
keeps a random generator for each request, which cannot continue elsewhere; there `keyed_sampling.py` draws, in the
processes that compute.
"""

import struct
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache, partial
from hashlib import blake2b
from typing import Any

from vllm import SamplingParams as VllmParams
from vllm.sampling_params import StructuredOutputsParams
from vllm.v1.request import Request
from vllm.v1.worker.gpu.sample.logit_bias import MAX_NUM_LOGIT_BIAS_TOKENS, MAX_NUM_STOP_TOKEN_IDS

from engine.backends.torch.sampling.sampler import NO_NUMBERS
from engine.core_types import (
    EngineSequence,
    Pooler,
    RequestFailure,
    SampleResult,
    SamplingParams,
    StructuredOutput,
    TokenLogprobs,
)
from engine.messages.to_engine import Generate
from engine.sampling.grammar import MAX_REASON_CHARS, STACK_BYTES, forms_of, schema_text
from engine.sampling.structured_output import FIELD

FILLS = VllmParams(temperature=0.0, max_tokens=1, ignore_eos=True, detokenize=False)
"""Parameters of a sequence without output: vLLM ends it with a token that nobody reads."""


class Sampling(ABC):
    """Way in which a vLLM engine samples."""

    num_beyond = 0
    """Least number of tokens that a sequence without output gets after its last one. Of windows and states vLLM keeps
    what a boundary needs that lies before the last token of a prompt, and draft layers read the next tokens."""

    def fill_tokens(self, sequence: EngineSequence) -> list[int]:
        """Return the prompt of a sequence without output."""
        count = max(self.num_beyond, sequence.num_tokens_with_items - sequence.num_tokens)
        beyond = sequence.tail[:count]
        return [*sequence.token_ids, *beyond, *[0] * (count - len(beyond))]

    pooler: Pooler | None = None
    """Pooler of an engine that answers with vectors only."""

    def mismatch(self, message: Generate) -> RequestFailure | None:
        """Return why a request is none for this engine's runner; None where it is one."""
        if message.sampling.pooling is None:
            return None
        return RequestFailure("embedding", "the model generates here: set vllm_args: --runner pooling")

    def refusal(self, message: Generate) -> str:
        """Return why a request cannot be sampled here, naming the field; empty where it can."""
        return ""

    @abstractmethod
    def request(
        self, sequence: EngineSequence, request_id: str, arguments: dict[str, Any], wake: Callable[[], None]
    ) -> Request:
        """Return vLLM's request for a sequence.

        `arguments` are those of vLLM's Request that do not depend on sampling. `wake` is called, on any thread, when
        vLLM can schedule a request that it could not schedule before.
        """

    @abstractmethod
    def results(self, sequence: EngineSequence, request: Request, output: Any) -> Sequence[SampleResult]:
        """Return the samples in vLLM's EngineCoreOutput of a request, in order; one with a failure is the last."""

    def forget(self, request_id: str) -> None:  # noqa: B027 - only one of them keeps anything
        """Forget a request that is over."""


def ends_of(sequence: EngineSequence, eos_token_ids: frozenset[int]) -> list[int]:
    """Return the tokens after which a sequence ends."""
    wanted = sequence.sampling
    assert wanted is not None
    ends = wanted.stop_token_ids
    if not wanted.ignore_eos or wanted.structured is not None:
        ends |= eos_token_ids
    return sorted(ends)


def scores_wanted(sequence: EngineSequence) -> int | None:
    """Return vLLM's `prompt_logprobs`: None where no score of the prompt is still to be returned."""
    wanted = sequence.sampling
    assert wanted is not None
    return wanted.prompt_logprobs if sequence.num_to_score > sequence.num_scored else None


BACKEND = "guidance"
"""vLLM's backend of structured output, unless the settings name one: the library with which the router checks."""
GRAMMAR_THREADS = 2


class NativeSampling(Sampling):
    """Sampling by vLLM, with its own structured output."""

    continues_output = True
    """Whether vLLM takes tokens that an earlier attempt emitted as output; else they belong to the prompt."""

    def __init__(self, engine: Any, eos_token_ids: frozenset[int]) -> None:
        """Create it for vLLM's EngineCore."""
        self._manager = engine.structured_output_manager
        self._has_tokenizer = not engine.vllm_config.model_config.skip_tokenizer_init
        configured = engine.vllm_config.structured_outputs_config.backend
        self._backend = BACKEND if configured == "auto" else configured
        self._eos_token_ids = eos_token_ids
        if self._has_tokenizer:
            self._manager.executor = _roomy_threads()

    def refusal(self, message: Generate) -> str:
        wanted = message.sampling
        num_ends = len(wanted.stop_token_ids | self._eos_token_ids)
        if len(wanted.logit_bias) > MAX_NUM_LOGIT_BIAS_TOKENS:
            num_biases, most = len(wanted.logit_bias), MAX_NUM_LOGIT_BIAS_TOKENS
            return f"sampling.logit_bias: {num_biases} tokens, vLLM takes at most {most}"
        if wanted.min_tokens and num_ends > MAX_NUM_STOP_TOKEN_IDS:
            return f"sampling.stop_token_ids: {num_ends} with min_tokens, vLLM takes at most {MAX_NUM_STOP_TOKEN_IDS}"
        return self._refused_structure(wanted)

    def _refused_structure(self, wanted: SamplingParams) -> str:
        """Return why vLLM cannot compile a request's grammar; empty where it can."""
        if wanted.structured is not None and not self._has_tokenizer:
            return f"{wanted.structured.field}: this model has no tokenizer"
        return ""

    def request(
        self, sequence: EngineSequence, request_id: str, arguments: dict[str, Any], wake: Callable[[], None]
    ) -> Request:
        if sequence.sampling is None or sequence.only_fills:
            return Request(request_id, self.fill_tokens(sequence), FILLS, **arguments)
        num_prompt = sequence.num_prompt - sequence.num_emitted_before
        emitted = sequence.token_ids[num_prompt:]
        prompt = sequence.token_ids[:num_prompt] if self.continues_output else list(sequence.token_ids)
        request = Request(request_id, prompt, self._params(sequence), **arguments)
        if emitted and self.continues_output:
            request.append_output_token_ids(emitted)
            # vLLM's statistics of the prompt would take a cached prefix beyond it for an error
            request.prefill_stats = None
        if request.structured_output_request is not None:
            compiled = self._compiled(request)
            if emitted:
                others = self._other_forms(sequence, request)
                compiled = self._manager.executor.submit(_advanced, compiled, request_id, emitted, others)
            request.structured_output_request.grammar = compiled
            if isinstance(compiled, Future):
                compiled.add_done_callback(lambda _: wake())
        return request

    def results(self, sequence: EngineSequence, request: Request, output: Any) -> Sequence[SampleResult]:
        if output.num_nans_in_logits:
            return [SampleResult(-1, failure=NO_NUMBERS)]
        if output.finish_reason is not None and str(output.finish_reason) == "error":
            return [SampleResult(-1, failure=_failure_of(sequence, request))]
        if (logprobs := output.new_logprobs) is None:
            return [_plain(token_id) for token_id in output.new_token_ids]
        count = sequence.sampling.logprobs if sequence.sampling is not None else 0
        # [tokens, 1 + count] each: the sampled token first, then the likeliest ones
        token_ids, values = logprobs.logprob_token_ids, logprobs.logprobs
        return [
            SampleResult(token_id, TokenLogprobs(float(row[0]), *_likeliest(ids, row, count)))
            for token_id, ids, row in zip(output.new_token_ids, token_ids, values, strict=False)
        ]

    def _compiled(self, request: Request) -> Any:
        """Return vLLM's grammar of a request, or the future of one.

        vLLM reads the tokenizer at the first grammar. Where it cannot, the request fails, and no other.
        """
        try:
            self._manager.grammar_init(request)
        except Exception as error:  # any library's; the request's failure names it
            failed: Future[Any] = Future()
            failed.set_exception(ValueError(f"vLLM's {self._backend} cannot read this model's tokenizer: {error}"))
            return failed
        return request.structured_output_request._grammar

    def _other_forms(self, sequence: EngineSequence, request: Request) -> list[Callable[[], Any]]:
        """Return functions that compile further forms to which emitted tokens may keep."""
        assert sequence.sampling is not None
        assert sequence.sampling.structured is not None
        assert request.structured_output_request is not None
        kind, _ = request.structured_output_request.structured_output_key
        others = forms_of(sequence.sampling.structured)[1:]
        return [partial(self._manager.backend.compile_grammar, kind, schema_text(form)) for form in others]

    def _params(self, sequence: EngineSequence) -> VllmParams:
        wanted = sequence.sampling
        assert wanted is not None
        return VllmParams(
            max_tokens=wanted.max_tokens,
            temperature=wanted.temperature,
            top_p=wanted.top_p,
            top_k=wanted.top_k,
            min_p=wanted.min_p,
            seed=None if wanted.seed_is_drawn or wanted.temperature == 0.0 else seed_of(wanted.seed, sequence.choice),
            stop_token_ids=ends_of(sequence, self._eos_token_ids),
            ignore_eos=True,  # its end tokens are among the ones above
            min_tokens=wanted.min_tokens,
            repetition_penalty=wanted.repetition_penalty,
            presence_penalty=wanted.presence_penalty,
            frequency_penalty=wanted.frequency_penalty,
            logit_bias=dict(wanted.logit_bias) or None,
            logprobs=wanted.logprobs,
            prompt_logprobs=scores_wanted(sequence),
            structured_outputs=self._structured(wanted.structured),
            detokenize=False,
        )

    def _structured(self, wanted: StructuredOutput | None) -> StructuredOutputsParams | None:
        if wanted is None:
            return None
        form = forms_of(wanted)[0]
        text = schema_text(form)
        match form.kind:
            case "json_schema" | "json_object":
                params = StructuredOutputsParams(json=text)
            case "regex":
                params = StructuredOutputsParams(regex=text)
            case "grammar":
                params = StructuredOutputsParams(grammar=text)
            case "choice":
                params = StructuredOutputsParams(choice=list(wanted.texts))
        params._backend = self._backend
        return params


@cache
def _plain(token_id: int) -> SampleResult:
    """Return the sample of a token alone; one object for each token of the vocabulary, since making one takes 2 us."""
    return SampleResult(token_id)


def seed_of(seed: int, choice: int) -> int:
    """Return vLLM's seed, a signed number of 64 bits, for a choice of a request; -1 would mean none."""
    if choice:
        digest = blake2b(struct.pack("<QQ", seed, choice), key=b"choice", digest_size=8).digest()
        seed = int.from_bytes(digest, "little")
    signed = seed - (1 << 64) if seed >= 1 << 63 else seed
    return signed if signed != -1 else -(1 << 63)


def _likeliest(token_ids: Any, logprobs: Any, count: int | None) -> tuple[tuple[int, ...], tuple[float, ...]]:
    end = 1 + (count or 0)
    return tuple(map(int, token_ids[1:end])), tuple(map(float, logprobs[1:end]))


def _failure_of(sequence: EngineSequence, request: Request) -> RequestFailure:
    """Return why vLLM ended a request with an error."""
    structured = request.structured_output_request
    if structured is None:
        return RequestFailure("model", "vLLM ended the request with an error; its log has the reason")
    cause = structured.grammar
    reason = str(cause) if isinstance(cause, Exception) else "a sampled token does not match it"
    wanted = sequence.sampling.structured if sequence.sampling is not None else None
    return RequestFailure(wanted.field if wanted is not None else FIELD, reason[:MAX_REASON_CHARS])


def _advanced(compiled: Any, request_id: str, emitted: Sequence[int], others: Sequence[Callable[[], Any]]) -> Any:
    """Return a grammar that has accepted the tokens of an earlier attempt: the first one, or the first other one."""
    grammar = compiled.result() if isinstance(compiled, Future) else compiled
    waiting = list(others)
    while not grammar.accept_tokens(request_id, list(emitted)):
        if not waiting:
            raise ValueError("tokens of an earlier attempt do not match it")
        grammar = waiting.pop(0)()
    return grammar


def _roomy_threads() -> ThreadPoolExecutor:
    """Return threads with the stack that compiling a grammar needs, instead of vLLM's.

    The router accepts grammars whose recursion would overflow an ordinary stack, which ends the process.
    """
    before = threading.stack_size(STACK_BYTES)
    try:
        pool = ThreadPoolExecutor(GRAMMAR_THREADS, "grammars")
        started = threading.Barrier(GRAMMAR_THREADS)
        for waiting in [pool.submit(started.wait) for _ in range(GRAMMAR_THREADS)]:
            waiting.result()
    finally:
        threading.stack_size(before)
    return pool
