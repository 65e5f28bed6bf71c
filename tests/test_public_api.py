"""What the package promises: the public names, and their documentation."""

import ast
import importlib
import inspect
from pathlib import Path

import pytest

import gradengine
from gradengine.engine.capture import CapturedWindow
from gradengine.engine.micro_batch import MicroBatch
from gradengine.errors import FixedAttribute

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


ROOMS = [("gradengine", "numpy"), ("gradengine.torch", "torch"), ("gradengine.jax", "jax")]


@pytest.mark.parametrize(("room", "needs"), ROOMS)
def test_an_object_takes_no_attribute_but_what_has_a_setter(room, needs):
    """One that was taken and ignored would be a bound or a device that never was in force."""
    pytest.importorskip(needs)
    public = importlib.import_module(room)
    classes = [value for name in public.__all__ if inspect.isclass(value := getattr(public, name))]
    for kind in {MicroBatch, CapturedWindow, *classes}:
        if issubclass(kind, Exception | tuple):  # Python's own
            continue
        made = kind.__new__(kind)
        vars(made)["_is_fixed"] = True
        settable = {n for n, value in inspect.getmembers(kind) if getattr(value, "fset", inspect.isroutine(value))}
        for name in {each for each in dir(kind) if not each.startswith("_")} - settable | {"max_nrom"}:
            with pytest.raises(AttributeError, match=name):
                setattr(made, name, 1)


@pytest.mark.parametrize("name", ["max_norm", "hold", "groups", "device", "layout", "max_nrom"])
def test_a_fixed_attribute_is_refused_by_name(name):
    engine = gradengine.GradientEngine(gradengine.GradientLayout.of([(2,)]))
    with pytest.raises(FixedAttribute, match=rf"'{name}' of GradientEngine .*loss_scale; (make|keep) "):
        setattr(engine, name, 0.5)
    engine.loss_scale = 2.0


def test_version_and_types_travel_with_the_package():
    assert gradengine.__version__.count(".") == 2
    assert (PACKAGE / "py.typed").exists()
