"""Structured output: the tokens that may come next under a schema, regex, grammar or choice.

A grammar's state is derived from the sampled tokens only. A request that moves to another worker, or is preempted,
continues unchanged: the state is rebuilt from its tokens.

Needs no torch. llguidance is imported only here; work that a hostile request could cause in it is bounded here or in
`router/models/grammars/grammar_checker.py`.
"""

import json
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import TypeVar
from weakref import WeakKeyDictionary

import llguidance.numpy
import numpy as np
from llguidance import LLExecutor, LLMatcher, LLParserLimits, LLTokenizer
from numpy.typing import NDArray

from cluster.errors import InvalidRequest
from engine.core_types import EngineSequence, RequestFailure, StructuredOutput
from engine.model.detokenizer import load_tokenizer
from engine.model.model_dir import ModelDir
from engine.sampling.json_schemas import ANY_OBJECT, SchemaFault, prepared_grammar, prepared_schema, with_one_space
from engine.sampling.structured_output import FIELD

STACK_BYTES = 64 << 20
"""Stack of the compiling thread, in bytes. llguidance compiles by recursion: a thousand nested rules overflow an
ordinary stack, which would end the process. Virtual memory, used only while compiling."""
CHECK_STACK_BYTES = 16 << 20
"""Stack with which a grammar is checked; smaller, so that accepted grammars have spare stack in the engine."""
MAX_COMPILED = 128
MAX_THREADS = 8
MAX_REASON_CHARS = 300
"""Longest quoted reason: llguidance quotes whole grammars, and gRPC's trailers hold 8 KiB."""
REPEATS_WHITESPACE = tuple(map(int, llguidance.__version__.split(".")[:2])) < (1, 9)
"""Whether llguidance lets a schema's `whitespace_pattern` repeat; vLLM comes with such a version."""
_WORD = 32

_T = TypeVar("_T")


class GrammarCompiler:
    """Compiler of grammars over one model's tokens.

    From any thread; one grammar is compiled at a time.
    """

    def __init__(self, model_dir: ModelDir, stack_bytes: int = STACK_BYTES) -> None:
        """Create the compiler.

        Raises InvalidRequest when this model cannot have structured output.
        """
        self._tokens = _tokens_of(model_dir)
        self._stack_bytes = stack_bytes
        self._limits = LLParserLimits(verbose_errors=False)
        self._compiled: OrderedDict[StructuredOutput, LLMatcher | InvalidRequest] = OrderedDict()
        """Results by grammar, most recently used last."""
        self._lock = threading.Lock()
        """Lock of `_compiled`, held for moments only."""
        self._compiling = threading.Lock()
        self._executor = LLExecutor(min(MAX_THREADS, len(os.sched_getaffinity(0))))

    def compile(self, structured: StructuredOutput) -> LLMatcher:
        """Return a matcher at the beginning of the output.

        Raises InvalidRequest with llguidance's cause.
        """
        if (compiled := self._find(structured)) is None:
            with self._compiling:
                if (compiled := self._find(structured)) is None:  # another thread may have compiled it meanwhile
                    compiled = self._add(structured, _on_stack(self._stack_bytes, lambda: self._built(structured)))
        if isinstance(compiled, InvalidRequest):
            raise InvalidRequest(compiled.field, compiled.message)
        return compiled.deep_copy()

    def knows(self, structured: StructuredOutput) -> bool:
        """Return whether the result of compiling a grammar is at hand."""
        with self._lock:
            return structured in self._compiled

    def prepared(self, structured: StructuredOutput) -> StructuredOutput:
        """Return the form with its schemas as llguidance can keep to them.

        Raises InvalidRequest for a schema that no grammar can keep to.
        """
        if structured.kind not in ("json_schema", "grammar"):
            return structured
        prepare = prepared_schema if structured.kind == "json_schema" else prepared_grammar
        try:
            return replace(structured, texts=(prepare(structured.texts[0], self._covers),))
        except SchemaFault as error:
            raise InvalidRequest(structured.field, _shortened(str(error))) from None
        except (ValueError, RecursionError):
            return structured  # compiling reports the error

    def _covers(self, names: Sequence[str], pattern: str) -> bool:
        """Return whether a pattern of keys matches these keys only: whether no other key can come after one of them."""
        schema = {
            "x-guidance": {"whitespace_flexible": False},
            "type": "object",
            "properties": {name: {"const": 1} for name in names},
            "patternProperties": {pattern: {"const": 1}},
            "additionalProperties": False,
        }
        grammar = LLMatcher.grammar_from_json_schema(json.dumps(schema))
        matcher = LLMatcher(self._tokens, grammar, log_level=0, limits=self._limits)
        before = self._tokens.tokenize_str(f"{{{json.dumps(names[-1], ensure_ascii=False)}:1,")
        if matcher.is_error() or matcher.try_consume_tokens(before) < len(before):
            return False
        self.masks([matcher])
        return bool(matcher.is_error())

    def _find(self, structured: StructuredOutput) -> LLMatcher | InvalidRequest | None:
        with self._lock:
            if structured in self._compiled:
                self._compiled.move_to_end(structured)
            return self._compiled.get(structured)

    def _add(self, structured: StructuredOutput, result: LLMatcher | InvalidRequest) -> LLMatcher | InvalidRequest:
        with self._lock:
            self._compiled[structured] = result
            if len(self._compiled) > MAX_COMPILED:
                self._compiled.popitem(last=False)
        return result

    def masks(self, matchers: Sequence[LLMatcher]) -> NDArray[np.int32]:
        """Return bit masks [matchers, words]: bit t % 32 of word t // 32 is set where token t may come next.

        A matcher that fails reports it (`is_error`), and its row is meaningless.
        """
        bits = np.zeros((len(matchers), -(-self._tokens.vocab_size // _WORD)), np.int32)
        pairs = [(matcher, row) for row, matcher in enumerate(matchers)]
        llguidance.numpy.fill_next_token_bitmask_par(self._executor, pairs, bits)
        return bits

    def _built(self, structured: StructuredOutput) -> LLMatcher | InvalidRequest:
        """Compile a grammar and its first mask, which is often the largest; copies share it."""
        try:
            matcher = self._build(structured)
        except InvalidRequest as error:
            return error
        bits = np.zeros((1, -(-self._tokens.vocab_size // _WORD)), np.int32)
        llguidance.numpy.fill_next_token_bitmask(matcher, bits, 0)
        return matcher

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
    """Return the reason why a matcher is in error."""
    text = matcher.get_error().removesuffix("<non-verbose/>").strip()
    return _shortened("nothing matches it" if text == "NoExtensionBias" else text)


def _shortened(text: str) -> str:
    return text if len(text) <= MAX_REASON_CHARS else f"{text[:MAX_REASON_CHARS]} ..."


def forms_of(structured: StructuredOutput) -> list[StructuredOutput]:
    """Return the forms to which an output may be held here, the one to prefer first.

    An output that began on another engine may have line breaks, and then keeps only to the last one.
    """
    if not REPEATS_WHITESPACE or structured.kind in ("regex", "choice"):
        return [structured]
    text = schema_text(structured)
    if (bounded := with_one_space(text)) == text:
        return [structured]
    kind = structured.kind if structured.kind == "grammar" else "json_schema"
    return [replace(structured, kind=kind, texts=(bounded,)), structured]


def schema_text(structured: StructuredOutput) -> str:
    """Return the text of a schema, regex or grammar."""
    return ANY_OBJECT if structured.kind == "json_object" else structured.texts[0]


def _source(structured: StructuredOutput) -> str:
    """Return the form in llguidance's format.

    Raises ValueError for a schema that is not JSON, which llguidance does not check.
    """
    if structured.kind == "json_object":
        return LLMatcher.grammar_from_json_schema(ANY_OBJECT)
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
    """Return a regex that matches exactly this text."""
    return "".join(char if char.isascii() and char.isalnum() else f"\\x{{{ord(char):x}}}" for char in text)


def _tokens_of(model_dir: ModelDir) -> LLTokenizer:
    tokenizer = load_tokenizer(model_dir)
    if tokenizer is None:
        raise InvalidRequest(
            FIELD, "this model has no tokenizer, so its tokens have no text that a grammar could check"
        )
    eos_token_ids = sorted(model_dir.eos_token_ids)
    if not eos_token_ids:
        raise InvalidRequest(FIELD, "this model has no end token, so its output can never be complete")
    tokenizer.no_padding()
    tokenizer.no_truncation()
    # Many models have more logits than tokens; llguidance never allows those in between.
    num_tokens = max(model_dir.vocab_size, tokenizer.get_vocab_size(with_added_tokens=True))
    try:
        return LLTokenizer(tokenizer.to_str(), n_vocab=num_tokens, eos_token=eos_token_ids)
    except ValueError as error:
        raise InvalidRequest(FIELD, _shortened(f"cannot be compiled for this model's tokenizer: {error}")) from None


def _on_stack(stack_bytes: int, work: Callable[[], _T]) -> _T:
    """Run `work` on a thread with a stack of this size, and raise what it raises."""
    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="grammar") as pool:
        previous = threading.stack_size(stack_bytes)
        try:
            doing = pool.submit(work)  # starts the thread
        finally:
            threading.stack_size(previous)
        return doing.result()


@dataclass(slots=True)
class _State:
    """A matcher, and the number of sampled tokens it has seen."""

    matcher: LLMatcher
    num_seen: int = 0


def _rebuilt(compiler: GrammarCompiler, sequence: EngineSequence, structured: StructuredOutput) -> _State:
    """Return a state under the first form to which a sequence's output keeps; it has seen all of it or nothing."""
    *preferred, last = forms_of(structured)
    sampled = sequence.output_token_ids
    for form in preferred:
        matcher = compiler.compile(form)
        if matcher.try_consume_tokens(sampled) == len(sampled):
            return _State(matcher, len(sampled))
    return _State(compiler.compile(last))


@dataclass(frozen=True, slots=True)
class TokenMasks:
    """Masks of one batch."""

    rows: list[int]
    """Rows of the batch that have a grammar and can continue."""
    bits: NDArray[np.int32]
    """Bit masks [rows, words]: bit t % 32 of word t // 32 is set where token t may come next."""
    failures: dict[int, RequestFailure]
    """Rows that cannot continue, with the reason."""


class Grammars:
    """Grammar states of an engine's sequences.

    Used by the compute thread.

    A state is a cache: kept while its sequence lives, advanced by the tokens sampled since its last use, and rebuilt
    from the sequence's tokens when missing.
    """

    def __init__(self, model_dir: ModelDir) -> None:
        self._compiler: GrammarCompiler | None = None
        self._refusal: InvalidRequest | None = None
        self.states: WeakKeyDictionary[EngineSequence, _State] = WeakKeyDictionary()
        try:  # at start, since a large vocabulary takes seconds, for which every stream would wait at the first request
            self._compiler = GrammarCompiler(model_dir)
        except InvalidRequest as error:
            self._refusal = error

    def compile_ahead(self, structured: StructuredOutput) -> None:
        """Compile a grammar before a step needs it, from a thread that no step waits for.

        Raises InvalidRequest.
        """
        if self._compiler is not None:
            self._compiler.compile(forms_of(structured)[0])

    def knows(self, structured: StructuredOutput) -> bool:
        """Return whether sampling needs no compilation for this grammar."""
        return self._compiler is None or self._compiler.knows(forms_of(structured)[0])

    def masks(self, sequences: Sequence[EngineSequence]) -> TokenMasks | None:
        """Return the masks of a batch, or None when no sequence has a grammar."""
        matchers: dict[int, LLMatcher] = {}
        failures: dict[int, RequestFailure] = {}
        for row, sequence in enumerate(sequences):
            if sequence.sampling is None or sequence.sampling.structured is None:
                continue
            try:
                matchers[row] = self._advanced(sequence, sequence.sampling.structured)
            except InvalidRequest as error:
                failures[row] = RequestFailure(error.field, error.message)
        if not matchers and not failures:
            return None
        bits = self._bits(list(matchers.values()))
        ended = self._ended(sequences, matchers, bits)
        kept = [at for at, row in enumerate(matchers) if row not in ended]
        return TokenMasks([row for row in matchers if row not in ended], bits[kept], failures | ended)

    def _advanced(self, sequence: EngineSequence, structured: StructuredOutput) -> LLMatcher:
        """Return the sequence's matcher.

        Raises InvalidRequest when the grammar does not compile or the tokens violate it.
        """
        if self._compiler is None:
            assert self._refusal is not None
            raise InvalidRequest(self._refusal.field, self._refusal.message)
        state = self.states.get(sequence)
        if state is None or state.num_seen > sequence.num_sampled:
            state = self.states[sequence] = _rebuilt(self._compiler, sequence, structured)
        unseen = sequence.num_sampled - state.num_seen
        if unseen and not state.matcher.consume_tokens(sequence.token_ids[sequence.num_tokens - unseen :]):
            raise InvalidRequest(structured.field, reason_of(state.matcher))
        state.num_seen += unseen
        return state.matcher

    def _bits(self, matchers: Sequence[LLMatcher]) -> NDArray[np.int32]:
        if self._compiler is None or not matchers:
            return np.zeros((0, 0), np.int32)
        return self._compiler.masks(matchers)

    def _ended(
        self, sequences: Sequence[EngineSequence], matchers: dict[int, LLMatcher], bits: NDArray[np.int32]
    ) -> dict[int, RequestFailure]:
        """Return rows whose grammar exceeded llguidance's limits, or that have no allowed token."""
        failures: dict[int, RequestFailure] = {}
        for at, (row, matcher) in enumerate(matchers.items()):
            sampling = sequences[row].sampling
            assert sampling is not None
            assert sampling.structured is not None
            if matcher.is_error():
                failures[row] = RequestFailure(sampling.structured.field, reason_of(matcher))
            elif not bits[at].any():
                failures[row] = RequestFailure(sampling.structured.field, "no token of this model goes on with it")
        return failures
