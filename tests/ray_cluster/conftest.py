"""What tests of `tandem up` share."""

import pytest

from support import ports


@pytest.fixture
def free_port() -> int:
    """And the next one is free, too, for a second router."""
    return ports.free_port(count=2)
