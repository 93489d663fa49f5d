"""The KV pool of automatic size, of the torch engine."""

from pathlib import Path
from typing import Any

import pytest

from engine.backends.torch import kv as kv_room
from engine.backends.torch.kv import KvRoom, measured_step
from engine.backends.torch.runner import TorchRunner
from engine.core_types import SamplingParams, StepBudget
from engine.errors import EngineStartError
from engine.host.memory import UNMEASURED_KV_BYTES
from support.torch_engine import TorchEngine, ids, request
from support.torch_models import random_prompts, runner_of

GIB = 1 << 30


@pytest.fixture
def container(monkeypatch: pytest.MonkeyPatch) -> Any:
    def of(total: int, free: int) -> None:
        monkeypatch.setattr(kv_room, "container_memory", lambda: (total, free))

    return of


ROOM = KvRoom(512)


def runner(path: Path, room: KvRoom = ROOM) -> TorchRunner:
    return TorchRunner(path, "float32", block_tokens=16, kv_bytes=None, room=room)


def test_outside_of_a_container_the_size_is_fixed(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_room, "container_memory", lambda: None)
    made = runner(tiny_model)
    assert made.pool.num_blocks == UNMEASURED_KV_BYTES // made.layout.block_bytes


def test_in_a_container_the_pool_takes_what_is_left(tiny_model: Path, container: Any) -> None:
    container(4 * GIB, GIB)
    size = runner(tiny_model).pool.num_bytes
    assert GIB // 4 < size < GIB - kv_room.MIN_RESERVE_BYTES
    with_host = runner(tiny_model, KvRoom(512, host_bytes=GIB // 8)).pool.num_bytes
    assert with_host < size


def test_a_model_answers_as_with_a_pool_of_a_given_size(tiny_model: Path, container: Any) -> None:
    """The step that was measured leaves no trace in the model."""
    container(4 * GIB, GIB)
    (prompt,) = random_prompts(40, seed=1)
    budget = StepBudget(64, 64)
    automatic = TorchEngine(runner(tiny_model), budget).ask(request("a", prompt, SamplingParams(6, temperature=0)))
    given = TorchEngine(runner_of(tiny_model, "float32"), budget).ask(
        request("a", prompt, SamplingParams(6, temperature=0))
    )
    assert ids(automatic["a", 0]) == ids(given["a", 0])


def test_nothing_left_is_refused_with_the_sum(tiny_model: Path, container: Any) -> None:
    container(2 * GIB, GIB // 4)
    with pytest.raises(
        EngineStartError, match=r"auto leaves no memory for KV blocks: 0.25 of 2.00 GiB are free beside the weights"
    ):
        runner(tiny_model)


def test_more_tokens_need_more_memory(make_model: Any) -> None:
    model = runner_of(make_model("llama"), "float32").paged.model
    few, many = measured_step(model, 64), measured_step(model, 8192)
    assert many > few
    assert many > 8192 * 64 * 4, "at least the hidden states of all tokens"
