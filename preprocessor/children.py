"""Child processes of one model, which decode hostile files: one may die or hang, and another one takes its place.

A request that was in a child when it died is tried once more, since something else may have killed the child. A
request that takes too long is not.
"""

import array
import asyncio
import logging
import os
import socket
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from cluster.errors import InvalidRequest, StartError, Unavailable
from cluster.fair_turns import FairTurns
from cluster.process.tasks import Tasks, all_of, each_of, log_bugs
from engine.config import WorkerConfig
from engine.media import (
    MAX_THUMBNAIL_BYTES,
    MAX_THUMBNAILS,
    MediaInput,
    MediaKind,
    MediaLimits,
    MediaRefused,
    Modality,
    Processed,
    ProcessedItem,
)
from preprocessor.child import OFFLINE
from preprocessor.config import PreprocessorConfig
from preprocessor.frames import Frame, NoFrame, encoded, read_frame

log = logging.getLogger(__name__)

START_S = 300.0
"""Longest start of a child: vLLM's imports take a minute on a slow disk."""
END_S = 1.0
"""Seconds in which a process ends that has closed its socket."""
RESTART_S = 1.0
"""Seconds between two starts where one failed."""
TRIES = 2
"""Children that a request may cost by killing them."""
HIDDEN = ("HF_TOKEN", "TANDEM_REDIS_PASSWORD")
"""Variables that children do not get."""

GONE = (asyncio.IncompleteReadError, ConnectionError, NoFrame)
"""Errors of reading from a child that is gone, or that a file has taken over."""


@dataclass(eq=False, slots=True)
class Child:
    """A started child process."""

    process: "subprocess.Popen[bytes]"
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    ended: "asyncio.Future[None]"
    """Future that is done once the process has ended."""
    ready: Mapping[str, Any] = field(default_factory=dict)
    """Values of its first frame, when it was ready."""

    @classmethod
    async def start(cls, config: WorkerConfig, memory_mib: int, module: str = "preprocessor.child") -> "Child":
        """Start a child and wait until it has opened its processor. Raises StartError."""
        ours, its = socket.socketpair()
        with its:
            process = _spawn(config, its, module)
        child = cls(process, *await asyncio.open_connection(sock=ours, limit=1 << 20), _end_of(process))
        try:
            settings = config.model_dump(mode="json", exclude_unset=True)
            async with asyncio.timeout(START_S):
                ready = await child.ask(Frame({"config": settings, "memory_mib": memory_mib}), 0)
        except TimeoutError:
            await child.end()
            raise StartError("model", f"its processor was not ready within {START_S:g} s") from None
        except GONE:
            await asyncio.wait([child.ended], timeout=END_S)  # its exit code says more than that of a killed process
            code = await child.end()
            raise StartError("engine", f"the process for pictures ended at its start with code {code}") from None
        except BaseException:
            await asyncio.shield(child.end())
            raise
        if "reason" in ready.values:
            await child.end()
            raise StartError(ready.values["field"], ready.values["reason"])
        child.ready = ready.values
        return child

    async def ask(self, frame: Frame, max_bytes: int) -> Frame:
        """Return the answer to a frame. Raises what `GONE` names."""
        for piece in encoded(frame):
            self.writer.write(piece)
        await self.writer.drain()
        return await read_frame(self.reader, max_bytes)

    async def end(self) -> int:
        """Kill the process and return its exit status, perhaps from an earlier end."""
        self.process.kill()
        self.writer.close()
        return await asyncio.to_thread(self.process.wait)


def _spawn(config: WorkerConfig, link: socket.socket, module: str) -> "subprocess.Popen[bytes]":
    """Start the process, without asyncio: uvloop forks where subprocess uses vfork. Raises StartError."""
    launch = config.kind.launch_module(config, module)
    environment = {name: value for name, value in os.environ.items() if name not in HIDDEN}
    return subprocess.Popen(
        [*launch.command, str(link.fileno())],
        pass_fds=[link.fileno()],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        env={**environment, **launch.environment, **OFFLINE},
    )


def _end_of(process: "subprocess.Popen[bytes]") -> "asyncio.Future[None]":
    """Return a future that is done when a process has ended."""
    loop, descriptor = asyncio.get_running_loop(), os.pidfd_open(process.pid)
    ended: asyncio.Future[None] = loop.create_future()

    def on_end() -> None:
        loop.remove_reader(descriptor)
        os.close(descriptor)
        if not ended.done():
            ended.set_result(None)

    loop.add_reader(descriptor, on_end)
    return ended


class Children:
    """Children of one model."""

    def __init__(self, config: PreprocessorConfig, worker: WorkerConfig) -> None:
        self._worker = worker
        self._config = config
        processes = config.processes
        self._turns = FairTurns(processes, max(1, processes - 1))
        self._idle: asyncio.Queue[Child] = asyncio.Queue()
        self._all: set[Child] = set()
        self._tasks = Tasks(log_bugs("a process that makes media ready was lost"))
        """Watches over children, and requests whose callers may have left."""
        self._fault: StartError | None = None
        """Reason why the last start failed; None where it did not."""
        self.modalities: Mapping[MediaKind, Modality] = {}
        self.num_restarts = 0

    @property
    def are_there(self) -> bool:
        """Whether any child can work."""
        return bool(self._all)

    async def start(self) -> None:
        """Start all children. Raises StartError."""
        first = await self._start_one()
        self.modalities = {kind: Modality(*each) for kind, each in first.ready["modalities"].items()}
        await all_of(self._start_one() for _ in range(self._config.processes - 1))

    async def process(
        self, tenant: str, token_ids: Sequence[int], media: Sequence[MediaInput], thumbnails: bool = False
    ) -> Processed:
        """Expand the prompt and return its items, and `thumbnails` if wanted.

        Raises InvalidRequest naming a place in `media`, or Unavailable.
        """
        if not self._all and self._fault is not None:
            raise Unavailable(f"no process that makes media ready starts: {self._fault}")
        kinds = [each.kind for each in media]
        prompt = array.array("I", token_ids).tobytes()
        limits = MediaLimits(self._config.max_pixels, self._config.max_sound_s)
        values = {"kinds": kinds, "limits": limits, "thumbnails": thumbnails}
        frame = Frame(values, [prompt, *(each.data for each in media)])
        begun = asyncio.Event()
        work = self._tasks.spawn(self._work(tenant, frame, begun))
        try:
            answer = await asyncio.shield(work)
        except asyncio.CancelledError:
            if not begun.is_set():
                work.cancel()
            raise  # a child that has begun finishes: its next start would take longer
        return answer

    async def close(self) -> None:
        """End all children."""
        children = list(self._all)
        await self._tasks.close()
        await each_of(child.end() for child in children)

    async def _work(self, tenant: str, frame: Frame, begun: asyncio.Event) -> Processed:
        """Have a child answer a request. Raises InvalidRequest or Unavailable."""
        num_files = len(frame.parts) - 1
        place = "media[0]" if num_files == 1 else "media"
        limit_s = self._config.item_limit_s * max(1, num_files)
        async with self._turns.turn(tenant):
            for _ in range(TRIES):
                child = await self._next_child()
                begun.set()
                answered = False
                try:
                    async with asyncio.timeout(limit_s):
                        answer = read_answer(await child.ask(frame, self._config.blob_memory_mib << 20))
                    answered = True
                except TimeoutError:
                    raise InvalidRequest(place, f"processing takes longer than {limit_s:g} s") from None
                except NoFrame as error:
                    raise InvalidRequest(
                        place, f"the answer of the process that read it cannot be taken: {error}"
                    ) from None
                except GONE as error:
                    log.warning("a process ended while it read media: %s", error)
                    continue
                finally:
                    if answered:
                        self._idle.put_nowait(child)
                    else:
                        child.process.kill()
                if isinstance(answer, MediaRefused):
                    raise InvalidRequest(place if answer.place is None else f"media[{answer.place}]", answer.reason)
                return answer
        raise InvalidRequest(place, f"{TRIES} processes ended while they read it")

    async def _next_child(self) -> Child:
        try:
            async with asyncio.timeout(START_S):
                while (child := await self._idle.get()).ended.done():
                    pass
        except TimeoutError:
            raise Unavailable(f"no process that makes media ready was there within {START_S:g} s") from None
        return child

    async def _start_one(self) -> Child:
        child = await Child.start(self._worker, self._config.child_memory_mib)
        self._all.add(child)
        self._idle.put_nowait(child)
        self._tasks.spawn(self._watch(child))
        return child

    async def _watch(self, child: Child) -> None:
        """Start another child when this one has ended, however often that takes."""
        await child.ended
        self._all.discard(child)
        log.warning("a process that makes media ready ended with code %d", await child.end())
        while True:
            try:
                await self._start_one()
            except StartError as error:
                log.error("a process that makes media ready did not start: %s", error)
                self._fault = error
                await asyncio.sleep(RESTART_S)
            else:
                self._fault = None
                self.num_restarts += 1
                return


def read_answer(answer: Frame) -> Processed | MediaRefused:
    """Return what an answer says. Raises NoFrame for one that only a child writes which a file has taken over."""
    try:
        if "refused" in answer.values:
            at = answer.values["place"]
            return MediaRefused(str(answer.values["refused"]), None if at is None else int(at))
        token_ids = array.array("I")
        token_ids.frombytes(answer.parts[0])
        items = [
            ProcessedItem(str(identifier), int(offset), int(length), answer.parts[1 + 2 * i], answer.parts[2 + 2 * i])
            for i, (identifier, offset, length) in enumerate(answer.values["items"])
        ]
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise NoFrame(f"no answer: {error}") from None
    thumbnails = answer.parts[1 + 2 * len(items) :]
    if len(thumbnails) > MAX_THUMBNAILS or any(len(each) > MAX_THUMBNAIL_BYTES for each in thumbnails):
        raise NoFrame("too many or too large thumbnails")
    return Processed(token_ids.tolist(), items, thumbnails)
