"""Tests with vLLM, whose processes are forks of one that has imported it."""

import pytest


@pytest.fixture(autouse=True, scope="module")
def _forked(forked_roles: None) -> None:
    """Forks save nine tenths of an engine's start."""
