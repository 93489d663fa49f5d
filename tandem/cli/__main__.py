"""The program `tandem`, also as `python -m tandem.cli`."""

import sys

from cluster.install import extra_of, how_to_install

WRONG_USAGE = 2


def main() -> None:
    """Run a command; a module of an extra that is not installed ends it with one line that names the extra."""
    try:
        from tandem.cli.main import main as run

        run()
    except ModuleNotFoundError as error:
        extra = extra_of(error)
        if extra is None:
            raise
        sys.stdout.flush()
        print(f"error: {error}: {how_to_install(extra)}", file=sys.stderr)
        sys.exit(WRONG_USAGE)


if __name__ == "__main__":
    main()
