"""Models made on the spot (tiny, random, of many architectures), and clusters of real processes over them."""

import asyncio
import os
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

if "PYTEST_XDIST_WORKER" in os.environ:  # before torch is imported: two teams of threads on the same cores only spin
    os.environ["OMP_NUM_THREADS"] = "1"

from cluster.network.rpc import channel
from protos import inference_pb2 as pb
from protos import membership_pb2, membership_pb2_grpc
from support.fork_server import ForkServer
from support.sim_directories import write_sim_model, write_tokenizer
from tandem.client import Client
from tandem.local.local_cluster import LocalCluster
from tandem.topology import plan_topology

VOCAB = 500
CONTEXT = 512
WINDOW = 24
SILENCE_S = 60.0
"""Seconds of silence that a test's cluster takes for a busy machine; tests of silence set their own."""

ModelFactory = Callable[..., Path]


def _configs() -> dict[str, Any]:
    import transformers as tf

    common: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": CONTEXT,
        "eos_token_id": None,
        "bos_token_id": None,
        "pad_token_id": 0,
    }
    mixed = ["sliding_attention", "full_attention", "sliding_attention"]
    return {
        "llama": lambda: tf.LlamaConfig(**common),
        "qwen2": lambda: tf.Qwen2Config(**common),
        "qwen3": lambda: tf.Qwen3Config(**common, head_dim=16),
        "mistral": lambda: tf.MistralConfig(**common, sliding_window=WINDOW),
        "gemma2": lambda: tf.Gemma2Config(**common, head_dim=16, sliding_window=WINDOW),
        "gemma3": lambda: tf.Gemma3TextConfig(**common, head_dim=16, sliding_window=WINDOW, layer_types=mixed),
        "mixtral": lambda: tf.MixtralConfig(**common, num_local_experts=4),
        "qwen3_moe": lambda: tf.Qwen3MoeConfig(
            **common, head_dim=16, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32
        ),
    }


@pytest.fixture(scope="session")
def make_model(tmp_path_factory: pytest.TempPathFactory) -> ModelFactory:
    """make_model(family, seed=0, dtype="float32") -> its directory, made once a session."""
    made: dict[tuple[str, int, str], Path] = {}

    def make(family: str, seed: int = 0, dtype: str = "float32") -> Path:
        if (family, seed, dtype) not in made:
            import torch
            from transformers import AutoModelForCausalLM
            from transformers.utils import logging

            logging.set_verbosity_error()
            logging.disable_progress_bar()
            torch.manual_seed(seed)
            model = AutoModelForCausalLM.from_config(_configs()[family]()).to(getattr(torch, dtype))
            with torch.no_grad():  # the usual initialisation is so small that logits hardly differ
                for parameter in model.parameters():
                    if parameter.dim() > 1:
                        parameter.normal_(0, 0.1)
            path = tmp_path_factory.mktemp("models") / f"tiny-{family}-{seed}"
            model.save_pretrained(path)
            made[(family, seed, dtype)] = path
        return made[(family, seed, dtype)]

    return make


@pytest.fixture(scope="session")
def tiny_model(make_model: ModelFactory) -> Path:
    """A tiny Llama, where the architecture does not matter."""
    return make_model("llama")


@pytest.fixture(scope="session")
def sim_model(tmp_path_factory: pytest.TempPathFactory) -> ModelFactory:
    """sim_model(vocab_size, speaks=False) -> a directory with what the sim engine reads of a model, and a tokenizer."""

    def make(vocab_size: int, speaks: bool = False) -> Path:
        path = write_sim_model(tmp_path_factory.mktemp("models") / "simulated", vocab_size)
        if speaks:
            write_tokenizer(path, vocab_size)
        return path

    return make


@pytest.fixture
def model(sim_model: ModelFactory) -> Path:
    """One that the sim engine stands for, where a test needs no other."""
    return sim_model(1000)


@pytest.fixture(scope="session")
def fork_server() -> Iterator[ForkServer]:
    """Server that forks the role processes of the tests that use it."""
    server = ForkServer()
    yield server
    server.close()


@pytest.fixture(scope="module")
def forked_roles(fork_server: ForkServer) -> Iterator[None]:
    """Role processes of a file's tests are forks of one process."""
    with fork_server.used():
        yield


@pytest.fixture
def plain_start(fork_server: ForkServer) -> Iterator[None]:
    """The test's processes start as a user's, with their own imports."""
    with fork_server.unused():
        yield


ClusterFactory = Callable[..., Any]


@pytest.fixture(scope="session")
def cluster_of() -> ClusterFactory:
    """cluster_of(model, prefill=1, decode=1, **worker settings) -> a LocalCluster to enter."""

    def make(
        model: Path,
        prefill: int = 1,
        decode: int = 1,
        router: dict[str, Any] | None = None,
        routers: int = 1,
        **worker: Any,
    ) -> "LocalCluster":
        settings = {"model": model, "kv_memory_mib": 32, "peer_silence_s": SILENCE_S} | worker
        router_settings = {"model": model, "port": 0, "worker_silence_s": SILENCE_S} | (router or {})
        cores = sorted(os.sched_getaffinity(0))
        return LocalCluster(plan_topology(prefill, decode, router_settings, settings, cores, routers))

    return make


@dataclass
class Answer:
    """A whole stream."""

    token_ids: list[int]
    text: str
    finish: pb.Finish
    logprobs: list[pb.TokenLogprobs]

    @property
    def kv(self) -> pb.KvReceipt:
        return self.finish.receipt.kv

    @property
    def placement(self) -> pb.Placement:
        return self.finish.receipt.placement


Ask = Callable[..., Awaitable[Answer]]


@pytest.fixture
def ask() -> Ask:
    """ask(client, prompt, max_tokens=..., temperature=0, ...) -> Answer. Checks that the stream is well formed."""

    async def ask_once(client: Client, token_ids: list[int], **options: Any) -> Answer:
        call = {name: options.pop(name) for name in ("request_id", "cache_salt", "timeout_s") if name in options}
        sampling = pb.Sampling(**{"max_tokens": 8, "temperature": 0} | options)
        messages = [
            message
            async for message in client.generate(token_ids=token_ids, sampling=sampling, **{"timeout_s": 120.0} | call)
        ]
        assert [message.HasField("finish") for message in messages] == [False] * (len(messages) - 1) + [True]
        finish = messages[-1].finish
        tokens = [token_id for message in messages for token_id in message.token_ids]
        assert finish.usage.completion_tokens == len(tokens)
        kv = finish.receipt.kv
        total = kv.reused_blocks + kv.restored_blocks + kv.moved_blocks + kv.computed_blocks
        assert total == -(-len(token_ids) // kv.block_tokens)
        assert kv.verified_blocks == kv.moved_blocks
        return Answer(
            tokens,
            "".join(message.text for message in messages),
            finish,
            [logprobs for message in messages for logprobs in message.logprobs],
        )

    return ask_once


Audit = Callable[..., Awaitable[list[membership_pb2.AuditReport]]]


@pytest.fixture
def audit() -> Audit:
    """audit(addresses) -> every worker's books, once nothing is held any more. Fails when blocks stay held."""

    async def audit_all(addresses: list[str], settle_s: float = 30.0) -> list[membership_pb2.AuditReport]:
        give_up_at = time.monotonic() + settle_s
        while True:
            reports = []
            for address in addresses:
                async with channel(address) as link:
                    stub = membership_pb2_grpc.WorkerStub(link)
                    reports.append(await stub.Audit(membership_pb2.AuditRequest(), timeout=60))
            assert not any(report.fault for report in reports), reports
            held = [(r.held_blocks, r.reserved_blocks, r.quarantined_blocks, r.requests, r.loans) for r in reports]
            if all(books == (0, 0, 0, 0, 0) for books in held):
                return reports
            assert time.monotonic() < give_up_at, f"still held: {reports}"
            await asyncio.sleep(0.05)

    return audit_all
