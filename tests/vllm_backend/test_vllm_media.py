"""Pictures by vLLM's own processors, in a preprocessor's child: what comes out is what vLLM itself makes of them."""

import asyncio
import json
import os
import random
import subprocess
from base64 import b64encode
from collections import Counter
from collections.abc import Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from cluster.errors import InvalidRequest, StartError
from engine.media import MAX_THUMBNAIL_BYTES, MAX_THUMBNAILS
from preprocessor.service import item_identifier
from support.hostile_files import hostile_files
from support.long_runs import mostly_long
from support.media_files import picture, png_of_size
from support.preprocessors import preprocessor, request_of
from support.refusals import refusal_of
from support.tiny_media_models import KINDS, PLACEHOLDERS, write_media_model
from support.torchvision_shim import PYTHON, install
from support.vllm_engines import need_vllm
from support.vllm_pictures import token_ids_of

pytestmark = need_vllm
TRIALS = int(os.environ.get("TANDEM_TRIALS", "60"))
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module", autouse=True)
def _torchvision() -> None:
    install()


async def reference(model: Path, token_ids: Sequence[int], items: Path, files: Sequence[Path]) -> Any:
    """Tokens and items of vLLM itself; fails where its tensors are not those of the items."""
    arguments = [str(model), json.dumps(list(token_ids)), str(items), *map(str, files)]
    process = await asyncio.create_subprocess_exec(
        *(str(PYTHON), "-m", "support.vllm_media_reference", *arguments),
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")])},
        stdout=asyncio.subprocess.PIPE,
    )
    output, _ = await process.communicate()
    assert process.returncode == 0
    return json.loads(output.splitlines()[-1])


@pytest.mark.parametrize("kind", mostly_long(KINDS, "llava", "qwen25vl"))
async def test_tokens_and_tensors_are_those_of_vllm(kind: str, tmp_path: Path) -> None:
    model = write_media_model(kind, tmp_path)
    place = PLACEHOLDERS[kind]
    prompt = token_ids_of(model, f"w20 w21 {place} w22 {place} w23")
    files = [tmp_path / "first.png", tmp_path / "second.png"]
    for seed, file in enumerate(files):
        file.write_bytes(picture(seed, 84 + 28 * seed, 112))
    items = tmp_path / "items.json"
    async with preprocessor(engine="vllm", vllm_python=PYTHON, model=model, processes=1, dtype="float32") as (
        caller,
        _,
    ):
        assert (await caller.describe())["image"].placeholder == place
        async with caller.leased(request_of(prompt, *(file.read_bytes() for file in files))) as reply:
            blobs = await caller.fetch(reply.items)
            made = [{"details": item.details, "blob": blobs[item.identifier]} for item in reply.items]
            texts = [{name: b64encode(data).decode() for name, data in each.items()} for each in made]
            items.write_text(json.dumps(texts))
        expected = await reference(model, prompt, items, files)
        assert list(reply.prompt_token_ids) == expected["token_ids"]
        places = [[item.identifier, item.offset, item.length] for item in reply.items]
        assert places == [[item_identifier(name, ""), *others] for name, *others in expected["items"]]
        forms = [
            (await caller.process(request_of(token_ids_of(model, f"w20 {place}"), picture(1, form=form)))).items[0]
            for form in ("PNG", "BMP")
        ]
        assert forms[0].identifier == forms[1].identifier
        other = await caller.process(request_of(token_ids_of(model, f"w20 {place}"), picture(2)))
        assert other.items[0].identifier != forms[0].identifier
        for wrong, field in (
            (request_of(prompt, picture()), "media[0]"),
            (request_of(prompt, picture(), b"<svg/>"), "media[1]"),
            (request_of(token_ids_of(model, "w20"), picture()), "media[0]"),
            (request_of(token_ids_of(model, place), png_of_size(20_000, 20_000)), "media[0]"),
        ):
            with refusal_of(field):
                await caller.process(wrong)


async def test_thumbnails_show_the_pictures(tmp_path: Path) -> None:
    """Upright and within their bounds; one picture is half red and half blue, the others are noise."""
    model = write_media_model("llava", tmp_path)
    halves = Image.new("RGB", (240, 480), "red")
    halves.paste("blue", (0, 240, 240, 480))
    exif, file = Image.Exif(), BytesIO()
    exif[0x0112] = 6  # the camera was turned by 90 degrees
    exif[0x010E] = "taken at home"
    halves.save(file, "JPEG", exif=exif)
    files = [file.getvalue(), *(picture(seed, 60 * seed, 150) for seed in range(1, MAX_THUMBNAILS + 1))]
    prompt = token_ids_of(model, " ".join(["w20", *[PLACEHOLDERS["llava"]] * len(files)]))
    async with preprocessor(engine="vllm", vllm_python=PYTHON, model=model, processes=1) as (caller, _):
        reply = await caller.process(request_of(prompt, *files, thumbnails=True))
        unasked = await caller.process(request_of(prompt, *files))
    assert not unasked.thumbnails
    assert unasked.items == reply.items
    assert len(reply.thumbnails) == MAX_THUMBNAILS
    for each in reply.thumbnails:
        with Image.open(BytesIO(each)) as small:
            assert small.format == "WEBP"
            assert max(small.size) <= 96
            assert not small.getexif()
        assert len(each) <= MAX_THUMBNAIL_BYTES
    with Image.open(BytesIO(reply.thumbnails[0])) as small:
        assert small.size == (96, 48)
        left, right = (small.convert("RGB").getpixel((x, 24)) for x in (20, 76))
        assert isinstance(left, tuple)
        assert isinstance(right, tuple)
        assert left[2] > 200 > 60 > left[0]
        assert right[0] > 200 > 60 > right[2]


WRITE_VIDEO = """
import sys, cv2, numpy
writer = cv2.VideoWriter(sys.argv[1], cv2.VideoWriter_fourcc(*"mp4v"), 8, (112, 84))
for seed in range(16):
    writer.write(numpy.random.default_rng(seed).integers(0, 255, (84, 112, 3), dtype=numpy.uint8))
writer.release()
"""
PLAYLISTS = (
    b"#EXTM3U\n#EXTINF:1,\nfile:///etc/passwd\n#EXT-X-ENDLIST\n",
    b"ffconcat version 1.0\nfile /etc/passwd\n",
    b"v=0\no=- 0 0 IN IP4 127.0.0.1\ns=x\nc=IN IP4 127.0.0.1\nm=video 9 RTP/AVP 96\n",
)


@pytest.mark.parametrize("kind", mostly_long(("qwen25vl", "qwen3vl"), "qwen25vl"))
async def test_videos_are_read_and_playlists_are_not(kind: str, tmp_path: Path) -> None:
    model, file = write_media_model(kind, tmp_path), tmp_path / "video.mp4"
    await asyncio.to_thread(subprocess.run, [PYTHON, "-c", WRITE_VIDEO, file], check=True)
    prompt = token_ids_of(model, "w20 <|vision_start|><|video_pad|><|vision_end|> w21")
    async with preprocessor(engine="vllm", vllm_python=PYTHON, model=model, processes=1, max_pixels=9500) as (
        caller,
        _,
    ):
        assert set(await caller.describe()) == {"image", "video"}
        request = request_of(prompt, file.read_bytes(), kind="video")
        (item,) = (await caller.process(request)).items
        assert item.length >= 8
        for other in (*PLAYLISTS, picture(), file.read_bytes()[:200]):
            with refusal_of("media[0]", match=r"no video of a known format|cannot be read"):
                await caller.process(request_of(prompt, other, kind="video"))
        assert (await caller.process(request)).items[0] == item


async def test_hostile_files_are_refused_and_good_ones_in_between_work(tmp_path: Path) -> None:
    model = write_media_model("qwen25vl", tmp_path)
    prompt = token_ids_of(model, f"w20 {PLACEHOLDERS['qwen25vl']}")
    good = picture(3)
    async with preprocessor(engine="vllm", vllm_python=PYTHON, model=model, processes=2, item_limit_s=10) as (
        caller,
        role,
    ):
        expected = await caller.process(request_of(prompt, good))
        outcomes: Counter[str] = Counter()
        for number, file in enumerate(hostile_files(random.Random(5), TRIALS)):
            try:
                await caller.process(request_of(prompt, file))
                outcomes["read"] += 1
            except InvalidRequest as error:
                outcomes["refused" if error.field == "media[0]" else error.field] += 1
            if number % 10 == 0:
                assert await caller.process(request_of(prompt, good)) == expected
        assert role.process.returncode is None
        assert outcomes["refused"] > TRIALS // 2, outcomes
        assert set(outcomes) <= {"refused", "read"}
        assert await caller.process(request_of(prompt, good)) == expected
        print(outcomes)


async def test_a_model_of_texts_needs_no_preprocessor(tiny_model: Path) -> None:
    with pytest.raises(StartError, match="needs no preprocessor"):
        async with preprocessor(engine="vllm", vllm_python=PYTHON, model=tiny_model):
            pass
