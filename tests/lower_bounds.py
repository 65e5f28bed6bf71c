"""Constraints for pip: dependencies of the installed package at their lower bounds, for `make test-lowest`."""

import re
import sys
from importlib.metadata import requires

BOUND = re.compile(r"([\w.-]+)(?:\[.*\])?>=([\w.]+)")


def pinned(requirements, extras):
    """`name==bound` of each `name>=bound`, of these extras and of none; what is pinned anyway needs none.

    >>> lines = ["rich>=13.7; extra == 'cli'", "numpy>=2.0", "torch==2.13.0; extra == 'cli'", "wheel; extra == 'x'"]
    >>> pinned(lines, ["cli"])
    ['numpy==2.0', 'rich==13.7']
    """
    wanted = {"", *(f"extra == '{extra}'" for extra in extras)}
    parts = [line.partition(";")[::2] for line in requirements]
    free = {name.strip() for name, condition in parts if condition.strip() in wanted and "==" not in name}
    unbound = [line for line in free if not BOUND.fullmatch(line)]
    assert not unbound, f"no lower bound, or more than one: {unbound}"
    return sorted(BOUND.sub(r"\1==\2", line) for line in free)


if __name__ == "__main__":
    print(*pinned(requires("gradengine"), sys.argv[1:]), sep="\n")
