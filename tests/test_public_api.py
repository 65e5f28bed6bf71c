"""What the package promises: the public names, and their documentation."""

import ast
import inspect
from pathlib import Path

import pytest

import gradengine

PACKAGE = Path(gradengine.__file__).parent
INTERNAL = {"bench", "demo", "commands", "__main__.py"}


def undocumented(body, where, inherits=False):
    """Public classes and functions without a word; a class may leave its methods' to the interface that it has."""
    for node in body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and not node.name.startswith("_"):
            is_setter = any(getattr(decorator, "attr", "") == "setter" for decorator in node.decorator_list)
            if not (ast.get_docstring(node) or inherits or is_setter):
                yield f"{where}.{node.name}"
            if isinstance(node, ast.ClassDef):
                yield from undocumented(node.body, f"{where}.{node.name}", bool(node.bases))


def test_about_thirty_names():
    assert len(gradengine.__all__) <= 31
    assert sorted(gradengine.__all__) == list(gradengine.__all__)


def test_every_public_name_is_there_and_documented():
    names = [name for name in gradengine.__all__ if name != "__version__"]
    assert [name for name in names if not inspect.getdoc(getattr(gradengine, name))] == []


def test_every_name_for_others_is_documented():
    files = [path for path in PACKAGE.rglob("*.py") if path.relative_to(PACKAGE).parts[0] not in INTERNAL]
    assert [name for path in files for name in undocumented(ast.parse(path.read_text()).body, path.stem)] == []


@pytest.mark.parametrize("name", ["hold", "micro_batches", "average", "max_nrom", "step", "rank"])
def test_an_engine_takes_no_attribute_that_nothing_reads(name):
    """It would be a bound or a device that never was in force."""
    engine = gradengine.GradientEngine(gradengine.GradientLayout.of([(2,)]))
    with pytest.raises(gradengine.CallerError, match=f"'{name}' of an engine"):
        setattr(engine, name, 0.5)
    engine.loss_scale = 2.0


def test_version_and_types_travel_with_the_package():
    assert gradengine.__version__.count(".") == 2
    assert (PACKAGE / "py.typed").exists()
