"""Numbers and their nouns."""

import pytest

from gradengine.demo.words import counted


@pytest.mark.parametrize(
    ("number", "noun", "said"),
    [
        (1, "step", "1 step"),
        (0, "step", "0 steps"),
        (2, "rank", "2 ranks"),
        (1, "micro-batch", "1 micro-batch"),
        (4, "micro-batch", "4 micro-batches"),
        (21, "byte", "21 bytes"),
    ],
)
def test_one_is_said_without_an_s(number, noun, said):
    assert counted(number, noun) == said
