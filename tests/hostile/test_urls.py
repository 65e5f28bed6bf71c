"""URLs with more than an address, in which people put secrets: refused, and not shown."""

import pytest

from gradengine.errors import CallerError
from gradengine.exchange import connect
from gradengine.exchange.launchers import read_address

MORE = [
    "tcp://me:hush@127.0.0.1:7",
    "tcp://hush@127.0.0.1:7",
    "tcp://127.0.0.1:7?secret=hush",
    "tcp://127.0.0.1:7#hush",
    "tcp://127.0.0.1:7?",
    "tcp://127.0.0.1:7#",
    "unix:///tmp/s?secret=hush",
    "unix:///tmp/s#hush",
    "unix://hush@/tmp/s",
    "tcp://me:hush@[::1:7",
]


@pytest.mark.parametrize("url", MORE)
def test_a_user_query_or_fragment_is_refused_and_not_shown(url):
    for use in (
        lambda: connect(url, 0, 2),
        lambda: connect(url, 1, 2),
        lambda: read_address({"GRADENGINE_ADDRESS": url}, None, None, None),
    ):
        with pytest.raises(
            CallerError, match=r"not a valid group URL.*got a URL with a user, query or fragment"
        ) as told:
            use()
        assert "hush" not in str(told.value)


def test_a_path_may_have_an_at_sign(tmp_path):
    with connect(f"unix://{tmp_path}/a@b", 0, 1) as exchange:
        assert exchange.url == f"unix://{tmp_path}/a@b"
