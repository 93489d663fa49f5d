"""Models that read sounds or videos: lent KV gives the tokens of vLLM alone, and broken files are refused."""

import asyncio
import base64
import json
import os
import subprocess
from collections.abc import Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import openai
import pytest

from cluster.errors import InvalidRequest
from support.long_runs import long, mostly_long
from support.media_files import picture, sound
from support.preprocessors import preprocessor, request_of
from support.processes import LENDER_ALWAYS, running
from support.real_engines import engines
from support.torchvision_shim import PYTHON, V2
from support.vllm_engines import BLOCK, OPTIONS, ids, need_vllm, vllm_engine
from support.vllm_pictures import MEDIA, Prompts, alone, write_model
from tandem.local.local_cluster import LocalCluster
from tandem.topology import plan_topology

pytestmark = need_vllm
MEDIUM = {"qwen2audio": "audio", "qwen25vl": "video", "qwen3vl": "video"}
"""What each model reads here."""
WRITE_VIDEO = """
import sys, cv2, numpy
for seed, name in enumerate(sys.argv[1:]):
    writer, rng = cv2.VideoWriter(name, cv2.VideoWriter_fourcc(*"mp4v"), 2, (112, 84)), numpy.random.default_rng(seed)
    for _ in range(6):
        writer.write(cv2.resize(rng.integers(0, 255, (3, 4, 3), dtype=numpy.uint8), (112, 84), interpolation=0))
    writer.release()
"""
WRITE_SOUNDS = """
import sys, pathlib, numpy, soundfile, av
folder, samples = pathlib.Path(sys.argv[1]), soundfile.read(sys.argv[2], dtype="int16")[0]
for name in ("same.flac", "other.ogg", "other.mp3"):
    soundfile.write(folder / name, samples, 16000)
soundfile.write(folder / "hour.flac", numpy.zeros(3600 * 8000, "int16"), 8000)
for name, codec, seconds in (("other.m4a", "aac", 1), ("other.webm", "libopus", 1), ("hour.m4a", "aac", 3600)):
    with av.open(str(folder / name), "w") as container:
        stream = container.add_stream(codec, rate=48000, layout="mono")
        for start in range(0, seconds * 48000, 48000):
            frame = av.AudioFrame.from_ndarray(numpy.tile(samples, (1, 3))[:, :48000], "s16", "mono")
            frame.sample_rate, frame.pts = 48000, start
            container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
"""


def written(script: str, *arguments: Path) -> None:
    subprocess.run([PYTHON, "-c", script, *arguments], check=True)


def files_of(medium: str, folder: Path) -> list[Path]:
    """Two files of one length."""
    if medium == "video":
        files = [folder / "0.mp4", folder / "1.mp4"]
        written(WRITE_VIDEO, *files)
        return files
    files = [folder / "0.wav", folder / "1.wav"]
    for seed, file in enumerate(files):
        file.write_bytes(sound(seed, 1.5))
    return files


@pytest.mark.parametrize("python", mostly_long([PYTHON, V2], V2), ids=lambda python: python.name)
@pytest.mark.parametrize("kind", mostly_long(MEDIUM, "qwen2audio"))
async def test_lent_kv_gives_the_tokens_of_vllm_alone(kind: str, python: Path, tmp_path: Path) -> None:
    """Also where the last lent block ends within a file's tokens, and of another file of that length at that place."""
    model, medium = await asyncio.to_thread(write_model, kind, tmp_path), MEDIUM[kind]
    files = await asyncio.to_thread(files_of, medium, tmp_path)
    cores = sorted(os.sched_getaffinity(0))
    lender = vllm_engine("lender", "prefill", model, cores=(cores[0],), vllm_python=python)
    borrower = vllm_engine("borrower", model=model, cores=(cores[-1],), vllm_python=python)
    async with AsyncExitStack() as opened:
        caller, _ = await opened.enter_async_context(preprocessor(**MEDIA, model=model, processes=1))
        prompts = Prompts(kind, model, caller, medium)
        shapes = [(40, "file", 30), (3, "file", 50), (40, "file", 2), (20, "file", 9, "file", 30)]
        cases = [
            (prompts.tokens(*shape), [files[(first + number) % 2] for number in range(shape.count("file"))])
            for shape in shapes
            for first in (0, 1)
        ]
        expected = await asyncio.to_thread(alone, model, cases)
        assert any(expected[at] != expected[at + 1] for at in range(0, len(cases), 2)), "the files decide the tokens"
        await opened.enter_async_context(engines(lender, borrower))
        for number, ((tokens, given), answer) in enumerate(zip(cases, expected, strict=True)):
            async with prompts.request(f"r{number}", tokens, *given) as request:
                assert len(request.items) == len(given)
                borrowed = await borrower.answer(request, lender)
                assert ids(borrowed) == answer, (number, tokens)
                account = borrowed[0].account
                assert account is not None
                assert account.moved_blocks + account.reused_blocks == (len(request.prompt) - 1) // BLOCK
                assert account.mismatched_blocks == 0
        for engine in (lender, borrower):
            assert (await engine.audited()).reserved_blocks == 0
