"""Check of the texts that people read: what docs/tools/check_words.py sees in a file, and what it flags there."""

import ast
import importlib.util
import subprocess
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]
TOOL = ROOT / "docs" / "tools" / "check_words.py"
VALUES = Path("helm/tandem/values.yaml")


def _loaded() -> ModuleType:
    spec = importlib.util.spec_from_file_location("check_words", TOOL)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


check_words = _loaded()


def _texts(source: str) -> list[tuple[str, int, str]]:
    return [tuple(text) for text in check_words.texts_of(ast.parse(textwrap.dedent(source)))]


def _report(tmp_path: Path, source: str, values: str = "# -- Number of routers.\n") -> subprocess.CompletedProcess[str]:
    """Run the tool on a repository with one file and a chart."""
    (tmp_path / "some.py").write_text(textwrap.dedent(source))
    (tmp_path / VALUES).parent.mkdir(parents=True)
    (tmp_path / VALUES).write_text(values)
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    subprocess.run(["git", "add", "-A"], cwd=tmp_path, check=True)
    return subprocess.run([sys.executable, str(TOOL), "--list"], cwd=tmp_path, capture_output=True, text=True)


@pytest.mark.parametrize(
    ("source", "seen"),
    [
        ('"""Module of tests."""', ("docstring", 1, "Module of tests.")),
        ('class A:\n    size = 1\n    """Size in MiB."""', ("docstring", 3, "Size in MiB.")),
        ('f(help="number of beams")', ("help", 1, "number of beams")),
        ('f(help="number " + rest)', ("help", 1, "number ")),
        ('model_option("model of the prompt")', ("help", 1, "model of the prompt")),
        ('raise StartError("port", f"cannot listen on {port}")', ("error", 1, "cannot listen on X")),
        ('raise fields.refuse("n", "must be 1")', ("error", 1, "must be 1")),
        ('raise Forbidden("this key may not use it", "model")', ("error", 1, "this key may not use it")),
        ('raise StartError("port")', None),
        ('log.warning("%s: the store is full: %s", name, error)', ("log", 1, "the store is full: %s")),
        ('log.info(f"joined to {router}")', ("log", 1, "joined to X")),
        ('log.info("started in %s", seconds)', ("log", 1, "started in %s")),
        ('log.info("joined")', None),
        ('Counter("tandem_steps", "Steps of the engine.")', ("metric", 1, "Steps of the engine.")),
        ('x = ("Blocks of the pool.", pool.size)', ("metric", 1, "Blocks of the pool.")),
        ('x = "Of that, in seconds."', None),
    ],
)
def test_texts_that_it_sees(source: str, seen: tuple[str, int, str] | None) -> None:
    assert _texts(source) == ([] if seen is None else [seen])


def test_comments_of_the_chart() -> None:
    values = "# -- Number of routers;\n# one is enough.\nrouters: 1  # at least one\n\nimage: x\n  # Tag.\n  tag: y\n"
    assert [tuple(text) for text in check_words.comments_of(values)] == [
        ("value", 1, "Number of routers; one is enough."),
        ("value", 3, "at least one"),
        ("value", 6, "Tag."),
    ]


@pytest.mark.parametrize(
    "source",
    [
        '"""Of one cluster."""',
        '"""Whether a worker is there.\n"""\nf(help="of that, in seconds after --rate")',
        'f(help="port to listen on; likewise for metrics")',
        'raise StartError("port", f"what it was: {port}")',
        'log.warning("%s: they have ended", name)',
        'Counter("tandem_x", "So many steps.")',
    ],
)
def test_a_text_without_a_subject_is_named_with_its_place(tmp_path: Path, source: str) -> None:
    done = _report(tmp_path, source)
    *flagged, summary = done.stdout.splitlines()
    assert done.returncode == 1, done
    assert [line.partition(":")[0] for line in flagged] == ["some.py"]
    assert "1 without a subject or unclear" in summary


@pytest.mark.parametrize(
    "source",
    [
        'f(help="period of the sine, in seconds")',
        '"""By-products of a build."""',
        '"""Return the port, another one than the one of health."""',
        'raise StartError("port", "must be 1 to 65535, not 0")',
        'log.info("router %s has left", address)',
    ],
)
def test_a_text_with_a_subject_passes(tmp_path: Path, source: str) -> None:
    done = _report(tmp_path, source)
    assert done.returncode == 0, done
    assert done.stdout.endswith(" 0 without a subject or unclear: 0.0% (at most 1%)\n")
    assert done.stdout.count("\n") == 1


def test_a_comment_of_the_chart_is_flagged(tmp_path: Path) -> None:
    done = _report(tmp_path, '"""Module of tests."""', "# -- Of the pods.\npods: 1\n")
    assert done.returncode == 1
    assert f"{VALUES}:1: value: Of the pods." in done.stdout


def test_one_unclear_text_in_a_hundred_is_let_through(tmp_path: Path) -> None:
    clear = "\n".join(f'f(help="size of part {number}")' for number in range(98))
    done = _report(tmp_path, clear + '\nf(help="of the pods")')
    assert done.returncode == 0
    assert "some.py:99: help: of the pods" in done.stdout


def test_generated_files_and_tests_are_left_out(tmp_path: Path) -> None:
    (tmp_path / "tests").mkdir()
    for name in ("tests/test_x.py", "x_pb2.py"):
        (tmp_path / name).write_text('"""Of one cluster."""')
    assert _report(tmp_path, '"""Module of tests."""').returncode == 0


def _flagged(texts: Sequence[str]) -> list[str]:
    return [text for text in texts if check_words.SUBJECTLESS.match(text) or check_words.INNER.search(text)]


def test_phrases_that_only_their_author_understands() -> None:
    known = ["this worker is another one than the one asked", "neither cache nor load is said", "so many completions"]
    assert _flagged(known) == known
    assert _flagged(["its attention is not causal", "is missing", "unknown worker 'a'; known are b, c"]) == []
