"""Embeddings: which models make them, what engines and decode workers make of them, and where they are placed."""

import json
import random
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.errors import ServiceError
from engine.backends.sim.runner import SimRunner, hidden_states, states_of
from engine.core.loan_host import EngineLimits
from engine.core_types import Pooler, Pooling, SamplingParams, StepBudget
from engine.errors import ModelRefused
from engine.messages.from_engine import Embedded, Rejected, Token
from engine.messages.to_engine import Generate
from engine.model.embedding import has_output_layer, is_embedding_model, read_embedding
from engine.model.model_dir import ModelDir
from kvtransfer.local import LocalNetwork, LocalTransport
from protos import decode_pb2 as pb
from router.admission.request import QueuedRequest, RequestInfo
from router.admission.workers.capacity import Capacity, could_hold, first_to_free
from router.placement.demand import Demand
from router.placement.place import place
from router.placement.rates import Rates
from router.placement.worker_table import Hits, WorkerTable, WorkerView
from support.checked_core import NOTHING_LEFT, CheckedCore
from support.core_engine import TEN, TWELVE, Engine, generate
from support.embedding_models import make_embedder
from support.sim_directories import write_sim_model
from support.sim_model import LAYOUT, VOCAB
from support.toy_placement import RATES, worker
from worker.requests.output_stream import finished_embedding

# ------------------------------------------------------------------------------------------------ models


@pytest.mark.parametrize(("mode", "pooling"), [("lasttoken", "last"), ("mean_tokens", "mean")])
@pytest.mark.parametrize("normalize", [True, False])
def test_embedding_models_are_known_by_their_modules(
    tmp_path: Path, mode: str, pooling: Pooling, normalize: bool
) -> None:
    path = make_embedder(write_sim_model(tmp_path / "m", 100, hidden_size=48), mode, normalize)
    assert read_embedding(ModelDir.open(path)) == Pooler(pooling, normalize, 48)


def test_a_pooling_layer_may_name_its_mode(tmp_path: Path) -> None:
    path = make_embedder(write_sim_model(tmp_path / "m", 100, hidden_size=48))
    (path / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode": "mean"}))
    assert read_embedding(ModelDir.open(path)).pooling == "mean"


def test_other_models_are_refused_with_the_reason(tmp_path: Path) -> None:
    plain = write_sim_model(tmp_path / "plain", 100, hidden_size=48)
    with pytest.raises(ModelRefused, match=r"not an embedding model: its folder has no modules\.json"):
        read_embedding(ModelDir.open(plain))
    by_cls = make_embedder(write_sim_model(tmp_path / "cls", 100, hidden_size=48), "cls_token")
    with pytest.raises(ModelRefused, match="its pooling is cls_token: lasttoken and mean are served"):
        read_embedding(ModelDir.open(by_cls))
    dense = make_embedder(write_sim_model(tmp_path / "dense", 100, hidden_size=48), layers=["Dense"])
    with pytest.raises(ModelRefused, match="has a Dense layer"):
        read_embedding(ModelDir.open(dense))
    both_ways = make_embedder(write_sim_model(tmp_path / "both", 100, hidden_size=48, is_causal=False))
    with pytest.raises(ModelRefused, match="attend to later ones"):
        read_embedding(ModelDir.open(both_ways))
    for content in ("{}", "[1]", "nothing"):
        (plain / "modules.json").write_text(content)
        with pytest.raises(ModelRefused, match=r"modules\.json is not"):
            read_embedding(ModelDir.open(plain))


def test_classifiers_are_known_by_their_architecture(tmp_path: Path) -> None:
    path = write_sim_model(
        tmp_path / "m",
        100,
        architectures=["Qwen3ForSequenceClassification"],
        id2label={"0": "sad", "1": "glad", "2": "?"},
    )
    model_dir = ModelDir.open(path)
    assert read_embedding(model_dir) == Pooler("last", normalize=False, dimensions=3, classifies=True)
    assert not is_embedding_model(model_dir)
    assert (model_dir.labels, model_dir.separates_pairs) == (["sad", "glad", "?"], True)
    told = write_sim_model(tmp_path / "told", 100, method="from_2_way_softmax", classifier_from_token=["no", "yes"])
    assert (ModelDir.open(told).labels, ModelDir.open(told).separates_pairs) == (["LABEL_0"], False)


def test_a_model_without_an_output_layer_is_known(tmp_path: Path) -> None:
    from safetensors.numpy import save_file

    path = write_sim_model(tmp_path / "m", 100, hidden_size=48, tie_word_embeddings=False)
    save_file({"layers.0.weight": np.zeros(2, np.float32)}, path / "model.safetensors")
    assert not has_output_layer(ModelDir.open(path))
    save_file({"lm_head.weight": np.zeros(2, np.float32)}, path / "model.safetensors")
    assert has_output_layer(ModelDir.open(path))


# ----------------------------------------------------------------------------------------------- engines


def undisturbed(prompt: tuple[int, ...], pooling: Pooling) -> "np.ndarray[tuple[int, ...], np.dtype[np.float32]]":
    root = int.from_bytes(LAYOUT.fingerprint(b"sim")[:8], "little")
    hidden = hidden_states(states_of(root, prompt, 0), 64)
    return hidden[-1] if pooling == "last" else hidden.mean(0)


def embed(name: str, prompt: tuple[int, ...], pooling: Pooling, priority: int = 0) -> Generate:
    return generate(name, prompt, sampling=SamplingParams(1, pooling=pooling), priority=priority)


@pytest.mark.parametrize("pooling", ["last", "mean"])
@pytest.mark.parametrize("budget", [StepBudget(64, 64), StepBudget(4, 3), StepBudget(1, 1)])
def test_embeddings_do_not_depend_on_the_chunks(pooling: Pooling, budget: StepBudget) -> None:
    engine = Engine(budget=budget)
    engine.send(embed("a", TEN, pooling), generate("b", TWELVE, 3))
    engine.run()
    (embedded,) = engine.receive(Embedded)
    found = np.frombuffer(embedded.vector, np.float32)
    assert np.allclose(found, undisturbed(TEN, pooling), atol=1e-6)
    assert embedded.account.computed_tokens == 10
    assert engine.held() == NOTHING_LEFT


@pytest.mark.parametrize(("pooling", "reused"), [("last", 2), ("mean", 0)])
def test_only_the_last_token_s_embedding_uses_cached_blocks(pooling: Pooling, reused: int) -> None:
    engine = Engine()
    engine.serve(generate("first", TWELVE))
    engine.send(embed("a", TWELVE, pooling))
    engine.run()
    (embedded,) = engine.receive(Embedded)
    assert np.allclose(np.frombuffer(embedded.vector, np.float32), undisturbed(TWELVE, pooling), atol=1e-6)
    assert embedded.account.reused_blocks == reused


@given(st.integers(0, 10_000))
def test_embeddings_survive_neighbours_and_preemption(seed: int) -> None:
    draw = random.Random(seed)
    limits = EngineLimits(StepBudget(draw.randint(2, 12), draw.randint(1, 6)), reserve_output_tokens=1)
    runner = SimRunner(LAYOUT, draw.randint(8, 14), VOCAB)
    engine = CheckedCore(runner, LocalTransport(LocalNetwork(), "one"), limits)
    prompts: dict[str, tuple[tuple[int, ...], Pooling]] = {}
    for number in range(draw.randint(1, 6)):
        length = draw.randint(1, 14)
        prompt = tuple(draw.choices(range(1000), k=length)) if draw.random() < 0.7 else TWELVE[: min(12, length)]
        name = f"r{number}"
        if draw.random() < 0.6:
            pooling: Pooling = "mean" if draw.random() < 0.5 else "last"
            prompts[name] = prompt, pooling
            engine.send(embed(name, prompt, pooling, priority=-draw.randint(0, 1)))
        else:
            engine.send(generate(name, prompt, draw.randint(1, 16)))
        for _ in range(draw.randint(0, 3)):
            engine.step()
    engine.run()
    messages = engine.said
    found = {message.request_id: message for message in messages if isinstance(message, Embedded)}
    rejected = {message.request_id for message in messages if isinstance(message, Rejected)}
    assert found.keys() | (rejected & prompts.keys()) == prompts.keys()
    for name, embedded in found.items():
        assert np.allclose(np.frombuffer(embedded.vector, np.float32), undisturbed(*prompts[name]), atol=1e-5)
    assert not {message.request_id for message in messages if isinstance(message, Token)} & prompts.keys()
    assert engine.held() == NOTHING_LEFT


# --------------------------------------------------------------------------------------- decode workers


def test_dimensions_are_kept_and_scaled() -> None:
    vector = np.array([3, 4, 12], np.float32).tobytes()
    assert finished_embedding(vector, pb.Embedding()) == [3, 4, 12]
    assert finished_embedding(vector, pb.Embedding(dimensions=2)) == [3, 4]
    assert finished_embedding(vector, pb.Embedding(dimensions=2, normalize=True)) == pytest.approx([0.6, 0.8])


@pytest.mark.parametrize("values", [[0, 0], [np.nan, 1], [np.inf, 1]])
def test_what_is_no_embedding_fails(values: list[float]) -> None:
    with pytest.raises(ServiceError, match="hidden state"):
        finished_embedding(np.array(values, np.float32).tobytes(), pb.Embedding(normalize=True))


# --------------------------------------------------------------------------------------------- placement

DEMAND = Demand(num_tokens=40, num_usable_blocks=0, num_total_blocks=11, block_tokens=4, block_bytes=10, embeds=True)


def placed_on(views: list[WorkerView]) -> str | None:
    workers = WorkerTable.of(views)
    decision = place(DEMAND, workers, Hits.of(workers, {}), Rates.uniform(len(views), RATES))
    if decision is None:
        return None
    assert decision.lender_id is None
    return decision.decode_id


def test_prefill_workers_embed_and_others_only_without_them() -> None:
    assert placed_on([worker("d0"), worker("p0")]) == "p0"
    assert placed_on([worker("d0"), worker("p0", queued_prefill_tokens=999), worker("p1")]) == "p1"
    assert placed_on([worker("d0"), worker("p0", draining=True)]) == "d0"
    assert placed_on([worker("d0"), worker("p0", available_blocks=5)]) is None
    assert placed_on([worker("d0")]) == "d0"
    assert placed_on([worker("p0")]) == "p0"


def test_an_embedding_waits_for_prefill_workers_only() -> None:
    full = worker("d0", available_blocks=0)
    waiting = QueuedRequest.of(RequestInfo("", 0, 0.0), DEMAND, (), 0, 0.0)
    for views, fits, holds in (
        ([full, worker("p0")], True, True),
        ([worker("d0"), worker("p0", available_blocks=0)], False, True),
        ([worker("d0"), worker("p0", num_blocks=5, available_blocks=5)], False, False),
    ):
        workers = WorkerTable.of(views)
        waiting.measure(workers)
        unlimited = np.full(len(views), 1 << 60)
        capacity = Capacity.of(workers, (), unlimited, 1.0)
        assert capacity.fits(waiting) is fits
        assert waiting.need <= capacity.greatest
        assert could_hold(DEMAND, workers) is holds
        row = first_to_free(DEMAND, workers, 1.0, ())
        assert (row is not None and workers.ids[row] == "p0") is holds
