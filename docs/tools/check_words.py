"""Check that texts which people read name their subject: `check_words.py [--list]`, for all files that git tracks.

The texts are docstrings, help of options, raised errors, logged lines, descriptions of metrics, and comments of the
chart's values. A text that begins with a pronoun, a preposition or a relative clause ("Of one cluster.") leaves its
subject to the reader; some phrases mean something to their author only. Prints the share of such texts and exits with 1
when it is above MAX_SHARE. Tests and generated code are left out.
"""

import ast
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

MAX_SHARE = 0.01
"""Largest share of flagged texts."""
BEGINNINGS = (
    *("It", "They", "Them", "He", "She", "Those", "These", "That", "Somebody", "Nobody", "Everybody", "There"),
    *("Who", "Whoever", "Whose", "Whom", "What", "Which", "Where", "When"),
    *("How many", "How much", "So many", "So much", "Such", "Likewise", "Not", "And", "Or", "Also"),
    *("Of", "In", "By", "With", "From", "For", "To", "As"),
)
SUBJECTLESS = re.compile(rf"({'|'.join(BEGINNINGS)})\b(?!-)", re.IGNORECASE)
"""Beginning of a text without a subject. A hyphen after the word makes it part of a noun ("By-products ...")."""
INNER = re.compile(
    r"\b(so many|so much later|those of these|what it|by that name|another one than|than the one|is said|are said"
    r"|given so|of that,|it dies then|who asks|likewise|is none of|are none of|none of this|means nothing|is not there"
    r"|are others|nobody|somebody|cannot both say|say it|is no number|is no name|is no file|goes with|is known here)\b",
    re.IGNORECASE,
)
"""Phrases that a reader without the code cannot resolve."""
TAKES_HELP = {"model_option", "drill_option", "access_option"}
"""Functions whose first argument is the help of an option."""
METRICS = {
    *("Counter", "Gauge", "Histogram", "Info", "CounterMetricFamily", "GaugeMetricFamily", "HistogramMetricFamily"),
    *("counter", "histogram"),
}
"""Functions whose second argument describes a metric."""
LOGGED = {"debug", "info", "warning", "error", "exception", "critical"}
CHART_VALUES = Path("helm/tandem/values.yaml")


class Text(NamedTuple):
    """Text that somebody reads, and where it stands."""

    kind: str
    line: int
    text: str


def constant(node: ast.AST) -> str | None:
    """Return a constant text; of an f-string with X for each value, of a sum its beginning."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(str(part.value) if isinstance(part, ast.Constant) else "X" for part in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return constant(node.left)
    return None


def texts_of(tree: ast.Module) -> Iterator[Text]:
    """Yield all texts of a module."""
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        for statement in body if isinstance(body, list) else []:
            match statement:
                case ast.Expr(value=ast.Constant(value=str() as text, lineno=line)):
                    yield Text("docstring", line, text.strip())
        if isinstance(node, ast.Call):
            yield from _texts_of_call(node)
        if isinstance(node, ast.Tuple) and node.elts and (text := constant(node.elts[0])) and text.endswith("."):
            yield Text("metric", node.lineno, text)  # description beside the value, in a table of metrics
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
            # A field's name comes first or last; the text with spaces is what is wrong with it.
            reasons = [text for argument in node.exc.args if (text := constant(argument)) and " " in text]
            if reasons:
                yield Text("error", node.lineno, reasons[-1])


def _texts_of_call(call: ast.Call) -> Iterator[Text]:
    name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
    arguments = [text for argument in call.args if (text := constant(argument)) is not None]
    for keyword in call.keywords:
        if keyword.arg in ("help", "epilog", "short_help") and (text := constant(keyword.value)):
            yield Text("help", keyword.value.lineno, text)
    if name in TAKES_HELP and arguments:
        yield Text("help", call.lineno, arguments[0])
    if name in METRICS and len(arguments) > 1:
        yield Text("metric", call.lineno, arguments[1])
    if name in LOGGED and arguments and " " in arguments[0]:
        yield Text("log", call.lineno, arguments[0].removeprefix("%s: "))


def comments_of(values: str) -> Iterator[Text]:
    """Yield the comments of the chart's values, each block of lines as one text."""
    block: list[str] = []
    begun = 0
    for number, line in enumerate([*values.splitlines(), ""], 1):
        clean = line.strip()
        if clean.startswith("#"):
            begun = begun or number
            block.append(clean.lstrip("# ").removeprefix("-- "))
            continue
        if block:
            yield Text("value", begun, " ".join(block))
        block, begun = [], 0
        _, hash_sign, comment = line.partition("  # ")
        if hash_sign:
            yield Text("value", number, comment)


def tracked_files() -> list[Path]:
    """Return the Python files to check."""
    names = subprocess.check_output(["git", "ls-files", "*.py"], text=True).splitlines()
    return [Path(name) for name in names if not name.startswith("tests/") and "_pb2" not in name]


def main() -> int:
    """Print the result and return the exit status."""
    totals: Counter[str] = Counter()
    flagged: list[str] = []
    places = [(path, texts_of(ast.parse(path.read_text()))) for path in tracked_files()]
    for path, texts in [*places, (CHART_VALUES, comments_of(CHART_VALUES.read_text()))]:
        for kind, line, text in texts:
            totals[kind] += 1
            if SUBJECTLESS.match(text) or (kind != "docstring" and INNER.search(text)):
                flagged.append(f"{path}:{line}: {kind}: {text.splitlines()[0]}")
    share = len(flagged) / max(1, totals.total())
    if flagged and ("--list" in sys.argv or share > MAX_SHARE):
        print("\n".join(flagged))
    counted = ", ".join(f"{number} {kind}s" for kind, number in sorted(totals.items()))
    print(f"{counted}; {len(flagged)} without a subject or unclear: {share:.1%} (at most {MAX_SHARE:.0%})")
    return int(share > MAX_SHARE)


if __name__ == "__main__":
    sys.exit(main())
