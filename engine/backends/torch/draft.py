"""A smaller model that guesses what the served one will say. What it says is verified, so it can cost time and no more.

It has a KV pool of its own, with a block for each block of the engine's: a sequence's KV lies in the blocks of the same
numbers in both. So there is nothing to allocate, and nothing to free. What a block of it holds was written here only,
never borrowed or restored, and who gets the block next has other tokens. So this keeps account of how much of each
sequence the draft model has read (`_Reading`), and of which full block holds which tokens (`_keys`): what is cached
for the engine is cached for it too, if it has read it. It reads what it lacks before it guesses, some of it each step.
"""

import time
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from pathlib import Path
from weakref import WeakKeyDictionary

from engine.backends.torch.device import read_back
from engine.backends.torch.loader import kv_layout, load_model
from engine.backends.torch.paged_model import PagedModel
from engine.block_keys import BlockKey
from engine.core_types import Chunk, SamplingParams, Sequence
from engine.errors import EngineStartError
from engine.model.detokenizer import load_tokenizer
from engine.model.model_dir import ModelDir
from engine.model.quantization import AS_SAVED, QuantizationConfig
from engine.model_runner import ModelInfo

FIELD = "speculation"
READ_TOKENS = 256
"""Of prompts, that the draft model reads in one step: the step waits for it."""
WEIGHT = 0.1
"""Of the newest pass in the mean of what one takes."""
_SAMPLES = SamplingParams(max_tokens=1, temperature=0)


@dataclass(slots=True)
class _Reading:
    """What the draft model has of a sequence."""

    shadow: Sequence
    """The sequence as the draft model sees it: its tokens and then guesses, in the sequence's own blocks, its KV as far
    as the draft model has computed it."""
    num_known: int = 0
    """Leading tokens of the shadow that are the sequence's, not guesses."""
    num_preemptions: int = 0


class DraftModel:
    """Used by the thread that computes."""

    def __init__(
        self,
        path: Path,
        dtype: str,
        served: PagedModel,
        served_dir: ModelDir | None,
        info: ModelInfo,
        quantization: QuantizationConfig = AS_SAVED,
    ) -> None:
        """`quantization` is that of the served model: of its weights the draft's are of the same kind. Raises
        EngineStartError for a model that cannot guess for `served`."""
        try:
            model_dir = ModelDir.open(path)
            _check_vocabulary(model_dir, served_dir, info)
            model = load_model(model_dir, dtype, served.device, QuantizationConfig(weights=quantization.weights))
            layout = kv_layout(model, served.layout.block_tokens)
        except EngineStartError as error:
            if error.field == FIELD:
                raise
            raise EngineStartError(FIELD, f"{path} is no draft model: {error.reason}") from error
        self._max_context_tokens = model_dir.max_context_tokens
        own_info = replace(info, max_context_tokens=self._max_context_tokens)
        self._paged = PagedModel(model, layout, own_info, served.num_blocks, served.backend, served.device)
        self._readings: WeakKeyDictionary[Sequence, _Reading] = WeakKeyDictionary()
        self._keys: dict[int, BlockKey] = {}
        """By block: the tokens of which its KV is, where that is a full block."""
        self.pass_s = 0.0
        """What one guess of each sequence took lately."""

    def draft_token(self, batch: Seq[Chunk]) -> list[Chunk]:
        """The same batch with guesses made: as many of `num_drafts` as the sequence's KV is ready for, and the context
        of the draft model leaves room for."""
        wanted = {place: self._caught_up(chunk.sequence) for place, chunk in enumerate(batch) if chunk.num_drafts}
        left, guessing = READ_TOKENS, dict[int, _Reading]()
        for place, reading in wanted.items():
            shadow = reading.shadow
            if shadow.num_tokens >= self._max_context_tokens:
                continue
            if shadow.num_remaining <= left:
                guessing[place] = reading
            elif left:
                self._compute([Chunk(shadow, shadow.num_computed, left)])
            left = max(0, left - shadow.num_remaining)
        draft_tokens = self._draft_tokens({place: batch[place].num_drafts for place in guessing}, guessing)
        return [
            replace(chunk, draft_tokens=tuple(draft_tokens.get(place, ())), num_drafts=0) if chunk.num_drafts else chunk
            for place, chunk in enumerate(batch)
        ]

    def _draft_tokens(self, counts: dict[int, int], readings: dict[int, _Reading]) -> dict[int, list[int]]:
        """One token further for all at once, until each has its count."""
        draft_tokens: dict[int, list[int]] = {place: [] for place in readings}
        while places := [
            place for place, count in counts.items() if self._goes_on(draft_tokens[place], count, readings[place])
        ]:
            began_at = time.perf_counter()
            shadows = [readings[place].shadow for place in places]
            chunks = [Chunk(shadow, shadow.num_computed, shadow.num_remaining) for shadow in shadows]
            for place, shadow, token in zip(places, shadows, self._compute(chunks), strict=True):
                shadow.token_ids.append(token)
                draft_tokens[place].append(token)
            if all(chunk.count <= 2 for chunk in chunks):  # no reading: what was accepted of the last step, at most
                taken_s = time.perf_counter() - began_at
                self.pass_s += WEIGHT * (taken_s - self.pass_s) if self.pass_s else taken_s
        return draft_tokens

    def _goes_on(self, draft_tokens: list[int], count: int, reading: _Reading) -> bool:
        return len(draft_tokens) < count and reading.shadow.num_tokens < self._max_context_tokens

    def _caught_up(self, sequence: Sequence) -> _Reading:
        """The reading of a sequence, with the tokens that it has now and no guesses."""
        reading = self._readings.get(sequence)
        if reading is None or reading.num_preemptions != sequence.num_preemptions:
            reading = self._readings[sequence] = self._begin(sequence)
        shadow, tokens = reading.shadow, sequence.token_ids
        right = reading.num_known
        while right < min(len(tokens), len(shadow.token_ids)) and tokens[right] == shadow.token_ids[right]:
            right += 1
        shadow.token_ids[right:] = tokens[right:]
        shadow.num_computed = min(shadow.num_computed, right, len(tokens) - 1)
        shadow.blocks = sequence.blocks
        reading.num_known = len(tokens)
        return reading

    def _begin(self, sequence: Sequence) -> _Reading:
        shadow = Sequence(
            request_id=sequence.request_id,
            token_ids=list(sequence.token_ids),
            num_prompt=sequence.num_tokens,
            root=sequence.root,
            sampling=_SAMPLES,
            priority=0,
            arrival=0,
            keys=sequence.keys,
        )
        for block, key in zip(sequence.blocks, sequence.keys, strict=False):
            if self._keys.get(block) != key:
                break
            shadow.num_computed += self._paged.layout.block_tokens
        return _Reading(shadow, num_known=sequence.num_tokens, num_preemptions=sequence.num_preemptions)

    def _compute(self, chunks: Seq[Chunk]) -> list[int]:
        """Read the chunks; the likeliest next token of each that reaches its sequence's end."""
        width = self._paged.layout.block_tokens
        for chunk in chunks:
            shadow, end = chunk.sequence, chunk.start + chunk.count
            for index in range(chunk.start // width, -(-end // width)):
                block = shadow.blocks[index]
                self._keys.pop(block, None)
                if (index + 1) * width <= end and index < len(shadow.keys):
                    self._keys[block] = shadow.keys[index]
        logits = self._paged.logits(chunks)
        for chunk in chunks:
            chunk.sequence.num_computed += chunk.count
        return read_back(self._paged.argmax(logits)) if any(chunk.samples for chunk in chunks) else []


def _check_vocabulary(model_dir: ModelDir, served_dir: ModelDir | None, info: ModelInfo) -> None:
    """Raises EngineStartError unless a token means the same to both."""
    if model_dir.vocab_size != info.vocab_size:
        sizes = f"{model_dir.vocab_size} tokens, the served model's {info.vocab_size}"
        raise EngineStartError(FIELD, f"the vocabulary of {model_dir.path} has {sizes}")
    if served_dir is None or not (served_dir.has_tokenizer and model_dir.has_tokenizer):
        return
    own, served = load_tokenizer(model_dir), load_tokenizer(served_dir)
    assert own is not None
    assert served is not None
    if own.get_vocab() != served.get_vocab():
        raise EngineStartError(FIELD, f"tokens of {model_dir.path} are others than the served model's")
