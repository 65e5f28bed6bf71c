"""What the package promises: the public names, their types and their documentation."""

import importlib
import importlib.util
import inspect
import pkgutil
import typing
from pathlib import Path

import pytest

import gradengine

MODULES = [
    name
    for _, name, _ in pkgutil.walk_packages(gradengine.__path__, "gradengine.")
    if not name.startswith(("gradengine.bench", "gradengine.demo", "gradengine.cli", "gradengine.__main__"))
    and (
        name not in {"gradengine.torch", "gradengine.jax"} or importlib.util.find_spec(name.removeprefix("gradengine."))
    )
]


def public_objects():
    for module_name in MODULES:
        module = importlib.import_module(module_name)
        for name in getattr(module, "__all__", ()):
            if typing.get_origin(getattr(module, name)) is None:
                yield pytest.param(module, name, id=f"{module_name}.{name}")


def test_about_twenty_five_names():
    assert len(gradengine.__all__) <= 30
    assert sorted(gradengine.__all__) == list(gradengine.__all__)


@pytest.mark.parametrize("name", gradengine.__all__)
def test_every_public_name_is_there_and_documented(name):
    value = getattr(gradengine, name)
    assert name == "__version__" or inspect.getdoc(value)


@pytest.mark.parametrize(("module", "name"), list(public_objects()))
def test_every_listed_name_is_defined_and_annotated(module, name):
    value = getattr(module, name)
    functions = [value] if inspect.isfunction(value) else []
    if inspect.isclass(value):
        assert inspect.getdoc(value), name
        functions += [f for n, f in vars(value).items() if inspect.isfunction(f) and not n.startswith("_")]
    for function in functions:
        assert inspect.getdoc(function), function.__qualname__
        signature = inspect.signature(function)
        assert signature.return_annotation is not inspect.Signature.empty, function.__qualname__
        for parameter in list(signature.parameters.values()):
            assert parameter.name == "self" or parameter.annotation is not inspect.Parameter.empty, (
                function.__qualname__
            )


def test_version_and_types_travel_with_the_package():
    assert gradengine.__version__.count(".") == 2
    assert (Path(gradengine.__file__).parent / "py.typed").exists()
