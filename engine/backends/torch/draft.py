"""Draft model: a smaller model that proposes tokens for the served model to verify.

Wrong draft tokens cost time and never change the output.

The draft model has its own KV pool with one block for each block of the engine's pool. A sequence's KV lies in blocks
of the same numbers in both pools, so there is nothing to allocate or free. The draft pool's KV is always computed here,
never borrowed or restored, and the next owner of a block has other tokens. So this module records how much of each
sequence the draft model has read (`_Reading`), and which full block holds which tokens (`_keys`). A prefix cached for
the engine is cached for the draft model too, if the draft model has read it. The draft model reads missing tokens
before it drafts, a limited number in each step.
"""

import time
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from pathlib import Path
from weakref import WeakKeyDictionary

from engine.backends.torch.device import read_back
from engine.backends.torch.loading.loader import kv_layout, load_model
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
"""Prompt tokens that the draft model reads in one step, at most: the step waits for it."""
WEIGHT = 0.1
"""Weight of the newest pass in the moving average of a pass's duration."""
_SAMPLES = SamplingParams(max_tokens=1, temperature=0)


@dataclass(slots=True)
class _Reading:
    """Draft model's progress on one sequence."""

    shadow: Sequence
    """Sequence as the draft model sees it: the served tokens, then draft tokens.

    It uses the served sequence's block numbers. Its KV covers what the draft model has computed."""
    num_known: int = 0
    """Leading tokens of the shadow that are the sequence's own, not draft tokens."""
    num_preemptions: int = 0


class DraftModel:
    """Draft model with its KV pool.

    Only the computing thread uses it.
    """

    def __init__(
        self,
        path: Path,
        dtype: str,
        served: PagedModel,
        served_dir: ModelDir | None,
        info: ModelInfo,
        quantization: QuantizationConfig = AS_SAVED,
    ) -> None:
        """Load the draft model.

        `quantization` is the served model's: the draft's weights get the same kind. Raises EngineStartError for a model
        that cannot draft for `served`.
        """
        try:
            model_dir = ModelDir.open(path)
            _check_vocabulary(model_dir, served_dir, info)
            model = load_model(model_dir, dtype, served.device, QuantizationConfig(weights=quantization.weights))
            layout = kv_layout(model, served.layout.block_tokens)
        except EngineStartError as error:
            if error.field == FIELD:
                raise
            raise EngineStartError(FIELD, f"{path} is not a draft model: {error.reason}") from error
        self._max_context_tokens = model_dir.max_context_tokens
        own_info = replace(info, max_context_tokens=self._max_context_tokens)
        self._paged = PagedModel(model, layout, own_info, served.num_blocks, served.backend, served.device)
        self._readings: WeakKeyDictionary[Sequence, _Reading] = WeakKeyDictionary()
        self._keys: dict[int, BlockKey] = {}
        """Keys of full blocks, by block number: the tokens whose KV the block holds."""
        self.pass_s = 0.0
        """Recent duration of one pass, which drafts one token for each sequence, in seconds."""

    def draft_token(self, batch: Seq[Chunk]) -> list[Chunk]:
        """Return the same batch with draft tokens added.

        Each chunk gets as many of `num_drafts` as the sequence's KV is ready for and the draft model's context leaves
        room for.
        """
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
        """Draft one token per pass for all sequences at once, until each has its count."""
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
            # no prompt tokens to read: at most the tokens accepted in the last step
            if all(chunk.count <= 2 for chunk in chunks):
                taken_s = time.perf_counter() - began_at
                self.pass_s += WEIGHT * (taken_s - self.pass_s) if self.pass_s else taken_s
        return draft_tokens

    def _goes_on(self, draft_tokens: list[int], count: int, reading: _Reading) -> bool:
        return len(draft_tokens) < count and reading.shadow.num_tokens < self._max_context_tokens

    def _caught_up(self, sequence: Sequence) -> _Reading:
        """Return the sequence's reading, with its present tokens and no draft tokens."""
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
        """Compute the chunks and return the likeliest next token of each chunk that reaches its sequence's end."""
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
    """Check that a token means the same to both models.

    Raises EngineStartError.
    """
    if model_dir.vocab_size != info.vocab_size:
        sizes = f"{model_dir.vocab_size} tokens, the served model's {info.vocab_size}"
        raise EngineStartError(FIELD, f"the vocabulary of {model_dir.path} has {sizes}")
    if served_dir is None or not (served_dir.has_tokenizer and model_dir.has_tokenizer):
        return
    own, served = load_tokenizer(model_dir), load_tokenizer(served_dir)
    assert own is not None
    assert served is not None
    if own.get_vocab() != served.get_vocab():
        raise EngineStartError(FIELD, f"tokens of {model_dir.path} differ from the served model's")
