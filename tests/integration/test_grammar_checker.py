"""Hostile grammars cost a process that nobody needs, and the next one is checked all the same."""

import asyncio
import contextlib
import json
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import uvloop

from cluster.errors import InvalidRequest
from engine.core_types import StructuredOutput
from engine.model.model_dir import ModelDir
from router.models.grammars.grammar_checker import MAX_REMEMBERED, MAX_TENANTS, GrammarChecker, GrammarResults
from tandem.storyteller import STORYTELLER

GOOD = StructuredOutput("regex", ("[a-z]+",))
DEEP = "".join(f'a{number}: (((((((((("y"|a{number + 1})))))))))) \n' for number in range(1600))
WIDE = {"type": "object", "patternProperties": {f"^a{number}$": {"type": "integer"} for number in range(1500)}}


@asynccontextmanager
async def checking(model: Path = STORYTELLER, limit_s: float = 5.0) -> AsyncIterator[GrammarChecker]:
    checker = GrammarChecker(ModelDir.open(model), limit_s)
    try:
        yield checker
    finally:
        await checker.close()


async def fault_of(checker: GrammarChecker, structured: StructuredOutput) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as caught:
        await checker.check(structured)
    return caught.value


BROKEN = [
    (StructuredOutput("regex", ("(a",)), "unclosed group"),
    (StructuredOutput("regex", (r"(a)\1",)), "backreference"),
    (StructuredOutput("json_schema", ("{'a'}",)), "not JSON"),
    (StructuredOutput("json_schema", ('{"type": "nothing"}',)), "nothing"),
    (StructuredOutput("json_schema", ('{"not": {}}',)), "not"),
    (StructuredOutput("json_schema", ('{"$ref": "https://example.com/schema"}',)), "registry"),
    (StructuredOutput("json_schema", ('{"$ref": "#"}',)), "nothing matches it"),
    (StructuredOutput("grammar", ("start: missing",)), "missing"),
    (StructuredOutput("grammar", ('{"grammars": [{"lark_grammar": "start: \\"a\\""}]}',)), "1("),
    (StructuredOutput("grammar", ("start: " + "(" * 30_000,)), "nested"),
]


async def test_what_does_not_compile_names_its_field_and_the_cause() -> None:
    async with checking() as checker:
        for structured, cause in BROKEN:
            fault = await fault_of(checker, structured)
            assert fault.field == f"sampling.structured.{structured.kind}"
            assert cause in fault.message
            assert len(fault.message) < 400, "it travels in a trailer"
        (process,) = checker.idle
        await checker.check(GOOD)
        await checker.check(StructuredOutput("json_object", ()))
        await checker.check(StructuredOutput("choice", ("a", "é", "\n", '"', "\\")))
        assert checker.idle == [process], "none of them ended it"


async def test_what_overflows_the_stack_ends_the_checker_and_not_the_router() -> None:
    async with checking() as checker:
        fault = await fault_of(checker, StructuredOutput("grammar", (f'start: a0\n{DEEP}a1600: "x"',)))
        assert (fault.field, fault.message) == (
            "sampling.structured.grammar",
            "too complex: it takes too much memory to compile",
        )
        await checker.check(GOOD)


async def test_what_takes_too_long_is_given_up() -> None:
    async with checking(limit_s=1.0) as checker:
        await checker.check(GOOD)
        fault = await fault_of(checker, StructuredOutput("json_schema", (json.dumps(WIDE),)))
        assert fault.message == "too complex: it takes longer than 1 s to compile"
        others = [StructuredOutput("regex", (f"a{{{number}}}",)) for number in range(1, 20)]
        await asyncio.gather(*(checker.check(other) for other in others))


async def test_one_tenants_grammars_do_not_keep_another_ones_waiting() -> None:
    """Ten of one tenant that take too long, one after the other; and each is given up once only."""
    async with checking(limit_s=1.0) as checker:
        await checker.check(GOOD, "alice")
        texts = [json.dumps(WIDE | {"title": f"{number}"}) for number in range(10)]
        slow = [asyncio.ensure_future(checker.check(StructuredOutput("json_schema", (t,)), "mallory")) for t in texts]
        await asyncio.sleep(0.2)
        for number in range(5):
            await checker.check(StructuredOutput("regex", (f"[a-z]{{{number}}}",)), "alice")
        assert sum(task.done() for task in slow) < 10
        for task in slow[2:]:
            task.cancel()
        await asyncio.gather(*slow, return_exceptions=True)
        again = StructuredOutput("json_schema", (texts[0],))
        with pytest.raises(InvalidRequest, match="takes longer than 1 s"):
            await asyncio.wait_for(checker.check(again, "mallory"), 0.9)


def test_results_are_remembered_for_each_tenant_and_for_a_while() -> None:
    now = [0.0]
    results = GrammarResults(lambda: now[0])
    results.add("a", GOOD, GOOD)
    assert results.find("a", GOOD) is not None
    assert results.find("b", GOOD) is None, "the time of an answer would show what another tenant used"
    results.add("a", GOOD, InvalidRequest("f", "too complex"), 10.0)
    found = results.find("a", GOOD)
    assert isinstance(found.outcome, InvalidRequest)
    now[0] = 10.0
    assert results.find("a", GOOD) is None
    for number in range(MAX_REMEMBERED + 1):
        results.add("m", StructuredOutput("regex", (f"{number}",)), GOOD)
    assert results.find("m", StructuredOutput("regex", ("0",))) is None
    for number in range(MAX_TENANTS):
        results.add(f"t{number}", GOOD, GOOD)
    assert results.find("m", StructuredOutput("regex", ("9",))) is None


async def test_a_client_that_goes_does_not_shift_the_answers() -> None:
    async with checking() as checker:
        await checker.check(GOOD)
        for number in range(5):
            bad = asyncio.ensure_future(checker.check(StructuredOutput("regex", (f"({number}",))))
            await asyncio.sleep(0.001 * number)
            bad.cancel()
            with contextlib.suppress(asyncio.CancelledError, InvalidRequest):
                await bad
            await checker.check(StructuredOutput("regex", (f"{number}",)))


async def test_a_client_that_goes_while_it_starts_leaves_no_process() -> None:
    before = _children()
    for turns in range(6):
        async with checking() as checker:
            check = asyncio.ensure_future(checker.check(GOOD))
            for _ in range(turns):
                await asyncio.sleep(0)
            check.cancel()
            await asyncio.wait([check])
        assert _children() == before, f"given up after {turns} turns of the loop"


def _children() -> str:
    """Of this process, the dead ones too that nobody has waited for."""
    return Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text()


def test_a_router_is_not_forked_for_it() -> None:
    """By its event loop it would be, and gRPC's handlers would run in the fork: now and then they crash."""
    forks: list[None] = []
    os.register_at_fork(before=lambda: forks.append(None))

    async def check() -> None:
        async with checking() as checker:
            await checker.check(GOOD)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(check())
    assert not forks


async def test_one_that_died_while_nothing_was_asked_is_started_again() -> None:
    async with checking() as checker:
        await checker.check(GOOD)
        (first,) = checker.idle
        first.process.kill()
        first.process.wait()
        await checker.check(StructuredOutput("regex", ("b+",)))
        (second,) = checker.idle
        assert second is not first


async def test_a_model_without_an_end_token_is_told_so_once(tmp_path: Path) -> None:
    for name in ("config.json", "tokenizer.json"):
        (tmp_path / name).write_bytes((STORYTELLER / name).read_bytes())
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"eos_token_id": None}))
    async with checking(tmp_path) as checker:
        for _ in range(2):
            fault = await fault_of(checker, GOOD)
            assert fault.field == "sampling.structured"
            assert "no end token" in fault.message
        assert not checker.idle


async def test_a_grammar_is_returned_as_it_is_to_be_compiled() -> None:
    longest = json.dumps({"const": "\u2028\\" * 20_000}, ensure_ascii=False)
    async with checking() as checker:
        for text in ('{"type": "string", "format": "password"}', longest):
            prepared = await checker.check(StructuredOutput("json_schema", (text,)))
            schema = json.loads(prepared.texts[0])
            assert schema.pop("x-guidance")
            assert schema == {name: value for name, value in json.loads(text).items() if name != "format"}
            assert await checker.check(StructuredOutput("json_schema", (text,))) == prepared, "it is remembered"
        choice = StructuredOutput("choice", ("a", "é"))
        assert await checker.check(choice) == choice
        fault = await fault_of(checker, StructuredOutput("json_schema", ('{"minProperties": 3}',)))
        assert "minProperties 3 cannot be kept to" in fault.message
