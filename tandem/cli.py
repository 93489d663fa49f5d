"""The `tandem` command."""

import sys

import typer

from cluster.errors import TandemError
from tandem.commands import asking, running, sizing
from tandem.commands.common import console

app = typer.Typer(
    name="tandem",
    help="Serve a language model with prefill and decode on separate workers.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
for group in (running, asking, sizing):
    app.add_typer(group.app)


def main() -> None:
    """Entry point: a Tandem error is one line, the cause; everything else is a bug and keeps its traceback."""
    try:
        app()
    except TandemError as error:
        console.file.flush()
        print(f"error: {error}", file=sys.stderr, flush=True)
        sys.exit(2)


if __name__ == "__main__":
    main()
