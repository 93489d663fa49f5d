"""Progress of a long command: a line per step or per seconds, and on a terminal moving bars with the elapsed time."""

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

EVERY_S = 10.0
"""Seconds between lines where there is no terminal."""


class ProgressSteps:
    """Context manager to call with each step.

    Leaving it, or `done`, removes the bar; the lines stay.
    """

    def __init__(self, console: Console, prefix: str) -> None:
        self._console = console
        self._prefix = prefix
        columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
        self._progress = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def __call__(self, step: str) -> None:
        """Show that `step` has begun."""
        self.done()
        self.note(step)
        self._progress.add_task(step, total=None)

    def note(self, line: str) -> None:
        """Print a line about the step that goes on."""
        self._console.print(f"{self._prefix}{line}", markup=False, soft_wrap=True)

    def done(self) -> None:
        """Remove the bar."""
        for task in self._progress.task_ids:
            self._progress.remove_task(task)


class ShareProgress:
    """Context manager for parts of a long work: bars on a terminal, else a line to stderr every `every_s` seconds.

    Lines come from a thread of their own, since a part may be silent for long.
    """

    def __init__(self, console: Console, every_s: float = EVERY_S, transient: bool = False) -> None:
        """Create it; `transient` bars vanish at the end."""
        columns = TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:.0f} %")
        self._bars = Progress(
            *columns,
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=console,
            transient=transient,
            disable=not console.is_terminal,
        )
        self._every_s = every_s
        self._plain = not console.is_terminal
        self._part, self._share = "", 0.0
        self._began_at = time.monotonic()
        self._ended = threading.Event()
        self._lines = threading.Thread(target=self._print_lines, name="progress", daemon=True)

    def __enter__(self) -> Self:
        self._bars.start()
        if self._plain:
            self._lines.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        if self._plain:
            self._lines.join()
        self._bars.stop()

    @contextlib.contextmanager
    def part(self, name: str, total: float) -> Iterator[Callable[[float], None]]:
        """Show a part, and yield the function that takes how much of `total` is done."""
        task = self._bars.add_task(name, total=total)
        self._part, self._share = name, 0.0

        def advance(done: float) -> None:
            self._share = min(1.0, done / total)  # a total may be an estimate
            self._bars.update(task, completed=done)

        yield advance
        advance(total)

    def _print_lines(self) -> None:
        while not self._ended.wait(self._every_s):
            seconds = time.monotonic() - self._began_at
            print(f"{self._part}: {self._share:.0%} done, {seconds:.0f} s", file=sys.stderr, flush=True)
