"""Check of requests' grammars by compiling them, in a process that may die of it.

A grammar is a program: a few kilobytes can take llguidance minutes, or overflow its stack, which no exception reports.
Such a grammar costs a process that nothing else needs. A grammar that passes within the time limit compiles in an
engine too, which has a larger stack.

A tenant has one grammar checked at a time, and tenants take turns. Results are remembered for each tenant, so that none
can tell from the time of an answer which grammars another tenant used.

Structured output that follows reasoning: a grammar of free reasoning, its end, and then the required form. Pure.

Grammar of a forced tool call.
"""

import asyncio
import json
import os
import re
import socket
import subprocess
import sys
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from cluster.errors import InvalidRequest, Unavailable
from cluster.fair_turns import FairTurns
from cluster.process.tasks import Tasks
from engine.core_types import StructuredOutput
from engine.model.model_dir import ModelDir
from engine.sampling.structured_output import FIELD
from protos import inference_pb2 as pb

LIMIT_S = 2.0
"""Seconds of a core that compiling a grammar may take; the decode worker compiles it again, once, beside its steps."""
START_S = 60.0
"""Seconds for loading the tokenizer."""
PROCESSES = 2
"""Processes of a model: while one tenant's grammar takes long, another tenant's is checked."""
MAX_ANSWER_BYTES = 2 << 20
"""Largest answer of a process: a grammar of the longest text, whose characters JSON writes in 12 bytes at most."""
MAX_REMEMBERED = 64
"""Remembered results of one tenant."""
MAX_TENANTS = 256
"""Tenants whose results are remembered."""
MAX_SLOWDOWN = 5.0
"""Times the limit for which a check may last although the process got little CPU."""
TIMEOUT_REMEMBERED_S = 300.0
"""Seconds for which a grammar that took too long is refused at once; the machine may have been busy."""


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
            return cls(process, *await asyncio.open_connection(sock=ours, limit=MAX_ANSWER_BYTES))
        except BaseException:  # no other code knows of the process yet
            process.kill()
            ours.close()
            await asyncio.shield(asyncio.to_thread(process.wait))
            raise

    def cpu_s(self) -> float:
        """Return the CPU time that the process has used, in seconds; infinite when it is gone."""
        try:
            used = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            return float("inf")
        return (int(used[11]) + int(used[12])) / os.sysconf("SC_CLK_TCK")

    async def end(self) -> int:
        """Kill the process and return its exit status, perhaps from an earlier end."""
        self.process.kill()
        self.questions.close()
        return await asyncio.to_thread(self.process.wait)


@dataclass(frozen=True, slots=True)
class _Result:
    """Result of a check."""

    outcome: StructuredOutput | InvalidRequest
    """The grammar as it is to be compiled, or its fault."""
    until: float
    """Time from which the result is not used any more, of the monotonic clock."""


class GrammarResults:
    """Results of checks, by tenant; those used longest ago are forgotten first."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._tenants: OrderedDict[str, OrderedDict[StructuredOutput, _Result]] = OrderedDict()

    def find(self, tenant: str, structured: StructuredOutput) -> _Result | None:
        results = self._tenants.get(tenant, OrderedDict())
        result = results.get(structured)
        if result is None or self._clock() >= result.until:
            return None
        results.move_to_end(structured)
        self._tenants.move_to_end(tenant)
        return result

    def add(
        self,
        tenant: str,
        structured: StructuredOutput,
        outcome: StructuredOutput | InvalidRequest,
        lasts_s: float = float("inf"),
    ) -> None:
        results = self._tenants.setdefault(tenant, OrderedDict())
        results[structured] = _Result(outcome, self._clock() + lasts_s)
        results.move_to_end(structured)
        self._tenants.move_to_end(tenant)
        if len(results) > MAX_REMEMBERED:
            results.popitem(last=False)
        if len(self._tenants) > MAX_TENANTS:
            self._tenants.popitem(last=False)


class GrammarChecker:
    """Checker of one model, with processes that start when a grammar needs one, and again after one died."""

    def __init__(self, model_dir: ModelDir, limit_s: float = LIMIT_S) -> None:
        self._model_dir = model_dir
        self._limit_s = limit_s
        self._turns = FairTurns(PROCESSES, 1)
        self.idle: list[GrammarProcess] = []
        """Processes without a question."""
        self._busy: set[GrammarProcess] = set()
        self._refusal: InvalidRequest | None = None
        """Refusal of every grammar, for a model that cannot have any."""
        self._results = GrammarResults()

    async def check(self, structured: StructuredOutput, tenant: str = "") -> StructuredOutput:
        """Check a tenant's grammar; return it as it is to be compiled, with its schemas as llguidance can keep to them.

        Raises InvalidRequest, naming the field, when it does not compile within the time limit.
        """
        result = self._results.find(tenant, structured)
        if result is None:
            async with self._turns.turn(tenant):
                result = self._results.find(tenant, structured)  # another request may have had the same one checked
                outcome = result.outcome if result is not None else self._refusal or await self._ask(structured, tenant)
        else:
            outcome = result.outcome
        if isinstance(outcome, InvalidRequest):
            raise InvalidRequest(outcome.field, outcome.message)
        return outcome

    async def close(self) -> None:
        """End the processes."""
        processes, self.idle = [*self.idle, *self._busy], []
        for process in processes:
            await process.end()

    async def _ask(self, structured: StructuredOutput, tenant: str) -> StructuredOutput | InvalidRequest:
        question = json.dumps({"kind": structured.kind, "texts": structured.texts})
        process: GrammarProcess | None = None
        answered = False
        try:
            process = await self._process()
            self._busy.add(process)
            process.questions.write(f"{question}\n".encode())
            answer = await self._answer_in_time(process)
            outcome = _fault_in(answer) or replace(structured, texts=tuple(answer["texts"]))
            answered = True
        except TimeoutError:
            reason = f"too complex: it takes longer than {self._limit_s:g} s to compile"
            fault = InvalidRequest(structured.field, reason)
            self._results.add(tenant, structured, fault, TIMEOUT_REMEMBERED_S)
            return fault
        except (EOFError, ConnectionError):
            fault = InvalidRequest(structured.field, "too complex: it takes too much memory to compile")
            self._results.add(tenant, structured, fault, TIMEOUT_REMEMBERED_S)
            return fault
        finally:
            if process is not None:
                self._busy.discard(process)
                if answered:
                    self.idle.append(process)
                else:  # also when the client left: the answer would be taken for that to the next question
                    await process.end()
        self._results.add(tenant, structured, outcome)
        return outcome

    async def _answer_in_time(self, process: GrammarProcess) -> dict[str, Any]:
        """Return the answer, for which the process may use `limit_s` of a core.

        It has a lower priority: on a busy machine that takes longer. Raises TimeoutError.
        """
        used_before_s, began_at = process.cpu_s(), time.monotonic()
        async with Tasks() as tasks:
            answering = tasks.spawn(self._answer(process))
            left_s = self._limit_s
            while left_s > 0 and time.monotonic() - began_at < MAX_SLOWDOWN * self._limit_s:
                await asyncio.wait([answering], timeout=left_s)
                if answering.done():
                    return answering.result()
                left_s = self._limit_s - (process.cpu_s() - used_before_s)
            raise TimeoutError

    async def _process(self) -> GrammarProcess:
        """Return an idle process, or a new one.

        Raises InvalidRequest when this model cannot have structured output.
        """
        while self.idle:
            process = self.idle.pop()
            if process.process.poll() is None:
                return process
            await process.end()  # it died of something else, while idle
        process = await GrammarProcess.start(self._model_dir)
        try:
            async with asyncio.timeout(START_S):
                self._refusal = _fault_in(await self._answer(process))
        except TimeoutError:
            await process.end()
            raise Unavailable(f"the process that checks grammars did not start within {START_S:g} s") from None
        except (EOFError, ConnectionError):
            raise Unavailable(
                f"the process that checks grammars ended at its start with exit code {await process.end()}"
            ) from None
        except asyncio.CancelledError:
            await process.end()
            raise
        if self._refusal is not None:
            await process.end()
            raise self._refusal
        return process

    async def _answer(self, process: GrammarProcess) -> dict[str, Any]:
        """Return the next answer.

        Raises EOFError or ConnectionError when the process has died.
        """
        line = await process.answers.readline()
        if not line:
            raise EOFError
        answer: dict[str, Any] = json.loads(line)
        return answer


def _fault_in(answer: dict[str, Any]) -> InvalidRequest | None:
    return InvalidRequest(answer["field"], answer["message"]) if "message" in answer else None


def _spawn(model_dir: ModelDir, answers_to: socket.socket) -> "subprocess.Popen[bytes]":
    command = [sys.executable, "-m", "router.models.grammars.grammar_process", str(model_dir.path)]
    return subprocess.Popen(command, stdin=answers_to.fileno(), stdout=answers_to.fileno())


OPEN, CLOSE = "<tool_call>", "</tool_call>"
NO_TOKENS: Mapping[str, int] = {}
ANY_ARGUMENTS = {"type": "object"}
COMPACT = {"x-guidance": {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}}
"""llguidance's options for compact JSON in the models' own style; otherwise an uncertain model may write whitespace
until `max_tokens`."""
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")


@dataclass(frozen=True, slots=True)
class Function:
    """A tool that may be called."""

    name: str
    parameters: dict[str, Any] | None
    """JSON schema of its arguments; None: any."""


def call_grammar(functions: Sequence[Function], single: bool, added_tokens: Mapping[str, int] = NO_TOKENS) -> str:
    """Return the grammar, in llguidance's Lark, of a call of one of the functions, or of several unless `single`.

    The text has Hermes' form. `added_tokens` are the tokenizer's added tokens by their text: llguidance takes one in
    angle brackets for special, and no text of a grammar matches it. Raises InvalidRequest for an invalid name.
    """
    rules = ["start: call" if single else 'start: call ("\\n" call)*']
    rules.append("call: " + " | ".join(f"call_{number}" for number in range(len(functions))))
    for number, function in enumerate(functions):
        if not _NAME.fullmatch(function.name):
            limits = "1 to 64 letters, digits, underscores, dots and hyphens"
            raise InvalidRequest(
                f"tools[{number}].function.name", f"must be {limits}, so that a call of the tool can be forced"
            )
        before = f'\n{{"name": "{function.name}", "arguments": '
        schema = COMPACT | (ANY_ARGUMENTS if function.parameters is None else function.parameters)
        inside = f'{json.dumps(before)} arguments_{number} "}}\\n"'
        rules.append(f"call_{number}: {mark(OPEN, added_tokens)} {inside} {mark(CLOSE, added_tokens)}")
        rules.append(f"arguments_{number}: %json {json.dumps(schema)}")
    return "\n".join(rules)


def mark(text: str, added_tokens: Mapping[str, int]) -> str:
    """Return a mark in a grammar: the added token of this text, or the text."""
    token_id = added_tokens.get(text)
    return json.dumps(text) if token_id is None else f"<[{token_id}]>"


@dataclass(frozen=True, slots=True)
class ReasoningMarks:
    """Marks around a model's reasoning."""

    opening: str
    closing: str
    added_tokens: Mapping[str, int] = field(default_factory=dict)
    """The tokenizer's added tokens by their text: no text of a grammar matches one."""


def after_reasoning(form: pb.StructuredOutput, marks: ReasoningMarks, begun: bool) -> pb.StructuredOutput:
    """Return a form that allows reasoning before the given one; `begun`: the prompt opened it already.

    Raises InvalidRequest for a grammar of the client's own, which cannot be a part of another one.
    """
    if marks.closing not in marks.added_tokens:
        thought = f"thought[suffix={json.dumps(marks.closing)}]: /(?s:.*)/"
        rest = "thought"
    else:
        thought = "thought: /(?s:.*)/"
        rest = f"thought {mark(marks.closing, marks.added_tokens)}"
    opening = mark(marks.opening, marks.added_tokens)
    start = f"start: {rest} SPACE body" if begun else f"start: ({opening} {rest})? SPACE body"
    return pb.StructuredOutput(grammar="\n".join((start, thought, r"SPACE: /\s{0,4}/", *_body(form))))


def _body(form: pb.StructuredOutput) -> list[str]:
    """Return the rules of the form, from `body` on."""
    if form.HasField("json_schema"):
        return [f"body: %json {form.json_schema}"]
    if form.json_object:
        return ['body: %json {"type": "object"}']
    if form.HasField("regex"):
        pattern = form.regex.replace("\\/", "/").replace("/", "\\x2F").replace("\n", "\\n")
        return [f"body: /{pattern}/"]
    if form.choice:
        return ["body: " + " | ".join(json.dumps(choice) for choice in form.choice)]
    first, *others = form.grammar.split("\n")
    if not first.startswith(CALLS):
        message = 'a grammar cannot follow reasoning: switch that off, as by reasoning_effort "none"'
        raise InvalidRequest(f"{FIELD}.grammar", message)
    return [first.replace("start:", "body:", 1), *others]


CALLS = "start: call"
"""Beginning of a grammar of forced calls (`grammar_checker.py`)."""
