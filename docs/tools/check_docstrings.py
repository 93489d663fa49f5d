"""Check that docstrings name their subject: `check_docstrings.py [--list]`, for all Python files that git tracks.

A docstring that begins with a pronoun, a preposition or a relative clause ("Of one cluster.") leaves its subject to the
reader. Prints the share of such docstrings and exits with 1 when it is above MAX_SHARE. Tests and generated code are
left out.
"""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

MAX_SHARE = 0.02
"""Largest share of flagged docstrings."""
BEGINNINGS = (
    *("It", "They", "Them", "He", "She", "Those", "These", "That", "Somebody", "Nobody", "Everybody", "There"),
    *("Who", "Whoever", "Whose", "Whom", "What", "Which", "Where", "When"),
    *("How many", "How much", "So many", "So much", "Such", "Not", "And", "Or", "Also"),
    *("Of", "In", "By", "With", "From", "For", "To", "As"),
)
SUBJECTLESS = re.compile(rf"({'|'.join(BEGINNINGS)})\b(?!-)")
"""Beginning of a docstring without a subject. A hyphen after the word makes it part of a noun ("By-products ...")."""


def docstrings(tree: ast.Module) -> Iterator[ast.Constant]:
    """Yield the string statements of modules, classes and functions, and those below fields."""
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        for statement in body if isinstance(body, list) else []:
            match statement:
                case ast.Expr(value=ast.Constant(value=str()) as text):
                    yield text


def tracked_files() -> list[Path]:
    """Return the Python files to check."""
    names = subprocess.check_output(["git", "ls-files", "*.py"], text=True).splitlines()
    return [Path(name) for name in names if not name.startswith("tests/") and "_pb2" not in name]


def main() -> int:
    """Print the result and return the exit status."""
    total = 0
    flagged = []
    for path in tracked_files():
        for text in docstrings(ast.parse(path.read_text())):
            total += 1
            if SUBJECTLESS.match(str(text.value).strip()):
                flagged.append(f"{path}:{text.lineno}: {str(text.value).strip().splitlines()[0]}")
    share = len(flagged) / max(1, total)
    if "--list" in sys.argv or share > MAX_SHARE:
        print("\n".join(flagged))
    print(f"{total} docstrings, {len(flagged)} without a subject: {share:.1%} (at most {MAX_SHARE:.0%})")
    return int(share > MAX_SHARE)


if __name__ == "__main__":
    sys.exit(main())
