"""The house rules that a machine can keep: imports follow the data's way, files stay small, frameworks stay outside."""

import ast
import dis
import functools
import re
import sys
import types
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "gradengine"

# Reading down is the data's way; a file imports only what stands above it.
_ORDER = """
errors arguments threads
arrays.lost arrays.dtypes arrays.streams arrays.dlpack arrays.buffer arrays.frameworks arrays.host arrays.shared
arrays.device arrays.known arrays
layout.shards layout.tensor_parallel layout.cost layout.slots layout.components layout.layout layout
kernels.operands kernels.decision kernels.device kernels.events kernels.cuda_runtime kernels.streams
kernels.status kernels.host_sums kernels.arena kernels.toolchain kernels.graphs kernels.cuda_device
kernels.kept kernels.loss_scale kernels.spikes kernels.interface kernels.host_device kernels.host_threads kernels.host
kernels.launch kernels.cuda kernels
elementwise
accumulate.state accumulate.gradients accumulate.destinations accumulate.intake accumulate.window
accumulate.groups accumulate.block accumulate.accumulator accumulate.gpu accumulate
clip
exchange.wire exchange.tls exchange.links.link exchange.links.threads exchange.links.mpi
exchange.links.collectives exchange.links.sockets exchange.links.shared_memory exchange.links exchange.handshake
exchange.addresses exchange.launchers exchange.mesh
exchange.torch_group exchange.hello exchange.shares
exchange.ordered_all_reduce exchange.gather
exchange.pump exchange.server exchange.exchange exchange
reduction.stats reduction.device_sums
reduction.reducer reduction
engine.ranges engine.noise engine.result engine.settings engine.clipping engine.loss_scaling engine.deciding
engine.checkpoint engine.capture engine.micro_batch engine.engine engine engine.trainer
"""
ORDER = [*_ORDER.split(), ""]  # the package itself comes last
STEP = [room for room in ORDER if not room.startswith("exchange")]
# They use it; nothing in it uses them.
FREE = {"console", "bench", "demo", "plan", "commands", "__main__", "torch", "jax"}
TRAINERS = {"transformers", "accelerate", "lightning"}
FRAMEWORKS = {"torch", "jax", "cupy", "tensorflow", "mlx"} | TRAINERS


def modules():
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        yield ".".join(part for part in parts if part != "__init__"), path


@functools.cache
def imports(path):
    nodes = [*ast.walk(ast.parse(path.read_text()))]
    names = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and node.module:
            # A name that is imported from a package may be one of its modules.
            inner = {f"{node.module}.{alias.name}" for alias in node.names}
            names |= {each if each.removeprefix("gradengine.") in ORDER else node.module for each in inner}
    return names


CORE = [(name, path) for name, path in modules() if name.split(".")[0] not in FREE]


def test_every_file_has_its_place():
    assert {name for name, _ in CORE} == set(ORDER)


def test_a_file_imports_only_what_stands_before_it():
    ours = [(name, imported) for name, path in CORE for imported in imports(path) if is_ours(imported)]
    assert len(ours) > 100
    assert [f"{name} imports {imported}" for name, imported in ours if not stands_before(imported, name)] == []


def is_ours(imported):
    return imported.split(".")[0] == "gradengine"


def stands_before(imported, name):
    below = imported.removeprefix("gradengine").lstrip(".")
    return below in ORDER and ORDER.index(below) < ORDER.index(name)


def test_the_core_imports_no_framework():
    assert [name for name, path in CORE if FRAMEWORKS & {imported.split(".")[0] for imported in imports(path)}] == []


def test_a_training_framework_is_imported_by_its_own_file_alone():
    found = {name: {each.split(".")[0] for each in imports(path)} & TRAINERS for name, path in modules()}
    assert {name: imported for name, imported in found.items() if imported} == {
        "torch.lightning": {"lightning"},
        "torch.transformers": {"transformers"},
    }
    theirs = ("gradengine.torch.lightning", "gradengine.torch.transformers")
    assert [name for name, path in modules() if any(each.startswith(theirs) for each in imports(path))] == []


def test_files_stay_small():
    assert [name for name, path in modules() if len(path.read_text().splitlines()) > 600] == []


def test_no_context_manager_of_a_step_is_a_generator():
    """One that an interrupt leaves suspended ends when its traceback goes: its `finally` may come steps later."""
    for room in STEP:
        path = PACKAGE.joinpath(*room.split(".")) if room else PACKAGE
        source = (path / "__init__.py" if path.is_dir() else path.with_suffix(".py")).read_text()
        assert "@contextmanager" not in source, room


@pytest.mark.skipif(sys.version_info < (3, 13), reason="older versions release the lock")
def test_no_loop_under_a_lock_jumps_back_from_outside_its_with():
    """From 3.13 on a conditional jump back in a `with` is compiled as outside of it (python/cpython#130279).

    Ctrl-C there would leave the lock locked for ever. Such a loop is put into a function that is called under the lock.
    """
    assert [f"{name}:{line}" for name, path in modules() for line in jumps_past_a_lock(path)] == []


def jumps_past_a_lock(path):
    source = path.read_text()
    for code in codes_in(compile(source, path, "exec")):
        steps = {step.offset: step for step in dis.get_instructions(code)}
        for step in steps.values():
            if step.opname == "JUMP_BACKWARD" and (
                locks_at(step.jump_target, code, source) - locks_at(step.offset, code, source)
            ):
                yield step.positions.lineno


def codes_in(code):
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from codes_in(constant)


def locks_at(offset, code, source):
    """Lines of the `with` of locks whose handlers see an exception of the instruction at that offset."""
    handler = next(
        (each.target for each in dis.Bytecode(code).exception_entries if each.start <= offset < each.end), None
    )
    if handler is None:
        return set()
    line = next(line for start, end, line in code.co_lines() if start <= handler < end)
    is_lock = line is not None and re.search(r"\bwith .*lock\b", source.splitlines()[line - 1])
    return locks_at(handler, code, source) | ({line} if is_lock else set())
