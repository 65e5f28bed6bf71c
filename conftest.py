"""What doctests may use without importing it."""

import importlib.util

import numpy as np
import pytest

collect_ignore = [f"gradengine/{name}.py" for name in ("torch", "jax") if importlib.util.find_spec(name) is None]


@pytest.fixture(autouse=True)
def _doctest_names(doctest_namespace: dict[str, object]) -> None:
    doctest_namespace["np"] = np
