"""Chats with pictures: the router makes the tokens that vLLM makes, whether templates read parts or not."""

import asyncio
import base64
import json
import os
from pathlib import Path
from typing import Any

import pytest

from engine.model.model_dir import ModelDir
from router.frontend.http.errors import Caller
from router.frontend.openai.chat import read_chat
from router.models.prompts.prompts import PromptEncoder
from support.long_runs import mostly_long
from support.media_files import picture
from support.tiny_media_models import KINDS, PLACEHOLDERS, write_media_model
from support.torchvision_shim import PYTHON, install
from support.vllm_engines import ROOT, need_vllm

pytestmark = need_vllm


def image(seed: int) -> dict[str, Any]:
    url = f"data:image/png;base64,{base64.b64encode(picture(seed)).decode()}"
    return {"type": "image_url", "image_url": {"url": url}}


def text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words}


CHATS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": "w20 w21"}],
    [{"role": "user", "content": [image(1), text("w20 w21")]}],
    [{"role": "user", "content": [text("w20"), image(1), text("w21 w22"), image(2)]}],
    [{"role": "user", "content": [image(1)]}],
    [
        {"role": "user", "content": [text("w20"), image(1)]},
        {"role": "assistant", "content": "w23 w24"},
        {"role": "user", "content": [image(2), text("w25")]},
    ],
]


async def reference(model: Path) -> list[list[int]]:
    process = await asyncio.create_subprocess_exec(
        *(str(PYTHON), "-m", "support.vllm_chat_reference", str(model), json.dumps(CHATS)),
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")])},
        stdout=asyncio.subprocess.PIPE,
    )
    output, _ = await process.communicate()
    assert process.returncode == 0
    found: list[list[int]] = json.loads(output.splitlines()[-1])
    return found


@pytest.mark.parametrize("kind", mostly_long(KINDS, "llava", "qwen25vl"))
async def test_chats_have_the_tokens_of_vllm(kind: str, tmp_path: Path) -> None:
    install()
    model = write_media_model(kind, tmp_path)
    encoder = PromptEncoder(ModelDir.open(model))
    own = []
    for messages in CHATS:
        (request,) = read_chat({"messages": messages}, Caller("", "r")).requests
        own.append(await encoder.encode(request, placeholders={"image": PLACEHOLDERS[kind]}))
    assert own == await reference(model)
