"""What followers are told of a batch is what they need of it: they make the same one."""

import gc
import pickle
import random

from hypothesis import given
from hypothesis import strategies as st

from engine.core_types import Chunk, SamplingParams, Sequence
from engine.tensor_parallel.steps import StepReader, StepWriter, filled_blocks

WIDTH = 4
SAMPLING = SamplingParams(max_tokens=50, temperature=0)
SCORING = SamplingParams(max_tokens=50, temperature=0, prompt_logprobs=1)


def sequence_of(tokens: list[int], sampling: SamplingParams | None = SAMPLING, emitted: int = 0) -> Sequence:
    return Sequence("r", tokens, len(tokens), b"root", sampling, 0, 0, num_emitted_before=emitted)


def needed(chunk: Chunk) -> tuple[object, ...]:
    """What computing reads of it."""
    blocks = chunk.sequence.blocks[: -(-chunk.end // WIDTH)]
    scored = chunk.sequence.token_ids[chunk.scored.start + 1 : chunk.scored.stop + 1]
    return chunk.token_ids, chunk.start, chunk.num_rows, blocks, chunk.samples, chunk.scored, scored, chunk.answers


class Told:
    """A writer and a reader, and the wire between them."""

    def __init__(self) -> None:
        self.writer, self.reader = StepWriter(), StepReader()
        self.num_bytes = 0

    def step(self, batch: list[Chunk]) -> list[Chunk]:
        wire = pickle.dumps(self.writer.step(batch))
        self.num_bytes = len(wire)
        return self.reader.batch(pickle.loads(wire))

    def check(self, batch: list[Chunk]) -> None:
        copy = self.step(batch)
        assert [needed(chunk) for chunk in copy] == [needed(chunk) for chunk in batch]
        assert filled_blocks(copy, WIDTH) == filled_blocks(batch, WIDTH)


@given(st.integers(0, 10_000))
def test_followers_make_the_same_batches(seed: int) -> None:
    """Sequences grow, lose their blocks, get others in the place of some, begin anew with other tokens, end."""
    rng, told = random.Random(seed), Told()
    sequences: list[Sequence] = []
    for _ in range(40):
        match rng.randrange(7):
            case 0 | 1:
                tokens = rng.choices(range(100), k=rng.randint(1, 20))
                sampling = rng.choice([SAMPLING, SCORING, None])
                sequences.append(sequence_of(tokens, sampling, emitted=rng.randint(0, len(tokens) - 1)))
            case 2 if sequences:
                sequences.pop(rng.randrange(len(sequences)))
            case 3 if sequences:
                rng.choice(sequences).token_ids.append(rng.randrange(100))
            case 4 if sequences:
                rng.choice(sequences).blocks = []
            case 5 if sequences:
                chosen = rng.choice(sequences)
                if chosen.blocks:
                    chosen.blocks[rng.randrange(len(chosen.blocks))] = rng.randrange(1000)
            case 6 if sequences:
                rng.choice(sequences).token_ids = rng.choices(range(100), k=rng.randint(1, 20))
        batch = []
        for sequence in rng.sample(sequences, rng.randint(0, len(sequences))):
            start = rng.randrange(sequence.num_tokens)
            count = rng.randint(1, sequence.num_tokens - start)
            ends = sequence.sampling is not None and start + count == sequence.num_tokens
            draft_tokens = tuple(rng.choices(range(100), k=rng.randint(0, 3))) if ends else ()
            sequence.num_scored = min(rng.randrange(20), max(0, sequence.num_to_score))
            chunk = Chunk(sequence, start, count, draft_tokens)
            while len(sequence.blocks) * WIDTH < chunk.end:
                sequence.blocks.append(rng.randrange(1000))
            batch.append(chunk)
        told.check(batch)


def test_of_a_long_context_only_what_is_new_is_said() -> None:
    told = Told()
    sequence = sequence_of(list(range(20_000)))
    sequence.blocks = list(range(5_001))
    told.check([Chunk(sequence, 0, 20_000)])
    assert told.num_bytes > 50_000
    for token in range(20):
        sequence.token_ids.append(token)
        if len(sequence.token_ids) > len(sequence.blocks) * WIDTH:
            sequence.blocks.append(9_000 + token)
        told.check([Chunk(sequence, len(sequence.token_ids) - 1, 1)])
        assert told.num_bytes < 1_000


def test_what_is_over_is_forgotten() -> None:
    told = Told()
    sequences = [sequence_of([1, 2, 3]) for _ in range(3)]
    for sequence in sequences:
        sequence.blocks = [0]
    told.check([Chunk(sequence, 0, 3) for sequence in sequences])
    assert told.reader.num_sequences == 3
    del sequences[1:], sequence
    gc.collect()
    told.check([Chunk(sequences[0], 2, 1)])
    assert told.reader.num_sequences == 1


def test_filled_are_the_blocks_whose_last_slot_is_written() -> None:
    sequence = sequence_of(list(range(10)))
    sequence.blocks = [7, 5, 6]
    assert filled_blocks([Chunk(sequence, 0, 3)], WIDTH) == []
    assert filled_blocks([Chunk(sequence, 0, 4)], WIDTH) == [7]
    assert filled_blocks([Chunk(sequence, 3, 6)], WIDTH) == [7, 5]
    assert filled_blocks([Chunk(sequence, 9, 1, draft_tokens=(1, 2))], WIDTH) == [6]
