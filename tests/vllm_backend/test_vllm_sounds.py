"""Models that read sounds or videos: lent KV gives the tokens of vLLM alone, and broken files are refused."""

import asyncio
import base64
import os
import struct
import subprocess
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import openai
import pytest

from cluster.errors import InvalidRequest
from support.long_runs import long
from support.media_files import picture, sound
from support.preprocessors import preprocessor, request_of
from support.processes import LENDER_ALWAYS, running
from support.real_engines import engines
from support.tiny_media_models import PLACEHOLDERS, VIDEO_PLACEHOLDER, write_media_model
from support.torchvision_shim import PYTHON, V2, install
from support.vllm_engines import BLOCK, OPTIONS, ids, need_vllm, vllm_engine
from support.vllm_pictures import MEDIA, Prompts, alone, encode_worker, token_ids_of, write_model
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
for name in ("a.flac", "a.ogg", "a.mp3"):
    soundfile.write(folder / name, samples, 16000)
soundfile.write(folder / "hour.flac", numpy.zeros(3600 * 8000, "int16"), 8000)
soundfile.write(folder / "wide.flac", numpy.zeros((60 * 192000, 8), "int16"), 192000)
for name, codec, seconds in (("a.m4a", "aac", 1), ("a.webm", "libopus", 1), ("hour.webm", "libopus", 3600)):
    with av.open(str(folder / name), "w") as container:
        stream = container.add_stream(codec, rate=48000, layout="mono")
        for start in range(0, seconds * 48000, 48000):
            loud = numpy.tile(samples, 3)[None, :48000] * (seconds == 1)
            frame = av.AudioFrame.from_ndarray(loud, "s16", "mono")
            frame.sample_rate, frame.pts = 48000, start
            container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
"""
EBML = b"\x1aE\xdf\xa3"
SESSION = b"\nv=0\no=- 0 0 IN IP4 127.0.0.1\ns=x\nc=IN IP4 127.0.0.1\nm=video 9 RTP/AVP 0\n"
"""Begins as a WebM, and would make FFmpeg listen at a port."""
PLAYLIST = b"ID3\4\0\0\0\0\0\0#EXTM3U\n#EXTINF:1,\nfile:///etc/passwd\n#EXT-X-ENDLIST\n"


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


@long
@pytest.mark.parametrize("python", [PYTHON, V2], ids=lambda python: python.name)
@pytest.mark.parametrize("kind", MEDIUM)
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
                assert account.moved_blocks + account.reused_blocks == (len(request.prompt) - 1) // BLOCK
                assert account.mismatched_blocks == 0
        for engine in (lender, borrower):
            assert (await engine.audited()).reserved_blocks == 0


def in_each_format(wav: bytes, folder: Path) -> dict[str, bytes]:
    """What WRITE_SOUNDS writes, by name."""
    (folder / "a.wav").write_bytes(wav)
    written(WRITE_SOUNDS, folder, folder / "a.wav")
    return {file.name: file.read_bytes() for file in folder.iterdir() if file.is_file()}


def with_data_size(wav: bytes, num_bytes: int) -> bytes:
    """A WAV that claims to have so many bytes of samples."""
    return wav[:40] + struct.pack("<I", num_bytes) + wav[44:]


def with_rate(wav: bytes, rate: int) -> bytes:
    return wav[:24] + struct.pack("<I", rate) + wav[28:]


async def test_sounds_of_each_format_are_read_and_hostile_ones_refused(tmp_path: Path) -> None:
    """Of a WAV that was cut short, or claims more than it has, the samples that are there are read."""
    install()
    model, wav = write_media_model("qwen2audio", tmp_path), sound(1, 1.5)
    files = await asyncio.to_thread(in_each_format, wav, tmp_path)
    tokens = token_ids_of(model, f"w20 {PLACEHOLDERS['qwen2audio']} w21")
    refused = {
        **{f"{name} of 100 bytes": (file[:100], "cannot be read") for name, file in files.items() if name[:2] == "a."},
        **{
            f"half of {name}": (files[name][: len(files[name]) // 2], "cannot be read|no sound")
            for name in ("a.flac", "a.ogg", "a.m4a")
        },
        "head of a WAV": (wav[:30], "cannot be read"),
        "no samples": (wav[:44], "has no sound"),
        "an hour of silence, FLAC": (files["hour.flac"], "longer than 600 s"),
        "an hour of silence, WebM": (files["hour.webm"], "longer than 600 s"),
        "many samples": (files["wide.flac"], "more than 256 MiB"),
        "an odd rate": (with_rate(wav, 44_099), "no multiple of 25"),
        "a high rate": (with_rate(wav, 200_000), "no multiple of 25"),
        "too short": (sound(1, 0.01), "too short"),
        "a picture": (picture(), "no audio of a known format"),
        "a playlist": (PLAYLIST, "cannot be read"),
        "a session": (EBML + SESSION, "cannot be read"),
    }
    del refused["a.wav of 100 bytes"]  # 28 samples, too few

    async with preprocessor(**MEDIA, model=model, processes=1) as (caller, _):
        assert set(await caller.describe()) == {"audio"}

        async def item_of(file: bytes) -> Any:
            (item,) = (await caller.process(request_of(tokens, file, kind="audio"))).items
            return item

        expected = await item_of(wav)
        assert expected.length == 37, "25 tokens a second"
        for same in (files["a.flac"], with_data_size(wav, 3600 * 32_000), with_data_size(wav, 0xFFFFFFFF)):
            assert await item_of(same) == expected
        for name in ("a.ogg", "a.mp3", "a.m4a", "a.webm"):
            assert 20 <= (await item_of(files[name])).length <= 40, name
        for rate in (8_000, 22_050, 44_100, 48_000, 96_000):
            assert (await item_of(sound(1, 1.5, rate))).length == expected.length, rate
        assert (await item_of(wav[: len(wav) // 2])).length < expected.length
        for name, (file, reason) in refused.items():
            with pytest.raises(InvalidRequest, match=reason) as refusal:
                await item_of(file)
            assert refusal.value.field == "media[0]", name
            assert "0x" not in str(refusal.value), name
        assert await item_of(wav) == expected


@long
@pytest.mark.parametrize("kind", MEDIUM)
async def test_embeddings_of_an_encode_worker_give_the_tokens_of_vllm_alone(kind: str, tmp_path: Path) -> None:
    model, medium = await asyncio.to_thread(write_model, kind, tmp_path), MEDIUM[kind]
    files = await asyncio.to_thread(files_of, medium, tmp_path)
    engine = vllm_engine("worker", model=model, vllm_python=PYTHON)
    async with AsyncExitStack() as opened:
        encoder = await opened.enter_async_context(encode_worker(model))
        making = preprocessor(**MEDIA, model=model, processes=1, encoders=[encoder.address])
        caller, _ = await opened.enter_async_context(making)
        prompts = Prompts(kind, model, caller, medium)
        tokens = prompts.tokens(40, "file", 30)
        expected = await asyncio.to_thread(alone, model, [(tokens, [file]) for file in files])
        await opened.enter_async_context(engines(engine))
        for number, file in enumerate(files):
            async with prompts.request(f"first-{number}", tokens, file) as request:
                assert ids(await engine.answer(request)) == expected[number]
            assert not engine.fetches.avoided
            if kind == "qwen3vl":
                continue  # vLLM wants the tokens among the frames, so the worker encodes its videos itself
            nowhere = tuple(item._replace(address="127.0.0.1:1") for item in request.items)
            again = request._replace(request_id=f"again-{number}", cache_salt="other", items=nowhere)
            assert ids(await engine.answer(again)) == expected[number], "its embeddings are known, its blob is nowhere"


@long
async def test_a_video_that_is_a_session_is_refused_at_once(tmp_path: Path) -> None:
    install()
    model = write_media_model("qwen25vl", tmp_path)
    async with preprocessor(**MEDIA, model=model, processes=1) as (caller, _):
        request = request_of(token_ids_of(model, f"w20 {VIDEO_PLACEHOLDER}"), EBML + SESSION, kind="video")
        with pytest.raises(InvalidRequest, match="cannot be read: Could not open"):
            await caller.process(request)


async def test_chats_about_sounds_find_the_blocks_of_earlier_turns(tmp_path: Path, audit) -> None:  # type: ignore[no-untyped-def]
    model = await asyncio.to_thread(write_model, "qwen2audio", tmp_path)
    worker = {"engine": "vllm", "vllm_python": PYTHON, "vllm_options": OPTIONS, "model": model}
    worker |= {"dtype": "float32", "kv_memory_mib": 64, "max_prefill_tokens": 64}
    question = {"type": "text", "text": " ".join(f"w{number}" for number in range(30, 70))}

    def heard(file: bytes) -> dict[str, Any]:
        return {"type": "input_audio", "input_audio": {"data": base64.b64encode(file).decode(), "format": "wav"}}

    first: list[Any] = [{"role": "user", "content": [question, heard(sound(1, 1.5))]}]
    other: list[Any] = [{"role": "user", "content": [question, heard(sound(2, 1.5))]}]
    async with AsyncExitStack() as opened:
        _, role = await opened.enter_async_context(preprocessor(**MEDIA, model=model, processes=1))
        router = {"models": [{"path": model, "preprocessor": role.address}], "port": 0, "http_port": 0} | LENDER_ALWAYS
        topology = plan_topology(1, 1, router, worker, [0, 1], 1)
        cluster, _ = await opened.enter_async_context(running(LocalCluster(topology)))
        base_url = f"http://{cluster.router.http_address}/v1"
        client = await opened.enter_async_context(openai.AsyncOpenAI(base_url=base_url, api_key="none", max_retries=0))

        def ask(messages: list[Any]) -> Any:
            options: dict[str, Any] = {"temperature": 0, "max_tokens": 12, "extra_body": {"ignore_eos": True}}
            return client.chat.completions.create(model="qwen2audio", messages=messages, **options)

        answer = await ask(first)
        text = answer.choices[0].message.content
        assert (await ask(first)).choices[0].message.content == text
        assert (await ask(other)).choices[0].message.content != text
        await asyncio.sleep(0.5)  # the router learns what the decode worker holds
        turn = {"role": "assistant", "content": text}
        again = await ask([*first, turn, {"role": "user", "content": [heard(sound(3, 1.0))]}])
        assert again.usage.prompt_tokens > answer.usage.prompt_tokens + 25
        cached = again.usage.prompt_tokens_details.cached_tokens
        assert cached >= answer.usage.prompt_tokens // BLOCK * BLOCK
        for broken in (b"RIFF....WAVE", b"no sound", sound(1, 1.5)[:44]):
            with pytest.raises(openai.BadRequestError) as refusal:
                await ask([*first, turn, {"role": "user", "content": [question, heard(broken)]}])
            assert refusal.value.param == "messages[2].content[1].input_audio.data"
        assert (await ask(first)).choices[0].message.content == text
        await audit([each.address for each in [*cluster.prefill, *cluster.decode]])
