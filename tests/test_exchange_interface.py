"""What all transports share: sizes, times and arenas."""

from __future__ import annotations

import numpy as np
import pytest
from transports import SMALL

from gradengine.arguments import checked_seconds
from gradengine.errors import CallerError
from gradengine.exchange import local_group
from gradengine.exchange.ordered_all_reduce import refuse_bad_arena


def test_sizes_are_integers_of_any_kind_and_times_are_numbers():
    assert type(checked_seconds("timeout", np.float32(2))) is float
    exchanges = local_group(np.int64(2), timeout=np.float32(5), bucket_bytes=np.int64(64))
    assert [(exchange.rank, exchange.world_size) for exchange in exchanges] == [(0, 2), (1, 2)]


@pytest.mark.parametrize(
    "arena",
    [
        *(np.zeros(SMALL.arena_size + 1, np.float32), np.zeros(SMALL.arena_size, np.float64)),
        *(np.zeros((1, SMALL.arena_size), np.float32), np.zeros(2 * SMALL.arena_size, np.float32)[::2]),
    ],
)
def test_bad_arena_is_refused(arena):
    with pytest.raises(CallerError, match="arena does not fit the layout"):
        refuse_bad_arena(SMALL, arena)
