"""Runs of uniform decode steps, made at once, for simulators: the same state as after one step after another.

While every running sequence decodes, all fit one batch, and no request waits, each step adds one token to each sequence
and changes nothing else, until a sequence fills a block, samples its last token, or a message comes. So a run

    begin(...)  takes the blocks that its first step writes into, as `EngineCore.begin_step` does
    advance(k)  is k steps, the last of which may fill blocks; none ends a sequence

leaves an engine as k of its own steps do (`tests/unit/test_simulator_runs.py`), if the sampled tokens are known in
advance and end nothing. Real engines cannot know that: only the simulator runs this way.
"""

from collections.abc import Callable

from engine.core.load_reports import LoadReporter
from engine.core.request_manager import RequestManager
from engine.core_types import EngineSequence, StepBudget
from kvcache.kv_cache_manager import KVCacheManager
from loans.lender_manager import LenderManager


class UniformDecode:
    """Uniform decode runs of one engine."""

    def __init__(
        self,
        kv_cache: KVCacheManager,
        requests: RequestManager,
        lender_manager: LenderManager[EngineSequence],
        reports: LoadReporter,
        budget: StepBudget,
        take_turns: Callable[[int], int],
    ) -> None:
        """Create it.

        `take_turns(n)` draws n of the engine's arrival numbers and returns the first.
        """
        self._kv_cache = kv_cache
        self._requests = requests
        self._lender_manager = lender_manager
        self._reports = reports
        self.budget = budget
        self._take_turns = take_turns
        self.sequences: list[EngineSequence] = []
        """Sequences of the run, in batch order."""

    def begin(self) -> int:
        """Begin a run and return its largest number of steps.

        0 means that the next step is not uniform; nothing was changed then.
        """
        running_set, width = self._requests.running_set, self._kv_cache.layout.block_tokens
        sequences = running_set.running
        if not sequences or len(sequences) > self.budget.max_tokens:
            return 0
        if (
            self._kv_cache.in_step
            or running_set.short
            or self._lender_manager.num_waiting
            or self._lender_manager.computes
        ):
            return 0
        steps = 1 << 30
        for sequence in sequences:
            sampling, computed, num_tokens = sequence.sampling, sequence.num_computed, len(sequence.token_ids)
            if num_tokens - computed != 1 or num_tokens == sequence.num_prompt or sequence.siblings:
                return 0
            assert sampling is not None
            if sequence.num_preemptions or sampling.n > 1:
                return 0
            short = computed >= width * len(sequence.blocks)
            if short and not sequence.num_reserved:
                return 0
            steps = min(steps, width - computed % width, sampling.max_tokens - sequence.num_sampled - 1)
            if steps < 1:
                return 0
        sequences.sort(key=lambda sequence: (-sequence.priority, sequence.arrival))
        for sequence in sequences:
            self._kv_cache.grow(sequence, sequence.num_computed + 1)
        self.sequences = sequences
        return steps

    def quiet_until(self, when: float) -> bool:
        """Return whether no load report is due before `when`."""
        return not self._reports.due(when)

    def advance(self, steps: int, token_of: Callable[[EngineSequence], int]) -> None:
        """Make `steps` steps at once, each sampling `token_of` every sequence."""
        width, sequences = self._kv_cache.layout.block_tokens, self.sequences
        first_turn = self._take_turns(steps * len(sequences)) + (steps - 1) * len(sequences)
        for place, sequence in enumerate(sequences):
            if (sequence.num_computed + steps) % width == 0:
                sequence.num_computed += steps - 1
                sequence.token_ids.extend([token_of(sequence)] * (steps - 1))
                self._kv_cache.advance(sequence, 1)
                sequence.token_ids.append(token_of(sequence))
            else:
                sequence.num_computed += steps
                sequence.token_ids.extend([token_of(sequence)] * steps)
            sequence.turn = first_turn + place
        self._reports.count_steps(steps)
