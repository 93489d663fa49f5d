"""Where the real traces lie that benchmarks replay: Mooncake's and Azure's files, of which no copy is kept here."""

import os
from pathlib import Path

FOLDER = Path(os.environ.get("TANDEM_TRACES", "../shared/traces"))
CONVERSATION = FOLDER / "conversation_trace.jsonl"
TICK_S = 3.0
"""Its times are multiples of about this; within it arrivals are spread at random."""
