"""Tiny models that read pictures, sounds or videos on vLLM engines: prompts, and what vLLM alone answers."""

import json
import os
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from encode_worker.config import EncoderConfig
from engine.messages.to_engine import Generate
from kvcache.item_messages import read_items
from support.preprocessors import Caller, request_of
from support.real_engines import greedy
from support.tiny_media_models import PLACEHOLDERS, VIDEO_PLACEHOLDER
from support.torchvision_shim import PYTHON, install
from support.vllm_engines import OPTIONS, ROOT
from tandem.local.local_cluster import RoleProcess, start_role, stop_process

MAX_TOKENS = 12
MEDIA = {"engine": "vllm", "vllm_python": PYTHON, "dtype": "float32"}
ENVIRONMENT = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")])}


def write_model(kind: str, folder: Path) -> Path:
    """A model with weights."""
    install()
    subprocess.run([PYTHON, "-m", "support.tiny_media_models", kind, folder, "--weights"], check=True, env=ENVIRONMENT)
    return folder / kind


def alone(model: Path, cases: list[tuple[list[int], list[Path]]]) -> list[list[int]]:
    """What vLLM alone answers."""
    file = model.parent / "cases.json"
    file.write_text(json.dumps([[tokens, list(map(str, files)), MAX_TOKENS] for tokens, files in cases]))
    command: list[Path | str] = [PYTHON, "-m", "support.vllm_alone", model, file]
    output = subprocess.run(command, check=True, env=ENVIRONMENT, stdout=subprocess.PIPE).stdout
    answers: list[list[int]] = json.loads(output.splitlines()[-1])
    return answers


def token_ids_of(model: Path, text: str) -> list[int]:
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
    return ids


class Prompts:
    """Prompts with files of one kind, `medium`, of one model."""

    def __init__(self, kind: str, model: Path, caller: Caller, medium: str = "image") -> None:
        self._place = VIDEO_PLACEHOLDER if medium == "video" else PLACEHOLDERS[kind]
        self._medium = medium
        self._model = model
        self._caller = caller

    def tokens(self, *parts: int | str) -> list[int]:
        """Numbers of words, or any text for a file, in order."""
        words = [f"w{20 + number}" for number in range(250)]
        texts = [self._place if isinstance(part, str) else " ".join(words[:part]) for part in parts]
        return token_ids_of(self._model, " ".join(texts))

    @asynccontextmanager
    async def request(
        self, name: str, tokens: list[int], *files: Path, cache_salt: str = ""
    ) -> AsyncIterator[Generate]:
        contents = [file.read_bytes() for file in files]
        wanted = request_of(tokens, *contents, kind=self._medium, cache_salt=cache_salt)
        async with self._caller.leased(wanted) as reply:
            request = greedy(name, reply.prompt_token_ids, MAX_TOKENS, ignore_eos=True)
            yield request._replace(items=read_items(reply.items))


@asynccontextmanager
async def encode_worker(model: Path, port: int = 0, **settings: Any) -> AsyncIterator[RoleProcess]:
    place = {"model": model, "port": port, "metrics_port": 0, "drain_s": 0.0}
    options = {"vllm_options": {"max_model_len": OPTIONS["max_model_len"]}}
    config = EncoderConfig.parse(place | MEDIA | options | settings)
    role = await start_role("encode_worker", "encoder", config)
    try:
        yield role
    finally:
        await stop_process(role.process)
