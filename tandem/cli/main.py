"""The `tandem` command."""

import sys
from typing import Annotated

import typer

from cluster.errors import InvalidRequest, StartError, TandemError
from tandem import __version__
from tandem.cli import fleet_commands
from tandem.cli.client import client_commands
from tandem.cli.cluster import cluster_commands
from tandem.cli.common import console
from tandem.cli.sizing import sizing_commands

FAILED, WRONG_USAGE = 1, 2

app = typer.Typer(
    name="tandem",
    help="Serve a language model with prefill and decode on separate workers.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
for group in (cluster_commands, fleet_commands, client_commands, sizing_commands):
    app.add_typer(group.app)


def _show_version(is_wanted: bool) -> None:
    if is_wanted:
        print(f"tandem {__version__}")
        raise typer.Exit


Version = typer.Option("--version", help="print the version and exit", callback=_show_version, is_eager=True)


@app.callback()
def tandem(version: Annotated[bool, Version] = False) -> None:
    """Serve a language model with prefill and decode on separate workers."""


def main() -> None:
    """Run a command.

    Exit codes: 0 it worked, 1 it failed, 2 an option or a setting is wrong, 130 it was interrupted. A Tandem error is
    printed as one line, the cause; any other exception is a bug with a traceback.
    """
    try:
        app()
    except (InvalidRequest, StartError) as error:
        _end(str(error), WRONG_USAGE)
    except TandemError as error:
        _end(str(error), FAILED)


def _end(message: str, code: int) -> None:
    console.file.flush()
    print(f"error: {message}", file=sys.stderr, flush=True)
    sys.exit(code)
