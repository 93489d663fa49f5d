"""The example that reads pictures, as README.md starts it: right answers about pictures that it has never seen."""

import asyncio
import os
import random
import sys
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest

from protos import inference_pb2 as pb
from support.processes import LENDER_ALWAYS, running
from support.shape_pictures import draw
from support.shape_pictures import scene as scene_of
from support.torchvision_shim import PYTHON, install
from support.vllm_engines import ROOT, need_vllm
from tandem.client import Client
from tandem.cluster_file import read_cluster
from tandem.local.local_cluster import LocalCluster

pytestmark = need_vllm

HOME = ROOT / "examples" / "shapes"
UNSEEN = 20_260
QUESTION = "What is in the picture?"


def drawn(count: int) -> list[tuple[bytes, str]]:
    """Pictures as files, and what they show."""
    rng, made = random.Random(UNSEEN), []
    for _ in range(count):
        scene, file = scene_of(rng), BytesIO()
        draw(scene, rng).save(file, "PNG")
        made.append((file.getvalue(), f"{scene.description}.".capitalize()))
    return made


async def ask(client: Client, file: bytes, *turns: str) -> tuple[str, pb.Receipt]:
    """The last answer of a chat whose other answers are those given between its questions."""
    roles = [("user", "assistant")[number % 2] for number in range(len(turns))]
    first: Any = [{"type": "image", "data": file}, turns[0]]
    messages: Any = [*zip(roles, (first, *turns[1:]), strict=True)]
    text = ""
    async for piece in client.generate(messages=messages, sampling=pb.Sampling(temperature=0, max_tokens=24)):
        text += piece.text
        if piece.HasField("finish"):
            return text, piece.finish.receipt
    raise AssertionError("the answer has no end")


async def commanded(address: str, sample: Path) -> str:
    """What `tandem chat` prints about a sample."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tandem.cli", "chat", "--address", address),
        *("--temperature", "0", "--image", str(sample)),
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    output, _ = await process.communicate(f"{QUESTION}\n".encode())
    assert process.returncode == 0
    return output.decode()


@pytest.mark.usefixtures("plain_start")
async def test_the_example_reads_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    install()
    monkeypatch.chdir(ROOT)
    cluster_file = read_cluster(HOME / "cluster.yaml", None, 1, 1)
    router = {"port": 0, "http_port": None} | LENDER_ALWAYS
    cores = sorted(os.sched_getaffinity(0))
    topology = cluster_file.plan(router, {"vllm_python": PYTHON}, cores, 1)
    assert (len(topology.prefill), len(topology.decode)) == (1, 1)
    assert topology.preprocessor is not None
    async with running(LocalCluster(topology)) as (cluster, client):
        right = num_borrowed = 0
        for file, shown in drawn(20):
            answer, receipt = await ask(client, file, QUESTION)
            right += answer == shown
            print(f"{shown} The model says: {answer}")
            num_borrowed += bool(receipt.kv.moved_blocks)
            assert receipt.kv.moved_blocks or receipt.kv.loan_failure.startswith("the lender was silent"), receipt.kv
        assert right >= 18
        assert num_borrowed, "the prefill worker reads pictures"
        file, shown = next((file, shown) for file, shown in drawn(20) if " and " not in shown)
        colour, shape = shown.removesuffix(".").split()[1:]
        answer, receipt = await ask(client, file, QUESTION, shown, f"Which colour is the {shape}?")
        assert answer == f"The {shape} is {colour}."
        assert receipt.kv.reused_blocks, "the second question finds the picture in the cache"
        for sample in sorted((HOME / "samples").glob("*.png")):
            assert f"{sample.stem.replace('-', ' ')}.".capitalize() in await commanded(cluster.address, sample)
