"""Each image that NVRTC makes carries its source as a comment: what is run is the source, not the PTX."""

from __future__ import annotations

import base64
import functools
import json
import zlib
from dataclasses import dataclass
from types import ModuleType
from typing import Any

_MARK = "\n// real_cupy source: "


@dataclass(frozen=True)
class Source:
    """What an image was compiled from.

    Attributes:
        code: CUDA C++.
        options: NVRTC's.
        expressions: Name expression of each kernel that is a template, by the name it has in the image.
    """

    code: str
    options: tuple[str, ...]
    expressions: dict[str, str]


def carry_sources(compiler: ModuleType) -> None:
    """Have CuPy's compiler module add them."""
    compile_image = compiler._compile_using_nvrtc_no_warning

    @functools.wraps(compile_image)
    def with_source(source: str, options: tuple[str, ...] = (), *others: Any, **named: Any) -> tuple[Any, Any]:
        image, names = compile_image(source, options, *others, **named)
        expressions = {lowered: expression for expression, lowered in (names or {}).items()}
        return _with_comment(image, Source(source, tuple(options), expressions)), names

    compiler._compile_using_nvrtc_no_warning = with_source


def _with_comment(image: bytes, source: Source) -> bytes:
    packed = base64.b64encode(zlib.compress(json.dumps(vars(source)).encode())).decode()
    return image.rstrip(b"\0") + f"{_MARK}{packed}\n".encode()


def source_of(image: bytes) -> Source:
    """What an image was compiled from."""
    packed = image.rpartition(_MARK.encode())[2].strip()
    found = json.loads(zlib.decompress(base64.b64decode(packed)))
    return Source(found["code"], tuple(found["options"]), found["expressions"])
