"""The list of faults that `make mutants` plants: each one can be planted, and names test files that exist."""

import sys
from pathlib import Path

import pytest

if sys.version_info < (3, 11):
    pytest.skip("the list needs tomllib of Python 3.11", allow_module_level=True)

from mutants.faults import ROOT, faults, known_to_live

FAULTS = faults()


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name[:60])
def test_a_fault_can_be_planted(fault):
    changed = fault.changed((ROOT / fault.file).read_text())
    if Path(fault.file).suffix == ".py":
        compile(changed, fault.file, "exec")
    assert [name for name in fault.tests if not list((ROOT / "tests").glob(name))] == []


def test_the_list_is_long_and_its_names_differ():
    names = [fault.name for fault in FAULTS]
    assert len(set(names)) == len(names) >= 150
    assert known_to_live() <= set(names)
