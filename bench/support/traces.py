"""Location of the real traces that benchmarks replay: Mooncake's and Azure's files, which are not in the repository."""

import os
from pathlib import Path

FOLDER = Path(os.environ.get("TANDEM_TRACES", "../shared/traces"))
CONVERSATION = FOLDER / "conversation_trace.jsonl"
TICK_S = 3.0
"""Approximate step of the trace's times; within it arrivals are spread at random."""
