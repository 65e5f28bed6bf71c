"""The list of faults that `make mutants` plants: each one can be planted, and names test files that exist."""

from pathlib import Path

import pytest
from mutants.faults import ROOT, faults, known_to_live

FAULTS = faults()


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name[:60])
def test_a_fault_can_be_planted(fault):
    changed = fault.changed((ROOT / fault.file).read_text())
    if Path(fault.file).suffix == ".py":
        compile(changed, fault.file, "exec")
    assert [name for name in fault.tests if not list((ROOT / "tests").glob(name))] == []


def test_faults_differ_and_no_more_may_live():
    names = {fault.name for fault in FAULTS}
    changed = {(fault.file, fault.changed((ROOT / fault.file).read_text())) for fault in FAULTS}
    assert len(names) == len(changed) == len(FAULTS) >= 200
    assert known_to_live() <= names
    assert len(known_to_live()) <= 25
