"""GRADENGINE_LOG: a line on stderr for each public call, with its time and, at level 3, with its arguments.

GRADENGINE_NVTX: a range for a profiler around each add, step and replay, and around the exchange's wait. Where neither
variable is set nothing is wrapped, and calls cost nothing more.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import logging
import time
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from typing import Any, TypeVar

from gradengine.arguments import said
from gradengine.engine import GradientEngine
from gradengine.engine.capture import CapturedWindow
from gradengine.engine.micro_batch import MicroBatch
from gradengine.engine.trainer import DistributedTrainer
from gradengine.errors import CallerError, DeviceUnavailable
from gradengine.exchange import Exchange

Call = TypeVar("Call", bound=Callable[..., Any])

VARIABLE = "GRADENGINE_LOG"
_LEVELS = {"": 0, "0": 0, "1": 1, "3": 3}
_CLASSES = (GradientEngine, DistributedTrainer, Exchange, MicroBatch)
RANGES_VARIABLE = "GRADENGINE_NVTX"
RANGES: Mapping[str, Sequence[tuple[type, str]]] = {
    "gradengine.add": [
        (GradientEngine, "add"), (GradientEngine, "add_block"), (GradientEngine, "add_non_block"), (MicroBatch, "add"),
    ],
    "gradengine.step": [(GradientEngine, "step")],
    "gradengine.exchange": [(Exchange, "wait")],
    "gradengine.replay": [(CapturedWindow, "replay")],
}  # fmt: skip

logger = logging.getLogger("gradengine.engine.calls")


def log_calls(
    names: MutableMapping[str, Any], environment: Mapping[str, str], classes: Sequence[type] = _CLASSES
) -> None:
    """Log each call of the package's public functions, and of the main classes' methods, if the variable is set.

    Args:
        names: The package's globals, in which the functions are replaced.
        environment: The environment variables.
        classes: Classes whose methods are replaced; those of `MicroBatch`, called for each component, only at level 3.

    Raises:
        CallerError: The variable is not 0, 1 or 3.
    """
    asked = environment.get(VARIABLE, "")
    if asked not in _LEVELS:
        what = f"environment variable {VARIABLE} has no such level"
        raise CallerError(what, got=said(asked), expected="1 for calls and times, 3 for shapes too", do="or unset it")
    level = _LEVELS[asked]
    if not level:
        return
    if not logger.handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(asctime)s %(process)d gradengine: %(message)s"))
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
        logger.propagate = False
    for kind in [kind for kind in classes if kind is not MicroBatch or level > 1]:
        calls = {name: call for name, call in vars(kind).items() if inspect.isfunction(call) and _is_public(name)}
        for name, call in calls.items():
            setattr(kind, name, logged(call, level, is_method=True))
    functions = {name: each for name, each in names.items() if inspect.isfunction(each) and _is_public(name)}
    own = {log_calls.__name__, mark_calls.__name__}
    names.update({name: logged(each, level) for name, each in functions.items() if name not in own})


def mark_calls(environment: Mapping[str, str]) -> None:
    """Put an NVTX range, which Nsight Systems shows, around each call of `RANGES`, if the variable is set.

    Args:
        environment: The environment variables.

    Raises:
        CallerError: The variable is not 0 or 1.
        DeviceUnavailable: CuPy, which brings NVTX, does not load.
    """
    asked = environment.get(RANGES_VARIABLE, "")
    if asked not in {"", "0", "1"}:
        what = f"environment variable {RANGES_VARIABLE} has no such value"
        raise CallerError(what, got=said(asked), expected="1 for ranges", do="or unset it")
    if asked != "1":
        return
    try:
        nvtx = importlib.import_module("cupy.cuda").nvtx
    except ImportError as fault:
        what, do = f"{RANGES_VARIABLE}=1 needs CuPy ({fault})", "pip install 'gradengine[cuda12]', or unset it"
        raise DeviceUnavailable(what, do=do) from None
    for name, calls in RANGES.items():
        for kind, call in calls:
            setattr(kind, call, within_range(vars(kind)[call], name, nvtx))


def within_range(call: Call, name: str, nvtx: Any) -> Call:
    """The call, wrapped in a profiler's range of that name, which ends also if the call raises."""

    @functools.wraps(call)
    def with_range(*given: Any, **named: Any) -> Any:
        nvtx.RangePush(name)
        try:
            return call(*given, **named)
        finally:
            nvtx.RangePop()

    return with_range  # type: ignore[return-value]


def logged(call: Call, level: int, *, is_method: bool = False) -> Call:
    """The call, wrapped so that it is followed by its line in the log."""

    @functools.wraps(call)
    def with_line(*given: Any, **named: Any) -> Any:
        begin, ended = time.perf_counter(), ""
        try:
            return call(*given, **named)
        except BaseException as fault:
            ended = f", raised {said(fault)}"
            raise
        finally:
            place, took = _place(given[0]) if is_method else "", 1e3 * (time.perf_counter() - begin)
            shown = _arguments(given[is_method:], named) if level > 1 else "..."
            logger.info("%s%s(%s) took %.3f ms%s", place, _name(call), shown, took, ended)

    return with_line  # type: ignore[return-value]


def _is_public(name: str) -> bool:
    return name == "__init__" or not name.startswith("_")


def _name(call: Callable[..., Any]) -> str:
    return call.__qualname__.removesuffix(".__init__")


def _place(owner: object) -> str:
    """The start of a line, "rank 0, step 3: ", as far as the called object knows them."""
    facts = {"rank": getattr(owner, "rank", None), "step": getattr(owner, "current_step", None)}
    known = ", ".join(f"{name} {value}" for name, value in facts.items() if value is not None)
    return f"{known}: " if known else ""


def _arguments(given: Sequence[object], named: Mapping[str, object]) -> str:
    """The call's arguments as text, without secrets."""
    shown = {name: "..." if name == "token" else _described(value) for name, value in named.items()}
    return ", ".join([*map(_described, given), *(f"{name}={each}" for name, each in shown.items())])


def _described(value: object) -> str:
    """Arrays by dtype and shape, in mappings and sequences too; anything else as errors show it."""
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{name}: {_described(each)}' for name, each in value.items())}}}"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_described, value))}]"
    shape, dtype = getattr(value, "shape", None), getattr(value, "dtype", None)
    if shape is None or dtype is None:
        return str(said(value))
    return f"{dtype}[{', '.join(map(str, shape))}]"
