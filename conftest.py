"""What doctests may use without importing it."""

import importlib.util

import numpy as np
import pytest

pytest_plugins = ["record", "skips"]  # of tests/: they hold for each test, the package's doctests too
collect_ignore = [
    path
    for name, path in (
        ("torch", "gradengine/torch"),
        ("jax", "gradengine/jax"),
        ("optax", "gradengine/jax/multi_steps.py"),
        ("transformers", "gradengine/torch/transformers.py"),
        ("lightning", "gradengine/torch/lightning.py"),
    )
    if not importlib.util.find_spec(name)
]


@pytest.fixture(autouse=True)
def _doctest_names(doctest_namespace: dict[str, object]) -> None:
    doctest_namespace["np"] = np


if importlib.util.find_spec("pytest_timeout") is None:
    # A machine with a GPU may have pytest alone.
    def pytest_addoption(parser: pytest.Parser) -> None:
        """Know pyproject's limit, which is that plugin's."""
        parser.addini("timeout", "seconds for a test, as pytest-timeout has it")

    def pytest_configure(config: pytest.Config) -> None:
        """Know the tests' own limits."""
        config.addinivalue_line("markers", "timeout(seconds): as pytest-timeout has it")
