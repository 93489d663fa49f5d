"""Structured output: which tokens may come next, so that the output keeps to a schema, regex, grammar or choice.

A grammar's state is derived from the tokens sampled so far and from nothing else. A request that moves to another
worker, or whose sequence is computed anew, goes on as if nothing had happened: the state is made again from its tokens.

Needs no torch. llguidance is imported here only; everything it could be asked to do by a hostile request is bounded
here or in `router/models/grammar_checker.py`.
"""

import json
import os
import threading
from collections import OrderedDict
from collections.abc import Callable
from collections.abc import Sequence as Seq
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar
from weakref import WeakKeyDictionary

import llguidance.numpy
import numpy as np
from llguidance import LLExecutor, LLMatcher, LLParserLimits, LLTokenizer
from numpy.typing import NDArray

from cluster.errors import InvalidRequest
from engine.core.core_types import AnyPlace, RequestFailure, SamplePosition, Sequence, StructuredOutput
from engine.model.detokenizer import load_tokenizer
from engine.model.model_dir import ModelDir
from engine.sampling.structured_output import FIELD

STACK_BYTES = 64 << 20
"""llguidance compiles by recursion: rules that name each other a thousand deep overflow an ordinary stack, which would
end the process. Virtual memory, and only while a grammar is compiled."""
CHECK_STACK_BYTES = 16 << 20
"""What a grammar is checked with. Less, so that what passed has room to spare in the engine."""
MAX_COMPILED = 128
MAX_THREADS = 8
MAX_REASON_CHARS = 300
"""llguidance quotes whole grammars; gRPC's trailers hold 8 KiB."""
_WORD = 32

_T = TypeVar("_T")


class GrammarCompiler:
    """Grammars over one model's tokens. Used by one thread at a time."""

    def __init__(self, model_dir: ModelDir, stack_bytes: int = STACK_BYTES) -> None:
        """Raises InvalidRequest when this model can have no structured output: every such request is at fault."""
        self._tokens = _tokens_of(model_dir)
        self._stack_bytes = stack_bytes
        self._limits = LLParserLimits(verbose_errors=False)
        self._compiled: OrderedDict[StructuredOutput, LLMatcher] = OrderedDict()
        self._executor = LLExecutor(min(MAX_THREADS, len(os.sched_getaffinity(0))))

    def compile(self, structured: StructuredOutput) -> LLMatcher:
        """A matcher at the beginning of the output. Raises InvalidRequest with llguidance's cause."""
        if structured not in self._compiled:
            self._compiled[structured] = _on_stack(self._stack_bytes, lambda: self._build(structured))
            if len(self._compiled) > MAX_COMPILED:
                self._compiled.popitem(last=False)
        self._compiled.move_to_end(structured)
        return self._compiled[structured].deep_copy()

    def masks(self, matchers: Seq[LLMatcher]) -> NDArray[np.int32]:
        """[matchers, words]: bit t % 32 of word t // 32 is set where token t may come next.

        A matcher that fails on the way says so itself (`is_error`); its row means nothing then.
        """
        bits = np.zeros((len(matchers), -(-self._tokens.vocab_size // _WORD)), np.int32)
        pairs = [(matcher, row) for row, matcher in enumerate(matchers)]
        llguidance.numpy.fill_next_token_bitmask_par(self._executor, pairs, bits)
        return bits

    def _build(self, structured: StructuredOutput) -> LLMatcher:
        try:
            grammar = _source(structured)
        except (ValueError, RecursionError) as error:
            raise InvalidRequest(structured.field, _shortened(f"not JSON: {error}")) from None
        matcher = LLMatcher(self._tokens, grammar, log_level=0, limits=self._limits)
        if matcher.is_error():
            raise InvalidRequest(structured.field, reason_of(matcher))
        return matcher


def reason_of(matcher: LLMatcher) -> str:
    """Why a matcher is in error."""
    text = matcher.get_error().removesuffix("<non-verbose/>").strip()
    return _shortened("nothing matches it" if text == "NoExtensionBias" else text)


def _shortened(text: str) -> str:
    return text if len(text) <= MAX_REASON_CHARS else f"{text[:MAX_REASON_CHARS]} ..."


def _source(structured: StructuredOutput) -> str:
    """In llguidance's own words. Raises ValueError for a schema that is not JSON, which llguidance does not check."""
    if structured.kind == "json_object":
        return LLMatcher.grammar_from_json_schema('{"type": "object"}')
    if structured.kind == "choice":
        return LLMatcher.grammar_from_regex("|".join(map(_literally, structured.texts)))
    (text,) = structured.texts
    if structured.kind == "json_schema":
        json.loads(text)
        return LLMatcher.grammar_from_json_schema(text)
    if structured.kind == "regex":
        return LLMatcher.grammar_from_regex(text)
    # Wrapped, since a text that begins with a brace would be read as llguidance's inner format and not as Lark.
    return json.dumps({"grammars": [{"lark_grammar": text}]})


def _literally(text: str) -> str:
    """A regex that matches just this."""
    return "".join(char if char.isascii() and char.isalnum() else f"\\x{{{ord(char):x}}}" for char in text)


def _tokens_of(model_dir: ModelDir) -> LLTokenizer:
    tokenizer = load_tokenizer(model_dir)
    if tokenizer is None:
        raise InvalidRequest(FIELD, "this model has no tokenizer, so its tokens cannot be told apart by their text")
    eos_token_ids = sorted(model_dir.eos_token_ids)
    if not eos_token_ids:
        raise InvalidRequest(FIELD, "this model has no end token, so its output can never be complete")
    tokenizer.no_padding()
    tokenizer.no_truncation()
    # Many models have more logits than tokens; llguidance never allows the ones between.
    num_tokens = max(model_dir.vocab_size, tokenizer.get_vocab_size(with_added_tokens=True))
    try:
        return LLTokenizer(tokenizer.to_str(), n_vocab=num_tokens, eos_token=eos_token_ids)
    except ValueError as error:
        raise InvalidRequest(FIELD, _shortened(f"not with this model's tokenizer: {error}")) from None


def _on_stack(stack_bytes: int, work: Callable[[], _T]) -> _T:
    """Do it on a thread with a stack of this size. Raises what it raises."""
    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="grammar") as pool:
        previous = threading.stack_size(stack_bytes)
        try:
            doing = pool.submit(work)  # starts the thread
        finally:
            threading.stack_size(previous)
        return doing.result()


@dataclass(slots=True)
class _State:
    """A matcher, and how many of the sequence's sampled tokens it has seen."""

    matcher: LLMatcher
    num_seen: int = 0


def _after(matcher: LLMatcher | None, draft_token: int) -> LLMatcher | None:
    """A copy that has seen the guess too; None where that cannot follow."""
    if matcher is None:
        return None
    copy = matcher.deep_copy()
    return copy if copy.consume_token(draft_token) else None


@dataclass(frozen=True, slots=True)
class TokenMasks:
    """What grammars say of one batch."""

    rows: list[int]
    """The rows of the batch that have a grammar, and can go on."""
    bits: NDArray[np.int32]
    """[rows, words]: bit t % 32 of word t // 32 is set where token t may come next."""
    failures: dict[int, RequestFailure]
    """Rows that cannot go on."""
    unknown: frozenset[int] = frozenset()
    """Rows after a guess of which nothing is said: the grammar does not allow it, or ends with it."""


class Grammars:
    """The grammar states of the sequences of one engine. Used by the thread that computes.

    A state is a cache: kept for as long as its sequence lives, advanced by the tokens sampled since it was last
    looked at, and made from the sequence's tokens when there is none.
    """

    def __init__(self, model_dir: ModelDir) -> None:
        self._compiler: GrammarCompiler | None = None
        self._refusal: InvalidRequest | None = None
        self._states: WeakKeyDictionary[Sequence, _State] = WeakKeyDictionary()
        try:  # now and not with the first request, for which every stream would have to wait: seconds, if it is large
            self._compiler = GrammarCompiler(model_dir)
        except InvalidRequest as error:
            self._refusal = error

    def masks(self, places: Seq[AnyPlace]) -> TokenMasks | None:
        """Of a batch; None when no sequence of it has a grammar. The places after a sequence's guesses come next to its
        own, in order."""
        matchers: dict[int, LLMatcher] = {}
        failures: dict[int, RequestFailure] = {}
        unknown: set[int] = set()
        for row, place in enumerate(places):
            if place.sampling is None or place.sampling.structured is None:
                continue
            if isinstance(place, SamplePosition):
                if (after := _after(matchers.get(row - 1), place.draft_tokens[-1])) is not None:
                    matchers[row] = after
                else:
                    unknown.add(row)
                continue
            try:
                matchers[row] = self._advanced(place, place.sampling.structured)
            except InvalidRequest as error:
                failures[row] = RequestFailure(error.field, error.message)
        if not matchers and not failures:
            return None
        bits = self._bits(list(matchers.values()))
        ended = self._ended(places, matchers, bits)
        kept = [at for at, row in enumerate(matchers) if row not in ended]
        unknown |= {
            row for row in ended if isinstance(places[row], SamplePosition)
        }  # the next step says why, if it comes to it
        failures |= {row: failure for row, failure in ended.items() if row not in unknown}
        return TokenMasks([row for row in matchers if row not in ended], bits[kept], failures, frozenset(unknown))

    def _advanced(self, sequence: Sequence, structured: StructuredOutput) -> LLMatcher:
        """Raises InvalidRequest when the grammar does not compile or the tokens do not follow it."""
        if self._compiler is None:
            assert self._refusal is not None
            raise InvalidRequest(self._refusal.field, self._refusal.message)
        state = self._states.get(sequence)
        if state is None or state.num_seen > sequence.num_sampled:
            state = self._states[sequence] = _State(self._compiler.compile(structured))
        unseen = sequence.num_sampled - state.num_seen
        if unseen and not state.matcher.consume_tokens(sequence.token_ids[sequence.num_tokens - unseen :]):
            raise InvalidRequest(structured.field, reason_of(state.matcher))
        state.num_seen += unseen
        return state.matcher

    def _bits(self, matchers: Seq[LLMatcher]) -> NDArray[np.int32]:
        if self._compiler is None or not matchers:
            return np.zeros((0, 0), np.int32)
        return self._compiler.masks(matchers)

    def _ended(
        self, places: Seq[AnyPlace], matchers: dict[int, LLMatcher], bits: NDArray[np.int32]
    ) -> dict[int, RequestFailure]:
        """Rows whose grammar became too complex for llguidance's limits, or that have no token to go on with."""
        failures: dict[int, RequestFailure] = {}
        for at, (row, matcher) in enumerate(matchers.items()):
            sampling = places[row].sampling
            assert sampling is not None
            assert sampling.structured is not None
            if matcher.is_error():
                failures[row] = RequestFailure(sampling.structured.field, reason_of(matcher))
            elif not bits[at].any():
                failures[row] = RequestFailure(sampling.structured.field, "no token of this model goes on with it")
        return failures
