"""Constraints for pip: every dependency of the installed package at its lower bound, for `make test-lowest`."""

import re
from importlib.metadata import requires

BOUND = re.compile(r"([\w.-]+)(?:\[.*\])?>=([\w.]+)(?: *;.*)?")


def pinned(requirements):
    """`name==bound` of each `name>=bound`; what is pinned anyway needs none.

    >>> pinned(["rich>=13.7; extra == 'cli'", "numpy>=2.0", "torch==2.13.0; extra == 'interop'"])
    ['numpy==2.0', 'rich==13.7']
    """
    free = {line for line in requirements if "==" not in line.partition(";")[0]}
    unbound = [line for line in free if not BOUND.fullmatch(line)]
    assert not unbound, f"no lower bound, or more than one: {unbound}"
    return sorted({BOUND.sub(r"\1==\2", line) for line in free})


if __name__ == "__main__":
    print(*pinned(requires("gradengine")), sep="\n")
