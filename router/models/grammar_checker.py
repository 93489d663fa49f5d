"""Check of requests' grammars by compiling them, in a process that may die of it.

A grammar is a program: a few kilobytes can take llguidance minutes, or overflow its stack, which no exception reports.
Such a grammar costs a process that nothing else needs. A grammar that passes within the time limit compiles in an
engine too, which has a larger stack.
"""

import asyncio
import json
import socket
import subprocess
import sys
from collections import OrderedDict
from dataclasses import dataclass

from cluster.errors import InvalidRequest, Unavailable
from engine.core_types import StructuredOutput
from engine.model.model_dir import ModelDir

START_S = 60.0
"""Seconds for loading the tokenizer."""
MAX_REMEMBERED = 128


@dataclass(frozen=True, slots=True)
class GrammarProcess:
    """A process, and the socket that is its standard input and output."""

    process: "subprocess.Popen[bytes]"
    answers: asyncio.StreamReader
    questions: asyncio.StreamWriter

    @classmethod
    async def start(cls, model_dir: ModelDir) -> "GrammarProcess":
        """Start a process, without asyncio: uvloop forks where subprocess uses vfork.

        A forked process begins with gRPC's handlers, which crashed one in 50 of a busy router's.
        """
        ours, its = socket.socketpair()
        with its:
            process = _spawn(model_dir, its)
        try:
            return cls(process, *await asyncio.open_connection(sock=ours))
        except BaseException:  # no other code knows of the process yet
            process.kill()
            ours.close()
            await asyncio.shield(asyncio.to_thread(process.wait))
            raise

    async def end(self) -> int:
        """Kill the process and return its exit status, perhaps from an earlier end."""
        self.process.kill()
        self.questions.close()
        return await asyncio.to_thread(self.process.wait)


class GrammarChecker:
    """Checker with one process, started with the first grammar and again after it died.

    Grammars wait for each other.
    """

    def __init__(self, model_dir: ModelDir, limit_s: float) -> None:
        self._model_dir = model_dir
        self._limit_s = limit_s
        self._lock = asyncio.Lock()
        self._process: GrammarProcess | None = None
        self._refusal: InvalidRequest | None = None
        """Refusal of every grammar, for a model that cannot have any."""
        self._remembered: OrderedDict[StructuredOutput, InvalidRequest | None] = OrderedDict()

    async def check(self, structured: StructuredOutput) -> None:
        """Check a grammar.

        Raises InvalidRequest, naming the field, when it does not compile within the time limit.
        """
        if structured in self._remembered:
            self._remembered.move_to_end(structured)
            fault = self._remembered[structured]
        else:
            async with self._lock:
                fault = self._refusal or await self._ask(structured)
        if fault is not None:
            raise InvalidRequest(fault.field, fault.message)

    async def close(self) -> None:
        """End the process."""
        process, self._process = self._process, None
        if process is not None:
            await process.end()

    async def _ask(self, structured: StructuredOutput) -> InvalidRequest | None:
        question = json.dumps({"kind": structured.kind, "texts": structured.texts})
        answered = False
        if self._process is not None and self._process.process.poll() is not None:
            await self.close()  # it died of something else, while idle
        try:
            process = self._process or await self._start()
            process.questions.write(f"{question}\n".encode())
            fault = await self._answer(process, self._limit_s)
            answered = True
        except TimeoutError:
            return InvalidRequest(structured.field, f"too complex: it takes longer than {self._limit_s:g} s to compile")
        except (EOFError, ConnectionError):
            return InvalidRequest(structured.field, "too complex: it takes too much memory to compile")
        finally:
            if not answered:  # also when the client left: the answer would be taken for that to the next question
                await self.close()
        self._remembered[structured] = fault
        if len(self._remembered) > MAX_REMEMBERED:
            self._remembered.popitem(last=False)
        return fault

    async def _start(self) -> GrammarProcess:
        """Start a process.

        Raises InvalidRequest when this model cannot have structured output.
        """
        self._process = process = await GrammarProcess.start(self._model_dir)
        try:
            self._refusal = await self._answer(process, START_S)
        except TimeoutError:
            raise Unavailable(f"the process that checks grammars says nothing for {START_S:g} s") from None
        except (EOFError, ConnectionError):
            raise Unavailable(f"the process that checks grammars ended with {await process.end()} at once") from None
        if self._refusal is not None:
            raise self._refusal
        return process

    async def _answer(self, process: GrammarProcess, limit_s: float) -> InvalidRequest | None:
        """Return the next answer.

        Raises EOFError or ConnectionError when the process has died.
        """
        async with asyncio.timeout(limit_s):
            line = await process.answers.readline()
        if not line:
            raise EOFError
        answer = json.loads(line)
        return InvalidRequest(answer["field"], answer["message"]) if answer else None


def _spawn(model_dir: ModelDir, answers_to: socket.socket) -> "subprocess.Popen[bytes]":
    command = [sys.executable, "-m", "router.models.grammar_process", str(model_dir.path)]
    return subprocess.Popen(command, stdin=answers_to.fileno(), stdout=answers_to.fileno())
