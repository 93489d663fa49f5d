"""Files of served models, read by the router: its own, and those that workers of another revision bring."""

import asyncio
import logging
import shutil
import tempfile
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from cluster.errors import Incompatible, InvalidRequest, StartError, Unavailable
from engine.core_types import Pooler
from engine.errors import ModelRefused
from engine.model.embedding import has_output_layer, read_embedding
from engine.model.hub import CONFIG_FILES, fetch_beside
from engine.model.model_dir import ModelDir
from protos import membership_pb2 as pb
from router.models.config import AUTO, ModelEntry, ModelsConfig
from router.models.prompts.prompts import PromptEncoder

log = logging.getLogger(__name__)

MAX_FILES, MAX_MIB = 64, 256
"""Files of a revision that a worker may send, and their size in MiB; the largest tokenizers have 40 MiB."""
FILES_S = 60.0
"""Seconds within which a worker sends them."""


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """Files of one revision of a model, as a router reads them."""

    entry: ModelEntry
    config: ModelsConfig
    model_dir: ModelDir
    encoder: PromptEncoder
    config_fingerprint: bytes
    pooler: Pooler | None
    """Way to its vectors; None for a model that is neither an embedding model nor a classifier."""
    pooler_fault: str
    """Reason why there are no vectors; empty where there are."""
    generates: bool
    """Whether it can generate; a model that was saved for embeddings only may not."""
    clamps: bool
    """Whether a `max_tokens` beyond the context is lowered instead of refused."""

    @classmethod
    def read(cls, entry: ModelEntry, directory: Path, config: ModelsConfig) -> "ModelFiles":
        """Read a model directory.

        Raises StartError.
        """
        model_dir = ModelDir.open(directory)
        # Read now, so that a config without them is refused at start and not with the first request.
        size, context = model_dir.vocab_size, model_dir.max_context_tokens
        parsers = entry.tool_parser, entry.reasoning_parser
        encoder = PromptEncoder(model_dir, *parsers, config.special_tokens_in_messages)
        log.info("%s: %d tokens, context %d", entry.name or model_dir.name, size, context)
        try:
            pooler, fault = read_embedding(model_dir), ""
        except ModelRefused as reason:
            pooler, fault = None, reason.reason
        generates = pooler is None or (not pooler.classifies and has_output_layer(model_dir))
        fingerprint, clamps = model_dir.config_fingerprint(), config.clamp_max_tokens
        return cls(entry, config, model_dir, encoder, fingerprint, pooler, fault, generates, clamps)

    @property
    def name(self) -> str:
        return self.entry.name or self.model_dir.name

    async def of_worker(self, hello: pb.Hello, messages: AsyncIterator[pb.WorkerMessage]) -> "ModelFiles":
        """Read the files of the model that a worker sends, which are another revision of these.

        They lie in a temporary folder until `remove`. Raises Incompatible for files that this router cannot read, and
        InvalidRequest or Unavailable for messages that are none.
        """
        where = Path(await asyncio.to_thread(tempfile.mkdtemp, prefix="tandem-model-")) / "model"
        received: ModelFiles | None = None
        try:
            async with asyncio.timeout(FILES_S):
                await _write(where, messages)
            read = await asyncio.to_thread(ModelFiles.read, self.entry, where, self.config)
            if read.config_fingerprint != hello.config_fingerprint:
                raise Incompatible(f"{hello.worker_id}: its files changed after it had read them", "config_fingerprint")
            received = read
            return received
        except StartError as error:
            raise Incompatible(f"{hello.worker_id}: its files cannot be read here: {error}", "model") from error
        except TimeoutError:
            raise Unavailable(f"{hello.worker_id} did not send the files of its model within {FILES_S:g} s") from None
        finally:
            if received is None:
                await asyncio.to_thread(shutil.rmtree, where.parent)

    def remove(self) -> None:
        """Remove the folder that `of_worker` made."""
        shutil.rmtree(self.model_dir.path.parent)


async def _write(where: Path, messages: AsyncIterator[pb.WorkerMessage]) -> None:
    """Write files that a worker sends into a new folder.

    Raises InvalidRequest for names and sizes out of their limits.
    """
    await asyncio.to_thread(where.mkdir)
    num_bytes, names = 0, set()
    async for message in messages:
        if not message.HasField("file"):
            raise InvalidRequest("file", "must follow FilesWanted")
        part, name = message.file, PurePosixPath(message.file.name)
        num_bytes += len(part.content)
        names.add(name)
        if name.is_absolute() or ".." in name.parts or not name.parts:
            raise InvalidRequest("file.name", f"{part.name!r} is no path below the model's directory")
        if len(names) > MAX_FILES or num_bytes > MAX_MIB << 20:
            raise InvalidRequest("file", f"a model has at most {MAX_FILES} files of {MAX_MIB} MiB together")
        await asyncio.to_thread(_append, where / name, part.content)
        if part.is_last:
            return
    raise Unavailable("the worker left before it had sent the files of its model")


def _append(file: Path, content: bytes) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("ab") as stream:
        stream.write(content)


async def fetch_models(config: ModelsConfig) -> list[Path]:
    """Return the models' local directories, in order, after fetching what a router reads of repositories.

    Raises StartError.
    """
    return [await fetch_beside(entry.path, CONFIG_FILES) for entry in config.entries]


def read_models(config: ModelsConfig, directories: Sequence[Path] | None = None) -> list[ModelFiles]:
    """Read all models, in order, from `directories`; by default those that the settings name.

    Raises StartError for an invalid one, and for two that cannot be told apart.
    """
    places = [entry.path for entry in config.entries] if directories is None else directories
    models = [ModelFiles.read(entry, place, config) for entry, place in zip(config.entries, places, strict=True)]
    for number, model in enumerate(models):
        where = f"models.{number}.name"
        if model.name == AUTO:
            raise StartError(where, f"{model.entry.path}: {AUTO!r} is reserved: clients send it to have a model chosen")
        for other in models[:number]:
            paths = f"{other.entry.path} and {model.entry.path}"
            if other.name == model.name:
                raise StartError(where, f"{paths} have the same name, {model.name!r}")
            same_names = {other.name, other.model_dir.name} & {model.name, model.model_dir.name}
            if other.config_fingerprint == model.config_fingerprint and same_names:
                raise StartError(where, f"{paths} have equal configs and names: a worker's model would be ambiguous")
    names = [model.name for model in models]
    if config.default_model not in ("", AUTO, *names):
        raise StartError("default_model", f"{config.default_model!r} is not among {', '.join(names)}, {AUTO}")
    for number, rule in enumerate(config.model_rules):
        for name in rule.models:
            if name not in names:
                raise StartError(f"model_rules.{number}.models", f"{name!r} is not among {', '.join(names)}")
    return models
