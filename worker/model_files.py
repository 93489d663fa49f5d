"""Files of a worker's models, fetched before its engine opens them."""

import asyncio
from collections.abc import AsyncIterator

from engine.config import WorkerConfig
from engine.errors import ModelRefused
from engine.model.hub import LORA_FILES, fetch_beside
from engine.model.model_dir import ModelDir
from engine.model.page_cache import in_page_cache
from protos import membership_pb2 as pb

PART_BYTES = 1 << 20
"""Bytes of a file in one message; gRPC takes 4 MiB by default."""


async def with_local_files(config: WorkerConfig) -> WorkerConfig:
    """Return the settings with local directories in place of repositories, after fetching these.

    Raises EngineStartError.
    """
    paths: dict[str, object] = {"model": await fetch_beside(config.model, config.kind.model_files)}
    if config.adapters:
        adapters = config.adapters.items()
        paths["adapters"] = {name: await fetch_beside(path, LORA_FILES, "adapters") for name, path in adapters}
    return config.model_copy(update=paths)


async def weights_source(config: WorkerConfig, model_dir: ModelDir) -> str:
    """Return where the engine reads weights from: disk or page cache; empty where it reads none itself.

    A directory without weights is left to the engine, which has more to say of a model that it refuses.
    """
    if not config.kind.reads_weight_files:
        return ""
    try:
        files = model_dir.weight_files()
    except ModelRefused:
        return ""
    return "page cache" if await asyncio.to_thread(in_page_cache, files) else "disk"


async def file_parts(model_dir: ModelDir) -> AsyncIterator[pb.ModelFilePart]:
    """Yield the files that a router reads of the model, in parts of at most PART_BYTES."""
    files = await asyncio.to_thread(model_dir.files_for_routers)
    for file in files:
        content, name = await asyncio.to_thread(file.read_bytes), file.relative_to(model_dir.path).as_posix()
        for start in range(0, max(1, len(content)), PART_BYTES):
            is_last = file is files[-1] and start + PART_BYTES >= len(content)
            yield pb.ModelFilePart(name=name, content=content[start : start + PART_BYTES], is_last=is_last)
