"""Models of the Hugging Face Hub: a `model` setting names a local directory, or a repository as org/name[@revision].

Token, endpoint, cache and offline mode are huggingface_hub's own: HF_TOKEN, HF_ENDPOINT, HF_HOME, HF_HUB_CACHE and
HF_HUB_OFFLINE.
"""

import asyncio
import json
import logging
import re
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import BeforeValidator

from engine.errors import ModelRefused

log = logging.getLogger(__name__)


STOP_S = 5.0
"""Seconds within which a download that is told to stop ends by itself."""
_REPOSITORY = re.compile(r"(?P<name>[\w-][\w.-]*/[\w-][\w.-]*)(?:@(?P<revision>\S+))?", re.ASCII)


@dataclass(frozen=True, slots=True)
class RepositoryFiles:
    """Files to fetch of a repository; nothing else of it is read, least of all code and pickled weights."""

    patterns: tuple[str, ...]
    """Names as fnmatch has them, in any folder of the repository."""
    required: tuple[str, ...]
    """Patterns that must each match a file of the top folder."""


CONFIG_FILES = RepositoryFiles(("*.json", "*.jinja", "*.model", "*.tiktoken", "*.txt"), ("config.json",))
"""Config, tokenizer, chat template, generation config and pooling: all that a router reads."""
MODEL_FILES = RepositoryFiles((*CONFIG_FILES.patterns, "*.safetensors"), ("config.json", "*.safetensors"))
"""Files of a worker that computes."""
ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors")
LORA_FILES = RepositoryFiles(ADAPTER_FILES, ADAPTER_FILES)
"""Files of a LoRA adapter."""
IGNORED = ("consolidated*.safetensors", "onnx/*", "openvino/*", "original/*")
"""Copies of the same weights in formats that transformers does not read."""


@dataclass(frozen=True, slots=True)
class Repository:
    """A repository of the Hub at a revision: a branch, a tag or a commit; empty for the main branch."""

    name: str
    revision: str = ""


def repository_of(setting: Path) -> Repository | None:
    """Return the repository that `setting` names; None for an existing directory, and where it names none."""
    named = _REPOSITORY.fullmatch(str(setting))
    if named is None or setting.is_dir():
        return None
    return Repository(named["name"], named["revision"] or "")


def model_path(text: object) -> Any:
    """Parse a `model` setting; a text that begins with a dot never names a repository, so it becomes absolute."""
    return Path(text).absolute() if isinstance(text, str) and text.startswith("./") else text


ModelPath = Annotated[Path, BeforeValidator(model_path)]
"""Type of settings that name a local directory or a repository."""


def absolute(setting: Path) -> Path:
    """Return a directory's absolute path; the name of a repository stays."""
    return setting.absolute() if repository_of(setting) is None else setting


def model_name(setting: Path) -> str:
    """Return a model's name for clients: that of its repository without the owner, else of its directory."""
    if (repository := repository_of(setting)) is not None:
        return repository.name.partition("/")[2]
    path = setting.resolve()
    of_cache = path.parent.parent.name
    if path.parent.name == "snapshots" and of_cache.startswith("models--"):
        return of_cache.rpartition("--")[2]
    return path.name


def fetch(setting: Path, files: RepositoryFiles, field: str = "model", say: Callable[[str], None] = log.info) -> Path:
    """Return the local directory of `setting`, after fetching `files` where it names a repository.

    Anything else is returned as it is, also where there is no such directory. Raises ModelRefused for `field`.
    """
    if (repository := repository_of(setting)) is None:
        return setting
    download = _Download(setting, repository, files, field, say)
    try:
        return download.wait()
    finally:
        download.stop()


async def fetch_beside(
    setting: Path, files: RepositoryFiles, field: str = "model", say: Callable[[str], None] = log.info
) -> Path:
    """Fetch like `fetch`, beside the event loop; a cancelled call stops the download."""
    if (repository := repository_of(setting)) is None:
        return setting
    download = _Download(setting, repository, files, field, say)
    try:
        return await asyncio.to_thread(download.wait)
    finally:
        download.stop()


class _Download:
    """A running download, in a process that ends with this one: `engine/model/hub_download.py`."""

    def __init__(
        self, setting: Path, repository: Repository, files: RepositoryFiles, field: str, say: Callable[[str], None]
    ) -> None:
        self._setting = setting
        self._files = files
        self._field = field
        self._say = say
        self._started_at = time.monotonic()
        order = {"name": repository.name, "revision": repository.revision, "patterns": files.patterns}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "cluster.launch", "engine.model.hub_download", json.dumps(order)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,  # Ctrl-C is for this process, which stops the download
        )

    def wait(self) -> Path:
        """Wait for the end, logging the progress, and return the local directory. Raises ModelRefused."""
        self._say(f"fetching {self._setting} from the Hugging Face Hub")
        assert self._process.stdout is not None
        answer: dict[str, Any] = {}
        for line in self._process.stdout:
            answer = json.loads(line)
            if "total" in answer:
                share = f"{_size(answer['done'])} of {_size(answer['total'])}" if answer["total"] else "nothing yet"
                self._say(f"fetching {self._setting}: {share} after {self._seconds:.0f} s")
        if "path" not in answer:
            cause = answer.get("cause", f"its download ended with code {self._process.wait()}")
            raise ModelRefused(f"no directory {str(self._setting)!r}; {cause}", self._field)
        path = Path(answer["path"])
        for pattern in self._files.required:
            if not any(path.glob(pattern)):
                raise ModelRefused(f"the repository {self._setting} has no {pattern}", self._field)
        size = _size(answer["done"]) if answer["done"] else "no new files"
        self._say(f"fetched {self._setting}: {size} in {self._seconds:.1f} s, to {path}")
        return path

    def stop(self) -> None:
        """Stop the download, if it still runs; `wait` ends then."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    @property
    def _seconds(self) -> float:
        return time.monotonic() - self._started_at


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.2f} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:.2f} MB"
