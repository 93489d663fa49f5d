"""`python -m tandem.cli` is the `tandem` command."""

from tandem.cli.main import main

if __name__ == "__main__":
    main()
