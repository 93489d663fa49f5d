"""`tandem batch`: many prompts from a file, with answers to another file; a restart loses nothing.

A line of the input is a `GenerateRequest` in protobuf's JSON (`text`, `messages` or `token_ids`; `sampling`; `model`;
...), with an `id`; without one it is named after its line, "line 3". A line of the output has the `id` and either the
result or an `error`. A second run with the same files does what is missing and what failed.
"""

import asyncio
import contextlib
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from google.protobuf.json_format import MessageToDict, ParseDict, ParseError
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from cluster.errors import InvalidRequest, Overloaded, ServiceError, StartError, Unavailable
from protos import inference_pb2 as pb
from tandem.client import Client, Target

MAX_WAITS = 20
"""Retries of one request for lack of capacity or workers, after which it fails until the next run."""
WAIT_S = 1.0
"""Seconds between retries where the router gives no advice."""
LONGEST_WAIT_S = 30.0


@dataclass(frozen=True, slots=True)
class BatchLine:
    """One line of the input; `fault` says what is wrong with it."""

    name: str
    request: pb.GenerateRequest | None
    fault: str = ""


@dataclass(slots=True)
class BatchOutcome:
    """Outcome of a run."""

    done_before: int
    finished: int = 0
    failed: int = 0


async def run_batch(
    console: Console,
    router: Target,
    source: Path,
    target: Path,
    concurrency: int,
    timeout_s: float,
    priority: int = -1,
    receipts: bool = False,
) -> BatchOutcome:
    """Run a batch.

    Raises StartError for unusable files.
    """
    names = check_names(source)
    done = take_up(target)
    outcome = BatchOutcome(len(done & names))
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with contextlib.ExitStack() as stack:
        try:
            file = stack.enter_context(target.open("a"))
        except OSError as error:
            raise StartError("output", f"cannot write {target}: {error.strerror}") from None
        progress = stack.enter_context(Progress(*columns, TimeRemainingColumn(), console=console))
        task = progress.add_task(source.name, total=len(names), completed=outcome.done_before)
        lines = (line for line in lines_of(source) if line.name not in done)
        async with router.client() as client, asyncio.TaskGroup() as group:

            async def work() -> None:
                for line in lines:  # one iterator for all tasks
                    answer = await _answer(client, line, timeout_s, priority, receipts)
                    _write(file, {"id": line.name} | answer)
                    failed = "error" in answer
                    outcome.failed += failed
                    outcome.finished += not failed
                    progress.advance(task)

            for _ in range(concurrency):
                group.create_task(work())
    summary = f"{outcome.finished} finished, {outcome.failed} failed"
    console.print(f"{summary}, {outcome.done_before} done before: {target}")
    if outcome.failed:
        console.print("run the command again to retry the failed requests")
    return outcome


def lines_of(source: Path) -> Iterator[BatchLine]:
    """Yield the input's lines.

    Raises StartError when the file cannot be read.
    """
    try:
        with source.open("rb") as file:
            for number, text in enumerate(file, start=1):
                if text.strip():
                    yield _parse(number, text)
    except OSError as error:
        raise StartError("input", f"cannot read {source}: {error.strerror}") from None


def check_names(source: Path) -> set[str]:
    """Return the names of all lines.

    Raises StartError for duplicates, and for an empty file.
    """
    names: set[str] = set()
    for line in lines_of(source):
        if line.name in names:
            raise StartError("input", f"{source}: two lines have the id {line.name!r}")
        names.add(line.name)
    if not names:
        raise StartError("input", f"{source} has no lines")
    return names


def take_up(target: Path) -> set[str]:
    """Return the names of finished lines, and drop failed and truncated lines from the file.

    Raises StartError for a file that is something else.
    """
    if not target.exists():
        return set()
    done: set[str] = set()
    beside = target.with_name(target.name + ".part")
    try:
        with target.open("rb") as before, beside.open("wb") as kept:
            for number, text in enumerate(before, start=1):
                if not text.endswith(b"\n"):
                    break
                try:
                    values = json.loads(text)
                    name, failed = values["id"], "error" in values
                except (ValueError, KeyError, TypeError):
                    raise StartError("output", f"{target}, line {number}: is not an answer of an earlier run") from None
                if not failed:
                    done.add(name)
                    kept.write(text)
    except OSError as error:
        raise StartError("output", f"cannot read {target}: {error.strerror}") from None
    except StartError:
        beside.unlink()
        raise
    os.replace(beside, target)
    return done


def _parse(number: int, text: bytes) -> BatchLine:
    name = f"line {number}"
    try:
        values = json.loads(text)
    except (ValueError, RecursionError) as error:
        return BatchLine(name, None, f"line {number}: is not JSON: {error}")
    if not isinstance(values, dict):
        return BatchLine(name, None, f"line {number}: is not a JSON object")
    name = str(values.pop("id", name))
    try:
        return BatchLine(name, ParseDict(values, pb.GenerateRequest()))
    except ParseError as error:
        return BatchLine(name, None, f"line {number}: {error}")


async def _answer(client: Client, line: BatchLine, timeout_s: float, priority: int, receipts: bool) -> dict[str, Any]:
    """Return a line's output without its id."""
    if line.request is None:
        return _error(InvalidRequest("line", line.fault))
    request = line.request
    if not request.priority:
        request.priority = priority
    for wait in range(MAX_WAITS + 1):
        try:
            return await _generate(client, request, timeout_s, receipts)
        except (Overloaded, Unavailable) as error:
            if wait == MAX_WAITS or (isinstance(error, Overloaded) and error.permanent):
                return _error(error)
            retry_after_s = error.retry_after_s if isinstance(error, Overloaded) else None
            await asyncio.sleep(min(LONGEST_WAIT_S, WAIT_S if retry_after_s is None else retry_after_s))
        except ServiceError as error:
            return _error(error)
    raise AssertionError("the last wait returns")


async def _generate(client: Client, request: pb.GenerateRequest, timeout_s: float, receipts: bool) -> dict[str, Any]:
    texts: dict[int, str] = {}
    tokens: dict[int, list[int]] = {}
    reasons: dict[int, str] = {}
    finish = pb.Finish()
    async for piece in client.send(request, timeout_s):
        texts[piece.index] = texts.get(piece.index, "") + piece.text
        tokens.setdefault(piece.index, []).extend(piece.token_ids)
        if piece.HasField("finish"):
            finish = piece.finish
            reasons[piece.index] = pb.FinishReason.Name(finish.reason).removeprefix("FINISH_REASON_").lower()
    choices = [
        {"text": texts[index], "token_ids": tokens[index], "finish_reason": reasons.get(index, "")}
        for index in sorted(texts)
    ]
    answer: dict[str, Any] = choices[0] if len(choices) == 1 else {"choices": choices}
    usage = finish.usage
    answer["usage"] = {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": sum(map(len, tokens.values())),
        "cached_tokens": usage.cached_tokens,
    }
    if receipts:
        answer["receipt"] = MessageToDict(finish.receipt, preserving_proto_field_name=True)
    return answer


def _error(error: ServiceError) -> dict[str, Any]:
    return {"error": {"code": error.code, "field": error.field, "message": error.message}}


def _write(file: TextIO, values: dict[str, Any]) -> None:
    """Write and flush a line, so that it survives whatever happens next."""
    file.write(json.dumps(values, separators=(",", ":")) + "\n")  # ASCII: readers may split lines by Unicode
    file.flush()
