"""Fixtures of these tests."""

import pytest
from channel import SECRET

from gradengine.exchange.addresses import Listener


@pytest.fixture
def listener():
    """Rank 0's, with a secret; nobody looks at it yet."""
    listener = Listener(("127.0.0.1", 0), SECRET)
    yield listener
    listener.close()
