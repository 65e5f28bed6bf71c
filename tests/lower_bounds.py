"""Constraints for pip: dependencies of the installed package at their lower bounds, for `make test-lowest`."""

import re
import sys
import tomllib
from importlib.metadata import requires
from pathlib import Path

BOUND = re.compile(r"([\w.-]+)(?:\[.*\])?>=([\w.]+)")
GROUP = "--group="  # a dependency group of pyproject.toml
BESIDE = "--beside="  # a file of constraints for what our dependencies need in their turn


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


def others(constraints, bounds):
    """The constraints of packages that have no bound of ours.

    >>> others(["numpy==2.4.6", "ml_dtypes==0.6", "pillow==13.0.0"], ["ml-dtypes==0.5", "numpy==2.0"])
    ['pillow==13.0.0']
    """
    bound = {_name(line) for line in bounds}
    return [line for line in constraints if _name(line) not in bound]


def members(group):
    """Return the requirements of a dependency group, with those of the groups that it includes."""
    listed = tomllib.loads(Path("pyproject.toml").read_text())["dependency-groups"][group]
    found = [members(each["include-group"]) if isinstance(each, dict) else [each] for each in listed]
    return [line for lines in found for line in lines]


def _name(constraint):
    return re.sub(r"[-_.]+", "-", constraint.partition("==")[0]).lower()


if __name__ == "__main__":
    files, groups = (
        [argument.removeprefix(sign) for argument in sys.argv[1:] if argument.startswith(sign)]
        for sign in (BESIDE, GROUP)
    )
    extras = [argument for argument in sys.argv[1:] if not argument.startswith("--")]
    bounds = pinned([*requires("gradengine"), *(line for name in groups for line in members(name))], extras)
    print(*bounds, *(line for file in files for line in others(Path(file).read_text().split(), bounds)), sep="\n")
