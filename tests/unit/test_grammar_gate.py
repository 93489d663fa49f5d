"""The gate before an engine's core: only a request whose grammar is being compiled waits."""

import threading

from engine.core_types import SamplingParams, StructuredOutput
from engine.messages.to_engine import Audit, Cancel, Generate
from engine.sampling.grammar_gate import GrammarGate

SLOW, OTHER = StructuredOutput("regex", ("[a-z]+",)), StructuredOutput("regex", ("[0-9]+",))


class Grammars:
    """Compiles when it is told to."""

    def __init__(self) -> None:
        self.known: set[StructuredOutput] = set()
        self.may_go = threading.Semaphore(0)

    def knows(self, structured: StructuredOutput) -> bool:
        return structured in self.known

    def compile_ahead(self, structured: StructuredOutput) -> None:
        self.may_go.acquire()
        self.known.add(structured)


def request(name: str, structured: StructuredOutput | None = None) -> Generate:
    return Generate(name, (1, 2), (), SamplingParams(max_tokens=4, structured=structured), "", 0, lender=None)


def test_requests_without_a_grammar_pass_and_others_wait_for_theirs() -> None:
    grammars, woken = Grammars(), threading.Semaphore(0)
    gate = GrammarGate(grammars, woken.release)  # type: ignore[arg-type]
    slow, again = request("slow", SLOW), request("again", SLOW)
    assert not gate.passes(slow)
    assert gate.passes(request("plain"))
    assert gate.passes(Audit(1))
    assert gate.released() == []
    assert not gate.passes(again)
    cancelled = request("cancelled", OTHER)
    assert not gate.passes(cancelled)
    assert not gate.passes(Cancel("cancelled", None)), "the core never heard of it"
    for _ in range(3):
        grammars.may_go.release()
        assert woken.acquire()
    assert gate.released() == [slow, again]
    assert gate.passes(Cancel("slow", None))
    assert gate.passes(request("known", SLOW))


def test_without_grammars_everything_passes() -> None:
    gate = GrammarGate(None, lambda: None)
    assert gate.passes(request("r", SLOW))
    assert gate.released() == []
