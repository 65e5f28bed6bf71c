"""Streams that arrays are produced on, by their handles."""

import functools
from types import SimpleNamespace

import numpy as np
import pytest
from hostile_values import HOSTILE, refusal_of

from gradengine.arrays.streams import NamedStream, ProducerStream, stream_handle
from gradengine.errors import CallerError


class TestProducerStreams:
    def test_whatever_is_given_for_a_stream_is_one_or_is_refused_by_an_error_of_ours(self):
        hostile = [*HOSTILE, *(SimpleNamespace(cuda_stream=value) for value in HOSTILE)]
        refusals = [refusal_of(functools.partial(stream_handle, value)) for value in hostile]
        assert {refusal[:17] for refusal in refusals} == {"", "not a CUDA stream"}

    def test_two_names_of_the_default_stream(self):
        assert NamedStream(0) == NamedStream(1)
        assert len({NamedStream(0), NamedStream(1), NamedStream(2), ProducerStream(), ProducerStream()}) == 3

    def test_where_nobody_can_say(self):
        assert ProducerStream().stream() is None
        assert NamedStream(1).stream() == 0


class TestStreamHandles:
    class Protocol:
        def __cuda_stream__(self):
            return 0, 7

    @pytest.mark.parametrize(
        ("stream", "handle"), [(5, 5), (np.int64(5), 5), (Protocol(), 7), (SimpleNamespace(cuda_stream=6), 6)]
    )
    def test_of_whatever_has_one(self, stream, handle):
        assert stream_handle(stream) == handle
        assert NamedStream(stream).stream() == handle
        assert type(NamedStream(stream).stream()) is int  # CuPy takes nothing else

    @pytest.mark.parametrize("stream", [-1, 1.5, "1", None, object()])
    def test_what_has_none(self, stream):
        with pytest.raises(CallerError, match="not a CUDA stream: got"):
            stream_handle(stream)
