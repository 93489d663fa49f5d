"""What the unit tests share. TANDEM_TRIALS=n asks for n trials of every randomised test instead of the few here."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import settings

from support.served_models import write_word_tokenizer
from support.sim_directories import write_sim_model, write_tokenizer
from support.virtual_loop import VirtualLoop

_trials = os.environ.get("TANDEM_TRIALS")
# Derandomised by default: a run on an unchanged tree gives what it gave before. Machines under load are slow at
# random, so no example has a deadline.
settings.register_profile("bounded", deadline=None, database=None, derandomize=True, max_examples=60)
settings.register_profile("long", deadline=None, database=None, max_examples=int(_trials or 1))
settings.load_profile("long" if _trials else "bounded")


def pytest_asyncio_loop_factories() -> dict[str, Callable[[], VirtualLoop]]:
    """Asynchronous tests have a clock of their own, so that no busy machine can delay them."""
    return {"virtual": VirtualLoop}


@pytest.fixture
def byte_model(tmp_path: Path) -> Path:
    path = write_sim_model(tmp_path / "bytes", 600, context=1000)
    write_tokenizer(path, 600)
    return path


@pytest.fixture
def word_model(tmp_path: Path) -> Path:
    path = write_sim_model(tmp_path / "words", 400, context=2000)
    write_word_tokenizer(path)
    return path
