"""Log lines of every process: one format, to standard error."""

import logging
import os
import sys


def set_up(process: str) -> None:
    """`TANDEM_LOG` sets the level, warning by default. No prompt and no completion is ever logged."""
    logging.basicConfig(
        stream=sys.stderr,
        level=os.environ.get("TANDEM_LOG", "warning").upper(),
        format=f"%(asctime)s %(levelname)s {process} %(name)s: %(message)s",
    )
