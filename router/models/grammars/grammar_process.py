"""Process that compiles requests' grammars and may die of it: `python -m router.models.grammars.grammar_process MODEL`.

Each grammar is one line of JSON in and one out: the `texts` to be compiled when it compiles, else its `field` and
`message`. One line comes before all others; if it has a `message`, this model cannot have structured output. See
`grammar_checker.py`.
"""

import json
import resource
import signal
import sys
from pathlib import Path
from typing import Any

from cluster.errors import InvalidRequest
from cluster.process.tree import die_with_parent
from engine.core_types import StructuredOutput
from engine.host.cores import step_back
from engine.model.model_dir import ModelDir
from engine.sampling.grammar import CHECK_STACK_BYTES, GrammarCompiler, reason_of

NICENESS = 10
"""Niceness: about a tenth of a core where others keep all of them busy."""
MEMORY_BYTES = 8 << 30
"""Limit of address space in bytes, most of which is never touched."""


def main() -> None:
    """Answer until the other end closes."""
    die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to the whole group; the router decides
    step_back(NICENESS)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    try:
        compiler = GrammarCompiler(ModelDir.open(Path(sys.argv[1])), CHECK_STACK_BYTES)
    except InvalidRequest as error:
        _say(_fault(error))
        return
    _say({})
    for line in sys.stdin:
        question = json.loads(line)
        _say(_checked(compiler, StructuredOutput(question["kind"], tuple(question["texts"]))))


def _checked(compiler: GrammarCompiler, structured: StructuredOutput) -> dict[str, Any]:
    """Return the texts of a grammar as they are to be compiled, or its fault.

    The first mask is computed too, as it is often the largest.
    """
    try:
        prepared = compiler.prepared(structured)
        matcher = compiler.compile(prepared)
    except InvalidRequest as error:
        return _fault(error)
    compiler.masks([matcher])
    if matcher.is_error():
        return _fault(InvalidRequest(structured.field, reason_of(matcher)))
    return {"texts": prepared.texts}


def _fault(error: InvalidRequest) -> dict[str, Any]:
    return {"field": error.field, "message": error.message}


def _say(answer: dict[str, Any]) -> None:
    print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
