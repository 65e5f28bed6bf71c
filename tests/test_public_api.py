"""What the package promises: the public names, their types and their documentation."""

import importlib
import importlib.util
import inspect
import pkgutil
import typing
from pathlib import Path

import pytest

import gradengine

FRAMEWORKS = {"gradengine.torch", "gradengine.torch.transformers", "gradengine.torch.lightning", "gradengine.jax"}
MODULES = [
    name
    for _, name, _ in pkgutil.walk_packages(gradengine.__path__, "gradengine.")
    if not name.startswith(("gradengine.bench", "gradengine.demo", "gradengine.cli", "gradengine.__main__"))
    and (name not in FRAMEWORKS or importlib.util.find_spec(name.rpartition(".")[2]))
]


def public_objects(module):
    """Name -> what a module lists, or else what it defines without an underscore; but for generic aliases of types."""
    defined = [n for n, value in vars(module).items() if n[0] != "_" and is_defined_in(module, value)]
    named = {name: getattr(module, name) for name in getattr(module, "__all__", defined)}
    return {name: value for name, value in named.items() if typing.get_origin(value) is None}


def is_defined_in(module, value):
    return (inspect.isfunction(value) or inspect.isclass(value)) and value.__module__ == module.__name__


def undocumented(name, value):
    """The listed name, and its methods, that say nothing of themselves or of their types."""
    functions = {name: value} if inspect.isfunction(value) else {}
    if inspect.isclass(value):
        functions |= {f"{name}.{n}": f for n, f in vars(value).items() if inspect.isfunction(f) and n[0] != "_"}
        yield from [name] * (not inspect.getdoc(value))
    for called, function in functions.items():
        if not inspect.getdoc(function):
            yield called
        signature = inspect.signature(function)
        if signature.return_annotation is inspect.Signature.empty:
            yield f"{called} -> ?"
        for parameter in signature.parameters.values():
            if parameter.name != "self" and parameter.annotation is inspect.Parameter.empty:
                yield f"{called}({parameter.name}: ?)"


def test_about_twenty_five_names():
    assert len(gradengine.__all__) <= 30
    assert sorted(gradengine.__all__) == list(gradengine.__all__)


def test_every_public_name_is_there_and_documented():
    names = [name for name in gradengine.__all__ if name != "__version__"]
    assert [name for name in names if not inspect.getdoc(getattr(gradengine, name))] == []


@pytest.mark.parametrize("name", MODULES)
def test_every_name_for_others_is_documented_and_annotated(name):
    listed = public_objects(importlib.import_module(name))
    assert [fault for listed_name, value in listed.items() for fault in undocumented(listed_name, value)] == []


def test_what_says_nothing_of_itself_is_found():
    """So it is the names' own words that are looked for."""

    class Silent:
        def method(self, argument):
            pass

    def function(argument: int) -> None:
        pass

    assert [*undocumented("Silent", Silent)] == [
        "Silent",
        "Silent.method",
        "Silent.method -> ?",
        "Silent.method(argument: ?)",
    ]
    assert [*undocumented("function", function)] == ["function"]


def test_version_and_types_travel_with_the_package():
    assert gradengine.__version__.count(".") == 2
    assert (Path(gradengine.__file__).parent / "py.typed").exists()
