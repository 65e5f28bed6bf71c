"""From CUDA C++ to what g++ takes: the preprocessor is run first, so macros and included files count as written out."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from .compiler import run_compiler

_DYNAMIC_SHARED = re.compile(
    r"extern\s+__shared__\s+(?P<type>(?:__align__\(\w+\)|alignas\(\w+\)|[\w:<>,\s*])+?)\b(?P<name>\w+)\s*\[\s*\]\s*;"
)
_ALIGNMENT = re.compile(r"(?:__align__|alignas)\(\w+\)")
_KERNEL = re.compile(
    r"(?P<template>template\s*<[^{};]*?>\s*)?(?:extern\s+\"C\"\s*)?__global__\s+(?:void\s+)?"
    r"(?:__launch_bounds__\s*\([^()]*\)\s*)?(?:void\s+)?(?P<name>\w+)\s*\("
)
_GRID_CONSTANT = re.compile(r"\b__grid_constant__\b")


def preprocessed(code: str, options: Sequence[str]) -> str:
    """The source after its own macros and included files; NVRTC has no others either."""
    kept = [option.replace("--std", "-std") for option in options if option.startswith(_KEPT)]
    arguments = ["-E", "-x", "c++", "-nostdinc", "-D__CUDA_EMU__=1", "-std=c++17", *kept, "-"]
    return run_compiler(arguments, f'#line 1 "kernel.cu"\n{code}\n')


_KEPT = ("-D", "-I", "-std", "--std")


def kernel_names(text: str) -> list[str]:
    """The kernels that are no templates."""
    return [found["name"] for found in _KERNEL.finditer(text) if not found["template"]]


def translated(text: str, kernels: Iterable[str]) -> str:
    """A C++ file with the kernels, and an entry for each of them."""
    text = _DYNAMIC_SHARED.sub(_pointer_to_dynamic_shared, _by_reference(text))
    exports = "".join(f"EMU_EXPORT({number}, {name})\n" for number, name in enumerate(kernels))
    return f'#include "cuda_words.h"\n{text}\n{exports}'


def _pointer_to_dynamic_shared(found: re.Match[str]) -> str:
    element = _ALIGNMENT.sub("", found["type"]).strip()
    return f"{element}* {found['name']} = ({element}*)emu_dynamic_shared_memory();"


def _by_reference(text: str) -> str:
    """A `const __grid_constant__` parameter is read where the launch's arguments lie; threads have no copy of it."""
    parts = _GRID_CONSTANT.split(text)
    return parts[0] + "".join(map(_with_reference, parts[1:]))


def _with_reference(rest: str) -> str:
    depth = 0
    for i, character in enumerate(rest):
        depth += {"<": 1, "(": 1, ">": -1}.get(character, 0)
        if character in ",)" and depth <= 0:
            name = re.search(r"\w+\s*$", rest[:i])
            assert name is not None
            return f"{rest[: name.start()]}&{rest[name.start() :]}"
    return rest
