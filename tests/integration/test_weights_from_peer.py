"""Workers that read their weights from a live one: the same model, and the disk whatever goes wrong."""

import os
import shutil
from collections.abc import Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any

import pytest
import torch

from cluster.errors import Incompatible
from cluster.rpc import channel
from engine.config import WorkerConfig
from engine.model.model_dir import ModelDir
from engine.weights.fetch import WeightsFetch, WeightsLost
from engine.weights.mapped_files import MappedFiles
from engine.weights.offer import WeightFile, WeightsOffer
from engine.weights.page_cache import in_page_cache
from kvtransfer.contract.worlds import ProcessLender
from kvtransfer.local import LocalNetwork, LocalTransport
from kvtransfer.registry import open_transport
from protos import membership_pb2, membership_pb2_grpc
from support.observed_cluster import refusal
from support.processes import LENDER_ALWAYS, Stream, engine_of, finished, running, workers_joined
from support.real_engines import RealEngine, chosen, engines, greedy, kill
from support.torch_models import logits_after, random_prompts, runner_of
from tandem.client import Client
from tandem.local.local_cluster import stop_process

(PROMPT,) = random_prompts(100, seed=1)
TORCH: dict[str, Any] = {"engine": "torch", "device": "cpu", "backend": "sdpa", "weights_from": "peer"}


def forget(files: Sequence[Path]) -> None:
    """Drop files from the page cache; they are written to the disk first, since dirty pages stay."""
    for file in files:
        with file.open("rb") as opened:
            os.fsync(opened.fileno())
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


@pytest.fixture
def copied(tiny_model: Path, tmp_path: Path) -> Path:
    """The new worker's own directory, with files of its own; its fingerprint is not remembered."""
    return Path(shutil.copytree(tiny_model, tmp_path / tiny_model.name))


async def starts(client: Client) -> dict[str, str]:
    """Where each worker's weights came from."""
    (model,) = (await client.cluster_status()).models
    assert all(worker.start_seconds > 0 for worker in model.workers)
    return {worker.worker_id: worker.weights_source for worker in model.workers}


async def test_a_worker_from_a_peer_computes_the_same_and_exchanges_kv(
    tiny_model: Path, copied: Path, cluster_of: Any
) -> None:
    cluster = cluster_of(tiny_model, prefill=0, router=LENDER_ALWAYS, **TORCH)
    async with running(cluster) as (cluster, client):
        (alone,) = await finished([Stream(client, PROMPT, 12)])
        config = WorkerConfig.parse({"model": copied, "worker_id": "prefill-new", "kv_memory_mib": 32} | TORCH)
        cluster.engines.append(engine_of(await cluster.add_worker("prefill_worker", config)))
        await workers_joined(client, 1, 1)
        async with channel(cluster.decode[0].address) as link:
            asked = membership_pb2.WeightsRequest(config_fingerprint=b"of another model")
            refused = await refusal(membership_pb2_grpc.WorkerStub(link).Weights(asked))
            assert (type(refused), refused.field) == (Incompatible, "config_fingerprint")
        sources = await starts(client)
        assert sources["prefill-new"] == "peer decode-0"
        assert sources["decode-0"] in ("disk", "page cache"), "nobody was there before it"
        (lent,) = await finished([Stream(client, PROMPT, 12, cache_salt="another")])
        assert lent.receipt.placement.lender == "prefill-new"
        assert lent.receipt.kv.moved_blocks == len(PROMPT) // 16
        assert lent.token_ids == alone.token_ids


async def test_engines_load_what_was_offered_and_say_so(tiny_model: Path, copied: Path) -> None:
    lender = RealEngine("lender", tiny_model, **TORCH)
    async with engines(lender):
        borrower = RealEngine("borrower", copied, offer=await lender.offer(), **TORCH)
        async with engines(borrower):
            assert borrower.ready.weights_from_peer
            assert borrower.ready.model_fingerprint == lender.ready.model_fingerprint
            assert chosen(await borrower.answer(greedy("r", PROMPT))) == chosen(
                await lender.answer(greedy("r", PROMPT))
            )


async def test_quantised_at_load_is_the_same_from_either(tiny_model: Path, copied: Path) -> None:
    lender = RealEngine("lender", tiny_model, weights="int8", **TORCH)
    async with engines(lender):
        borrower = RealEngine("borrower", copied, offer=await lender.offer(), weights="int8", **TORCH)
        async with engines(borrower):
            assert borrower.ready.weights_from_peer
            assert borrower.ready.model_fingerprint == lender.ready.model_fingerprint


@pytest.mark.parametrize("family", ["qwen2", "gemma2", "gemma3", "mixtral", "qwen3_moe"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_family_loads_as_from_its_files(make_model: Any, family: str, dtype: str) -> None:
    model_dir = ModelDir.open(make_model(family))
    files, network = model_dir.weight_files(), LocalNetwork()
    mapped = MappedFiles(files)
    endpoint = LocalTransport(network, "lender").register(mapped.pool)
    offer = WeightsOffer("lender", tuple(map(WeightFile.of, files)), model_dir.weights_fingerprint(), endpoint)
    digest = model_dir.begin_weights_digest()
    fetch = WeightsFetch(offer, digest, lambda: LocalTransport(network, "borrower"), 5.0)
    arrived, read = runner_of(model_dir.path, dtype, fetch=fetch), runner_of(model_dir.path, dtype)
    assert fetch.taken
    assert not fetch.memory.size, "its memory is free"
    assert arrived.info == read.info
    weights, expected = arrived.paged.model.state_dict(), read.paged.model.state_dict()
    assert weights.keys() == expected.keys()
    assert all(weights[name].equal(expected[name]) for name in expected)
    # float32 products may depend on where a matrix lies in memory
    torch.testing.assert_close(logits_after(arrived, PROMPT), logits_after(read, PROMPT))


async def test_auto_takes_a_peer_for_cold_files_that_are_the_same(
    make_model: Any, copied: Path, tmp_path: Path, tiny_model: Path, cluster_of: Any
) -> None:
    other = Path(shutil.copytree(make_model("llama", seed=7), tmp_path / "another" / tiny_model.name))
    kept = Path(shutil.copytree(tiny_model, tmp_path / "cold" / tiny_model.name))  # with the times of the originals
    assert (other / "config.json").read_bytes() == (kept / "config.json").read_bytes()
    (probe := tmp_path / "probe").write_bytes(bytes(1 << 20))
    forget([probe])
    if in_page_cache([probe]):
        pytest.skip("this file system's pages stay in memory")
    automatic = TORCH | {"weights_from": "auto"}
    cluster = cluster_of(tiny_model, prefill=0, **automatic)
    async with running(cluster) as (cluster, client):
        for name, path, is_cold, source in (
            ("decode-warm", copied, False, "page cache"),
            ("decode-cold", kept, True, "peer decode-0"),
            ("decode-another", other, True, "disk"),
        ):
            if is_cold:
                forget(list(path.iterdir()))
            config = WorkerConfig.parse({"model": path, "worker_id": name, "kv_memory_mib": 32} | automatic)
            cluster.engines.append(engine_of(worker := await cluster.add_worker("decode_worker", config)))
            await workers_joined(client, 0, 2)
            assert (await starts(client))[name] == source
            await stop_process(worker.process)
            await workers_joined(client, 0, 1)


def damage(model: Path, how: str) -> None:
    """Damage what a lender has already offered."""
    file = model / "model.safetensors"
    with file.open("r+b") as opened:
        if how == "a changed byte":
            opened.seek(-100, 2)
            (byte,) = opened.read(1)
            opened.seek(-100, 2)
            opened.write(bytes([byte ^ 1]))
        else:
            opened.truncate(file.stat().st_size // 2)


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("a changed byte", "another fingerprint"),
        ("half of it", ""),
    ],
)
async def test_what_the_peer_has_wrong_is_read_from_the_disk(
    tiny_model: Path, copied: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], how: str, said: str
) -> None:
    of_lender = Path(shutil.copytree(tiny_model, tmp_path / "of the lender"))
    lender, undisturbed = RealEngine("lender", of_lender, **TORCH), RealEngine("other", tiny_model, **TORCH)
    async with engines(lender, undisturbed):
        offer = await lender.offer()
        damage(of_lender, how)
        borrower = RealEngine("borrower", copied, offer=offer, **TORCH)
        async with engines(borrower):
            assert not borrower.ready.weights_from_peer
            assert borrower.ready.model_fingerprint == undisturbed.ready.model_fingerprint
            answers = [chosen(await each.answer(greedy("r", PROMPT))) for each in (borrower, undisturbed)]
            assert answers[0] == answers[1]
    log = capfd.readouterr().err
    assert "weights are read from the disk, not from lender" in log
    assert said in log


async def test_a_peer_that_died_since_its_offer(tiny_model: Path, copied: Path) -> None:
    lender = RealEngine("lender", tiny_model, **TORCH)
    async with engines(lender):
        offer, fingerprint = await lender.offer(), lender.ready.model_fingerprint
        kill(lender.pid)
        await lender.has_ended()
        borrower = RealEngine("borrower", copied, offer=offer, **TORCH)
        async with engines(borrower):
            assert not borrower.ready.weights_from_peer
            assert borrower.ready.model_fingerprint == fingerprint
            assert chosen(await borrower.answer(greedy("r", PROMPT)))


@pytest.mark.parametrize("lanes", ["all", "tcp"])
def test_a_peer_that_dies_in_the_middle(lanes: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCX_TLS", lanes)
    num_bytes = 256 << 20
    lender = ProcessLender(3, num_bytes, UCX_TLS=lanes)
    try:
        offer = WeightsOffer("lender", (WeightFile("model.safetensors", num_bytes, ""),), bytes(32), lender.endpoint)
        opener = lambda: open_transport("nixl", f"borrower-{lanes}")  # noqa: E731
        fetch = WeightsFetch(offer, blake2b(digest_size=32), opener, 5.0)
        fetch.wait_for(1)
        lender.kill()
        with pytest.raises(WeightsLost):
            fetch.wait_for(num_bytes)
        assert (fetch.memory[:1024] == lender.data[:1024]).all()
    finally:
        lender.kill()


@pytest.mark.parametrize("lanes", ["all", "tcp"])
def test_all_bytes_arrive_in_order(lanes: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCX_TLS", lanes)
    num_bytes = 9 << 20
    lender = ProcessLender(4, num_bytes, UCX_TLS=lanes)
    try:
        fingerprint = blake2b(b"model.safetensors" + lender.data.tobytes(), digest_size=32).digest()
        offer = WeightsOffer("lender", (WeightFile("model.safetensors", num_bytes, ""),), fingerprint, lender.endpoint)
        opener = lambda: open_transport("nixl", f"reader-{lanes}")  # noqa: E731
        fetch = WeightsFetch(offer, blake2b(digest_size=32), opener, 5.0)
        assert fetch.confirm() == fingerprint
        assert (fetch.memory[:num_bytes] == lender.data).all()
    finally:
        lender.kill()
