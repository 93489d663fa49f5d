"""Progress of a long command: a line per step, and on a terminal a moving bar with the elapsed time."""

from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn


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

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    def __call__(self, step: str) -> None:
        """Show that `step` has begun."""
        self.done()
        self._console.print(f"{self._prefix}{step}")
        self._progress.add_task(step, total=None)

    def done(self) -> None:
        """Remove the bar."""
        for task in self._progress.task_ids:
            self._progress.remove_task(task)
