"""How much work a call is, counted and not timed: the bytecodes that it runs, comparisons of names among them."""

import gc
import sys


class Name(str):
    """Text whose comparisons are Python's own, so that a search through a list of names is counted."""

    __slots__ = ()

    def __eq__(self, other):
        return str.__eq__(self, other)

    def __hash__(self):
        return str.__hash__(self)


def operations(work):
    """Bytecodes that `work` runs in this thread."""
    count = 0

    def trace(frame, event, argument):
        nonlocal count
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        count += event == "opcode"
        return trace

    before = sys.gettrace()
    gc.collect()
    gc.disable()  # or what others left would be finalised here, and counted
    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(before)
        gc.enable()
    return count


def growth(work_of, size):
    """How many times as much work a call is at twice the size: 2 where it is linear, 4 where it is quadratic."""
    works = [work_of(size), work_of(2 * size)]
    for work in works:
        work()  # what is made once is made
    return operations(works[1]) / operations(works[0])
