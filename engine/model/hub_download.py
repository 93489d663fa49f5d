"""Download from the Hugging Face Hub, in a process of its own: `python -m cluster.launch engine.model.hub_download`.

Such a process can be stopped in the middle of a file, and takes its libraries with it. The argument is the order as
JSON. Answers are lines of JSON on standard output: {"done": bytes, "total": bytes} now and then, and in the end
{"path": directory, "done": bytes} or {"cause": text}. The process ends with its standard input.
"""

import atexit
import contextlib
import json
import os
import resource
import sys
import threading
import time
from pathlib import Path
from typing import Any

from huggingface_hub import constants, get_session, get_token, set_client_factory, snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.utils import tqdm  # type: ignore[attr-defined]

from engine.model.hub import IGNORED

REPORT_EVERY_S = 10.0
CONNECT_S, READ_S = 10.0, 60.0
"""Longest waits for a connection and for an answer, in seconds, where huggingface_hub would wait without end."""
MAX_DESCRIPTORS = 1024
"""Descriptors that are looked at; this process opens some dozens, and the kernel gives the lowest."""
LOOKS, BETWEEN_LOOKS_S = 5, 0.1
"""Times that they are looked at, and seconds between: longer than a busy machine keeps a thread from its processor."""
BYTES = "B"
"""Unit of progress bars that count bytes."""


def main() -> None:
    order = json.loads(sys.argv[1])
    sys.stdout = sys.stderr  # what a library prints is no answer
    threading.Thread(target=end_with_input, daemon=True).start()
    _limit_waits()
    progress = _Progress()
    threading.Thread(target=progress.report, daemon=True).start()
    try:
        path = snapshot_download(
            order["name"],
            revision=order["revision"] or None,
            allow_patterns=order["patterns"],
            ignore_patterns=list(IGNORED),
            library_name="tandem",
            tqdm_class=progress.bar_class(),
        )
    except Exception as error:
        answer: dict[str, Any] = {"cause": cause_of(error, order["name"], order["revision"])}
    else:
        answer = {"path": path, "done": progress.done}
    _say(answer)


def cause_of(error: Exception, name: str, revision: str) -> str:
    """Return why the repository could not be had, in words."""
    hub, cache = f"the Hub at {constants.ENDPOINT}", f"the cache {constants.HF_HUB_CACHE}"
    signed = get_token() is not None
    if isinstance(error, GatedRepoError):
        account = "the account of HF_TOKEN" if signed else "an account, and set HF_TOKEN to a token of it"
        return f"the repository is gated: accept its terms at {constants.ENDPOINT}/{name} with {account}"
    if isinstance(error, RepositoryNotFoundError):
        private = "HF_TOKEN may not read it" if signed else "it is private: then set HF_TOKEN"
        return f"{hub} has no repository {name!r}, or {private}"
    if isinstance(error, RevisionNotFoundError):
        return f"{hub} has no revision {revision!r} of {name!r}"
    if isinstance(error, HFValidationError):
        return f"no name of a repository either: {_first_line(error)}"
    if isinstance(error, LocalEntryNotFoundError):
        lacks = f"{cache} does not have all of {name!r}"
        if constants.HF_HUB_OFFLINE:
            return f"HF_HUB_OFFLINE is set, and {lacks}"
        if isinstance(error.__cause__, HfHubHTTPError):
            return f"{hub} answers {error.__cause__.response.status_code}, and {lacks}"
        return f"{hub} cannot be reached ({_first_line(error.__cause__ or error)}), and {lacks}"
    if isinstance(error, HfHubHTTPError):
        if error.response.status_code == 401:
            return f"{hub} does not accept the token in HF_TOKEN"
        return f"{hub} refuses {name!r}: {_first_line(error)}"
    return f"the download from {hub} to {cache} failed: {_first_line(error)}"


class _Progress:
    """Bytes fetched so far, as the progress bars of huggingface_hub count them."""

    def __init__(self) -> None:
        self._bars: list[tqdm] = []
        self._counting = threading.Lock()

    def bar_class(self) -> type[tqdm]:
        """Return a class of progress bars that show nothing and are counted here."""
        bars, counting = self._bars, self._counting

        class Bar(tqdm):
            def __init__(self, *args: Any, **kwargs: Any) -> None:
                super().__init__(*args, **kwargs | {"disable": True})  # type: ignore[no-untyped-call]
                if kwargs.get("unit") == BYTES:
                    bars.append(self)

            def update(self, n: float | None = 1) -> None:
                with counting:
                    self.n += n or 0

        return Bar

    @property
    def done(self) -> int:
        return max((int(bar.n) for bar in self._bars), default=0)

    def report(self) -> None:
        """Report the progress again and again."""
        pause = threading.Event()
        while not pause.wait(REPORT_EVERY_S):
            _say({"done": self.done, "total": max((int(bar.total or 0) for bar in self._bars), default=0)})


def _say(answer: dict[str, Any]) -> None:
    assert sys.__stdout__ is not None
    sys.__stdout__.write(json.dumps(answer) + "\n")
    sys.__stdout__.flush()


def _limit_waits() -> None:
    """Let requests that huggingface_hub would wait for without end fail in time."""
    default = get_session()
    hooks = {**default.event_hooks, "request": [*default.event_hooks["request"], _limit]}
    set_client_factory(lambda: type(default)(event_hooks=hooks, follow_redirects=True, timeout=None))


def _limit(request: Any) -> None:
    limits = request.extensions.setdefault("timeout", {})
    for part, seconds in (("connect", CONNECT_S), ("read", READ_S), ("write", READ_S)):
        if limits.get(part) is None:
            limits[part] = seconds


def end_with_input() -> None:
    """End with the process that waits for this one, without leaving half a file in the cache."""
    while os.read(0, 1):  # not by sys.stdin, which a thread must not hold when the interpreter ends
        pass
    atexit.register(threading.Event().wait)  # the program may end by a file that cannot begin, before all is removed
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, most))  # other threads begin no further file
    for _ in range(LOOKS):  # a thread may be about to get the descriptor of a file that it has just made
        for descriptor in range(MAX_DESCRIPTORS):
            with contextlib.suppress(OSError):  # there is none, or it was closed meanwhile
                if (file := Path(f"/proc/self/fd/{descriptor}").readlink()).suffix == ".incomplete":
                    file.unlink()
        time.sleep(BETWEEN_LOOKS_S)
    os._exit(1)


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
