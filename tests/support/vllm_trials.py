"""Trials of vLLM engines, without a model: `python -m support.vllm_trials FIRST COUNT SEED...`.

Each engine is Tandem's core over vLLM's own scheduler and block pool, in the harness of all engines (`trials.py`).
Instead of a model, `Computer` writes into each block what a model would have written, and looks, before each step,
whether all that the step reads is there. Some engines draft tokens, right ones and wrong ones, whose KV lies in blocks
until it is written over. It runs in vLLM's environment.
"""

import json
import os
import random
import sys
from collections import Counter, deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any, NamedTuple

import numpy as np
import torch
from vllm import SamplingParams as VllmParams
from vllm.config import KVTransferConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.core.kv_cache_utils import resolve_kv_cache_block_sizes
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheTensor,
    MambaSpec,
    SlidingWindowSpec,
)
from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

from engine.backends.vllm.connector import MemoryConnector
from engine.backends.vllm.core import VllmCore
from engine.backends.vllm.kv.groups import KvGroups
from engine.backends.vllm.kv.memory import LayerPlace, VllmKvMemory, pool_allocation
from engine.backends.vllm.sampling.native_sampling import FILLS, Sampling
from engine.core.loan_host import EngineLimits, EngineParts
from engine.core_types import SampleResult, StepBudget
from engine.model_runner import ModelInfo
from kvtransfer.transport import Pool
from support.memory_objects import MemoryObjects
from support.trial_cells import Cell
from support.trial_cluster import Cluster
from support.trial_node import TrialNode
from support.trials import run_trial
from tandem.storyteller import STORYTELLER

VOCAB, PAGE = 997, 64
BLOCK = 4
MODELS: dict[str, Callable[[], list[Any]]] = {
    "windows": lambda: [_window(9), _full(), _window(9)],
    "two windows": lambda: [_window(6), _window(14), _full()],
    "states": lambda: [_state(), _full(), _state()],
    "states and a window": lambda: [_state(), _window(9), _full()],
    "full": lambda: [_full()],
    "one window": lambda: [_window(9)],
    "one state": lambda: [_state()],
}
"""KV groups of each kind of model."""
POOLS = {"full": (10, 22), "one window": (10, 22), "one state": (12, 30)}
"""Bounds of a pool's size, where it is smaller than others'."""


def _full() -> FullAttentionSpec:
    return FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=PAGE // BLOCK // 4, dtype=torch.float16)


def _window(tokens: int) -> SlidingWindowSpec:
    return SlidingWindowSpec(
        block_size=BLOCK, num_kv_heads=1, head_size=PAGE // BLOCK // 4, dtype=torch.float16, sliding_window=tokens
    )


def _state() -> MambaSpec:
    return MambaSpec(block_size=BLOCK, shapes=((PAGE,),), dtypes=(torch.int8,), mamba_cache_mode="align")


def content(tokens: Sequence[int], group: int, spec: Any) -> bytes:
    """What a group's last block has in it after these tokens: a state, or a slot for each of its tokens."""
    text, person = np.array(tokens, np.uint32).tobytes(), b"group %d" % group
    if isinstance(spec, MambaSpec):
        return blake2b(text, digest_size=PAGE, person=person).digest()
    ends = range((len(tokens) - 1) // BLOCK * BLOCK + 1, len(tokens) + 1)
    return b"".join(blake2b(text[: 4 * end], digest_size=PAGE // BLOCK, person=person).digest() for end in ends)


def next_token(tokens: Sequence[int]) -> int:
    return int.from_bytes(blake2b(np.array(tokens, np.uint32).tobytes(), digest_size=4).digest(), "little") % VOCAB


def undisturbed(prompt: Sequence[int], count: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(tokens))
    return tokens[len(prompt) :]


class Drafting(NamedTuple):
    """How an engine drafts."""

    num_drafts: int
    num_lookahead: int
    """Positions after a step's own into which draft layers write."""
    overlaps: bool
    """Whether the scheduler runs ahead of the drafts."""


@dataclass
class Row:
    """A request as a model runner has it."""

    tokens: list[int]
    computed: int
    blocks: list[list[int]]
    drafts: list[int] = field(default_factory=list)


class Computer:
    """Stands for vLLM's model runner: keeps requests by what the scheduler's outputs say, and computes in order."""

    def __init__(self, specs: Sequence[Any], memory: np.ndarray[Any, Any], drafting: "Drafting", rng: Any) -> None:
        self._specs = specs
        self._memory = memory
        self._drafting = drafting
        self._rng = rng
        self._rows: dict[str, Row] = {}
        self.drafts = DraftTokenIds([], [])
        """Drafts of the requests in the last batch."""
        self.num_accepted = 0

    def compute(self, output: Any) -> ModelRunnerOutput:
        for request_id in output.finished_req_ids:
            self._rows.pop(request_id, None)
        for new in output.scheduled_new_reqs:
            tokens = list(new.prompt_token_ids)
            self._rows[new.req_id] = Row(tokens, new.num_computed_tokens, [list(b) for b in new.block_ids])
        cached = output.scheduled_cached_reqs
        for place, request_id in enumerate(cached.req_ids):
            row, new_blocks = self._rows[request_id], cached.new_block_ids[place]
            # a scheduler that runs ahead counts drafts that are rejected meanwhile
            if request_id in cached.resumed_req_ids:
                row.computed = cached.num_computed_tokens[place]
                row.tokens = list(cached.all_token_ids[request_id])
                row.blocks = [list(blocks) for blocks in new_blocks]
            elif new_blocks is not None:
                for blocks, more in zip(row.blocks, new_blocks, strict=True):
                    blocks += more
        names, sampled = list(output.num_scheduled_tokens), list[list[int]]()
        for request_id in names:
            row, scheduled = self._rows[request_id], output.scheduled_spec_decode_tokens.get(request_id, [])
            drafts = row.drafts if self._drafting.overlaps else scheduled
            drafts = (drafts + [-1] * len(scheduled))[: len(scheduled)]
            end = row.computed + output.num_scheduled_tokens[request_id] - len(drafts)
            assert not drafts or end == len(row.tokens), "drafts before a prompt's end"
            self._read(row)
            self._write(row, [*row.tokens[:end], *(max(draft, 0) for draft in drafts)])
            sampled.append(self._sample(row, drafts) if end >= len(row.tokens) else [])
            row.computed = end + max(0, len(sampled[-1]) - 1)
            row.drafts = self._guess(row) if sampled[-1] else []
        self.drafts = DraftTokenIds(names, [self._rows[name].drafts for name in names])
        return ModelRunnerOutput(names, {name: place for place, name in enumerate(names)}, sampled)

    def _sample(self, row: Row, drafts: Sequence[int]) -> list[int]:
        """Return the tokens of a step: the right drafts, and one more."""
        first = len(row.tokens)
        for draft in [*drafts, -1]:
            row.tokens.append(next_token(row.tokens))
            if draft != row.tokens[-1]:
                break
            self.num_accepted += 1
        return row.tokens[first:]

    def _guess(self, row: Row) -> list[int]:
        guesses = undisturbed(row.tokens, self._drafting.num_drafts)
        return [token if self._rng.random() < 0.7 else self._rng.randrange(VOCAB) for token in guesses]

    def _read(self, row: Row) -> None:
        """Raises AssertionError where a block that the step reads has other bytes than it should."""
        start = row.computed
        for group, spec in enumerate(self._specs):
            for at in self._needed(spec, start):
                end = start if isinstance(spec, MambaSpec) else min((at + 1) * BLOCK, start)
                wanted = content(row.tokens[:end], group, spec)
                held = self._memory[row.blocks[group][at]].tobytes()[: len(wanted)]
                assert held == wanted, f"wrong KV: group {group}, block {at}, {start} tokens"

    def _needed(self, spec: Any, start: int) -> range:
        """Return the blocks of a group that a step after `start` tokens reads."""
        if not start:
            return range(0)
        last = (start - 1) // BLOCK
        if isinstance(spec, MambaSpec):
            return range(last, last + 1)
        first = max(0, start - spec.sliding_window + 1) // BLOCK if isinstance(spec, SlidingWindowSpec) else 0
        return range(first, last + 1)

    def _write(self, row: Row, tokens: list[int]) -> None:
        """Write the KV of a step, which ends after these tokens, drafts included."""
        end, ahead = len(tokens), len(tokens) + self._drafting.num_lookahead
        for group, spec in enumerate(self._specs):
            first = (end - 1) // BLOCK if isinstance(spec, MambaSpec) else row.computed // BLOCK
            for at in range(first, (end - 1) // BLOCK + 1):
                if number := row.blocks[group][at]:
                    upto = end if isinstance(spec, MambaSpec) else min((at + 1) * BLOCK, end)
                    written = np.frombuffer(content(tokens[:upto], group, spec), np.uint8)
                    self._memory[number, : len(written)] = written
            for number in row.blocks[group][(end - 1) // BLOCK + 1 : (ahead - 1) // BLOCK + 1]:
                self._memory[number] = self._rng.randrange(256)  # the KV of draft layers


class TrialSampling(Sampling):
    """Whole chains as prompts, as on Model Runner V1."""

    def request(self, sequence: Any, request_id: str, arguments: dict[str, Any], wake: Callable[[], None]) -> Request:
        if sequence.sampling is None or sequence.only_fills:
            return Request(request_id, self.fill_tokens(sequence), FILLS, **arguments)
        count = sequence.sampling.max_tokens - sequence.num_sampled
        params = VllmParams(max_tokens=count, temperature=0.0, ignore_eos=True, detokenize=False)
        return Request(request_id, list(sequence.token_ids), params, **arguments)

    def results(self, sequence: Any, request: Request, output: Any) -> list[SampleResult]:
        return [SampleResult(token_id) for token_id in output.new_token_ids]


class Shell:
    """What is left of vLLM's EngineCore without a model."""

    check_for_draft_tokens = False

    def __init__(self, scheduler: Any, computer: Computer, overlaps: bool) -> None:
        self.scheduler, self.vllm_config = scheduler, scheduler.vllm_config
        self._computer, self._overlaps = computer, overlaps

    def post_step(self, model_executed: bool) -> None:
        if self.scheduler.num_spec_tokens and not self._overlaps and model_executed:
            self.scheduler.update_draft_token_ids(self._computer.drafts)

    def shutdown(self) -> None: ...


def make_config(overlaps: bool, num_drafts: int, connector: type[Any] = MemoryConnector) -> Any:
    """Return vLLM's configuration of an engine with a connector; it is shared by all of its kind."""
    kind = overlaps, num_drafts, connector.__name__
    if kind not in _configs:
        transfer = KVTransferConfig(
            kv_connector=connector.__name__,
            kv_connector_module_path=connector.__module__,
            kv_role="kv_both",
        )
        drafts = {"method": "ngram", "num_speculative_tokens": num_drafts, "prompt_lookup_max": 2}
        options = EngineArgs(
            model=str(STORYTELLER), enforce_eager=True, max_model_len=512, max_num_seqs=8, dtype="float32",
            block_size=32, skip_tokenizer_init=True, kv_transfer_config=transfer, scheduling_policy="priority",
            max_num_batched_tokens=128, disable_log_stats=True, kv_cache_memory_bytes=1 << 20,
            speculative_config=drafts if num_drafts else None,
        )  # fmt: skip
        config = _configs[kind] = options.create_engine_config()
        config.scheduler_config.async_scheduling = overlaps
        config.cache_config.block_size, config.cache_config.mamba_cache_mode = BLOCK, "align"
    return _configs[kind]


_configs: dict[tuple[bool, int, str], Any] = {}


def make_scheduler(config: Any, specs: Sequence[Any], num_blocks: int) -> tuple[Any, int]:
    """Return vLLM's scheduler of an engine with a layer for each group, and the number of tokens of a key."""
    config.cache_config.num_gpu_blocks = num_blocks
    groups = [KVCacheGroupSpec([f"layer {number}"], spec) for number, spec in enumerate(specs)]
    tensors = [KVCacheTensor(num_blocks * PAGE, group.layer_names, PAGE, PAGE) for group in groups]
    kv_config = KVCacheConfig(num_blocks, tensors, groups)
    size, unit = resolve_kv_cache_block_sizes(kv_config, config)
    kv_config.hash_block_size = unit
    scheduler_class = config.scheduler_config.get_scheduler_cls()
    return scheduler_class(config, kv_config, StructuredOutputManager(config), size, unit), unit


def make_caches(specs: Sequence[Any], num_blocks: int, pools: list[Pool]) -> dict[str, torch.Tensor]:
    """Return the KV tensors of these layers, whose memory is added to the `pools`."""
    with pool_allocation(False, pools):
        raw = torch.zeros(num_blocks * PAGE, dtype=torch.int8)
    return {f"layer {number}": raw.view(num_blocks, 1, PAGE) for number, _ in enumerate(specs)}


class VllmNode(TrialNode):
    """One with vLLM's scheduler."""

    core: VllmCore

    def __init__(
        self,
        trial: "VllmCluster",
        name: str,
        num_blocks: int,
        budget: StepBudget,
        local: MemoryObjects | None,
        on_gpu: bool,
    ) -> None:
        super().__init__(trial.network, name, trial.engines)
        rng = self._rng = trial.rng
        self.overlaps = rng.random() < 0.5
        self._specs = specs = MODELS[trial.kind]()
        is_stateless = not any(isinstance(spec, MambaSpec) for spec in specs)
        num_drafts = rng.choice((0, 0, 1, 3)) if is_stateless else 0
        drafting = Drafting(num_drafts, rng.choice((0, num_drafts)), self.overlaps)
        scheduler, unit = make_scheduler(make_config(self.overlaps, num_drafts), specs, num_blocks)
        pools: list[Pool] = []
        caches = make_caches(specs, num_blocks, pools)
        scheduler.num_lookahead_tokens = drafting.num_lookahead
        ahead = 1 + num_drafts + drafting.num_lookahead if num_drafts else 0
        kv_groups = KvGroups(scheduler.kv_cache_manager, unit, ahead)
        self._memory = TrialMemory(caches, [LayerPlace(0, PAGE)], num_blocks, unit, "trial", pools, kv_groups)
        self._memory.node = self
        self.computer = Computer(specs, pools[0].memory.reshape(num_blocks, PAGE), drafting, rng)
        limits = EngineLimits(budget, 4, 8, report_interval_s=0.0, read_silence_s=trial.read_silence)
        self.unhashed: deque[tuple[Any, Callable[[], Any]]] = deque()
        self.flying: deque[list[Any]] = deque()
        """Batches in flight: the scheduler's output, and its result once it is computed."""
        layout = self._memory.layout
        stores = self.open_stores(layout, bytes(32), trial.clock, local, trial.objects, rng.random() < 0.5)
        core = VllmCore(
            EngineParts(self.transport, limits, self.tell, network=self.network),
            Shell(scheduler, self.computer, self.overlaps),
            self._memory,
            scheduler.kv_cache_manager.block_pool,
            ModelInfo(bytes(32), VOCAB, 512, frozenset()),
            TrialSampling(),
            {},
            stores,
            (lambda tag, compute: self.unhashed.append((tag, compute))) if self.overlaps else None,
            trial.clock,
        )
        self.start(core, on_gpu)

    def turn(self, rng: random.Random) -> bool:
        """One thing happens in the engine's loop or beside it."""
        choices = ["begin"] * (len(self.flying) < 1 + self.overlaps)
        choices += ["compute"] * any(batch[1] is None for batch in self.flying)
        choices += ["end"] * bool(self.flying and self.flying[0][1] is not None) + ["hash"] * bool(self.unhashed)
        worked = True
        match rng.choice(choices):
            case "begin":
                output = self.core.schedule()
                worked = output is not None or bool(self.flying) or bool(self.unhashed)
                if output is not None:
                    self.flying.append([output, None])
            case "compute":
                batch = next(batch for batch in self.flying if batch[1] is None)
                named = list(self.named)
                before = self._memory.part_fingerprints(named)
                batch[1] = self.computer.compute(batch[0])
                assert np.array_equal(before, self._memory.part_fingerprints(named)), "a step writes a named block"
            case "end":
                output, computed = self.flying.popleft()
                self.core.end_step(output, computed)
                self._check_filled(output)
                self._check_unnamed()
            case "hash":
                tag, compute = self.unhashed.popleft()
                self.core.name(tag, compute())
        return worked

    def _check_filled(self, output: Any) -> None:
        """No block that the ended step filled was overlooked."""
        widths, unit = self.core.kv_cache.groups.widths, self.core.kv_cache.groups.unit
        for request_id in output.num_scheduled_tokens:
            if (submitted := self.core.submissions.get(request_id)) is not None:
                end = min(submitted.num_computed, submitted.request.num_tokens) // unit
                counts = zip(widths, submitted.num_filled, strict=True)
                assert all(end // width <= known for width, known in counts), f"{end} keys, {submitted.num_filled}"

    def _check_unnamed(self) -> None:
        """Blocks that wait for their fingerprints are filled, also those that a request found."""
        for filled in self.core.unnamed:
            for full in filled.full:
                tokens = full.submitted.request.all_token_ids
                for place in set(full.places).intersection(filled.places):  # others have their names, and no hold
                    group, end = place.of.group, place.of.end * self.core.kv_cache.groups.unit
                    wanted = content(tokens[:end], group, self._specs[group])
                    held = next(iter(self._memory.read_blocks([place.block]))).tobytes()[: len(wanted)]
                    assert held == wanted, f"a block of {end} tokens is taken before it is filled"

    def part_fingerprints(self, blocks: Sequence[int]) -> Any:
        return self._memory.part_fingerprints(blocks)

    def waits(self, chain: Any, block: int) -> bool:
        return chain not in self.core.submissions

    @property
    def named(self) -> Collection[int]:
        return self.core.kv_cache.pool.place_of

    def tokens_for(self, num_blocks: int) -> int:
        return max(1, num_blocks // len(self._specs)) * BLOCK


class TrialMemory(VllmKvMemory):
    """Writes what comes back from a store in two halves; in between anything may happen."""

    node: VllmNode

    def write_block(self, block: int, content: Any) -> None:
        half = len(content) // 2
        before = next(iter(self.read_blocks([block]))).copy()
        super().write_block(block, np.concatenate([content[:half], before[half:]]))
        self.node.writing = block
        self.node.interrupted()
        self.node.writing = None
        super().write_block(block, content)


class VllmCluster(Cluster):
    """A few engines of one kind of model, with vLLM's scheduler."""

    has_scores = False

    def __init__(self, seed: int) -> None:
        self.kind = list(MODELS)[seed % len(MODELS)]
        self.has_groups = self.kind != "full"
        super().__init__(seed, num_nodes=2 + seed // 5 % 2)

    def random_tokens(self, count: int) -> list[int]:
        return [self.rng.randrange(VOCAB) for _ in range(count)]

    def open_node(
        self,
        name: str,
        num_blocks: int,
        budget: StepBudget,
        local: MemoryObjects | None,
        on_gpu: bool,
    ) -> VllmNode:
        num_blocks = self.rng.randint(*POOLS.get(self.kind, (36, 70)))
        budget = StepBudget(self.rng.randint(4, 24), self.rng.randint(2, 16))
        return VllmNode(self, name, num_blocks, budget, local, on_gpu)

    def undisturbed(self, prompt: Sequence[int], max_tokens: int, choice: int) -> list[int]:
        return undisturbed(prompt, max_tokens)

    def check_at_rest(self) -> None:
        super().check_at_rest()
        self.seen["accepted"] += sum(node.computer.num_accepted for node in [*self.nodes, *self.dead])  # type: ignore[attr-defined]


def main() -> None:
    first, count, *others = map(int, sys.argv[1:])
    seen: Counter[str] = Counter()
    cells: Counter[Cell] = Counter()
    for seed in [*range(first, first + count), *others]:
        cluster = run_trial(seed, VllmCluster, num_moves=500)
        seen += cluster.seen
        cells += cluster.cells.counts
        seen[cluster.kind] += 1
    print(json.dumps([seen, [[*cell, number] for cell, number in cells.items()]]))


if __name__ == "__main__":
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    main()
