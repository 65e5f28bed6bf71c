"""What all transports share: sizes and times."""

from __future__ import annotations

import numpy as np
import pytest

from gradengine.arguments import checked_seconds
from gradengine.errors import CallerError
from gradengine.exchange import local_group


def test_sizes_are_integers_of_any_kind_and_times_are_numbers():
    assert type(checked_seconds("timeout", np.float32(2))) is float
    exchanges = local_group(np.int64(2), timeout=np.float32(5), bucket_bytes=np.int64(64))
    assert [(exchange.rank, exchange.world_size) for exchange in exchanges] == [(0, 2), (1, 2)]
    with pytest.raises(CallerError, match="bucket_bytes is out of range"):
        local_group(2, bucket_bytes=(1 << 30) + 1)
