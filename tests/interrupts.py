"""Interrupts at each line of a call and at random times, for tests of what they leave behind."""

import collections
import contextlib
import dis
import functools
import gc
import linecache
import re
import signal
import sys
import threading
import time
from pathlib import Path

import gradengine

PACKAGE = str(Path(gradengine.__file__).parent)


class _Tracer:
    """Notes where this thread comes in the package, before each line and after each return; at one it raises `kind`.

    CPython looks for signals after calls and jumps back. So not
    at a `try`, or a `return` or `raise` of what is there, nor where a `with` of a lock ends: that counts as a line, but
    there is no call between the last one inside and the release.
    """

    def __init__(self, at=None, kind=KeyboardInterrupt):
        self.times, self._at, self._kind = collections.Counter(), at, kind

    def __call__(self, frame, event, argument):
        return self._of_line if frame.f_code.co_filename.startswith(PACKAGE) else None

    def _of_line(self, frame, event, argument):
        is_line = event == "line" and frame.f_lasti not in _safe_at(frame.f_code)
        if is_line or (event == "return" and frame.f_lasti in _returning_at(frame.f_code)):
            place = frame.f_code.co_filename, frame.f_lineno, event
            self.times[place] += 1
            if (*place, self.times[place]) == self._at:
                raise self._kind
        return self._of_line


_LOADING = {"LOAD_FAST", "LOAD_FAST_BORROW"}  # the latter since 3.14
_LEAVING = {"RETURN_VALUE", "RAISE_VARARGS"}


@functools.cache
def _safe_at(code):
    """Where in its bytes a line begins, or begins again, that no signal can interrupt.

    And where a loop of one line goes back, of which only 3.12 and later tell a tracer: a signal can interrupt there,
    but the tracer's exception passes by each `with` and `try` of the function (python/cpython#152375). No signal is
    looked for where an exception leaves a `with`; a tracer's exception there keeps the frame's objects.
    """
    safe, steps = set(), list(dis.get_instructions(code))
    for step, behind in zip(steps, [*steps[1:], None], strict=True):
        leaves = step.opname == "RETURN_VALUE" or (step.opname in _LOADING and behind.opname in _LEAVING)
        goes_back = step.opname == "JUMP_BACKWARD" and not step.starts_line
        is_exit = behind is not None and "WITH_EXCEPT_START" in {step.opname, behind.opname}
        if leaves or goes_back or is_exit or step.opname == "NOP":
            safe.add(step.offset)
    begun = set()
    for start, _, line in code.co_lines():
        text = linecache.getline(code.co_filename, line) if line in begun - {None} else ""
        if re.match(r"\s*with .*lock:\s*(#.*)?$", text):
            safe.add(start)
        begun.add(line)
    return safe


@functools.cache
def _returning_at(code):
    """Where in its bytes it returns: a frame that an exception leaves, or a generator that yields, returns nothing.

    Not from `__enter__` into a `with`, which is one step of the interpreter's.
    """
    if code.co_name == "__enter__":
        return set()
    return {step.offset for step in dis.get_instructions(code) if step.opname in {"RETURN_VALUE", "RETURN_CONST"}}


def _traced(tracer, call):
    before = sys.gettrace()
    # A collection runs finalisers of earlier objects. An exception in one of them only becomes a warning.
    gc.disable()
    sys.settrace(tracer)
    try:
        return call()
    finally:
        sys.settrace(before)
        gc.enable()


def places_of(call):
    """Where to interrupt a call like this one: each line and return, the first or the last time it comes there."""
    tracer = _Tracer()
    _traced(tracer, call)
    return [(*place, tracer.times[place] if i % 2 else 1) for i, place in enumerate(sorted(tracer.times))]


def interrupted_at(at, call):
    """Interrupt a call at one of its places; whether it came so far.

    What the call returned or raised by itself is returned or raised.
    """
    with contextlib.suppress(KeyboardInterrupt):
        return False, _traced(_Tracer(at), call)
    return True, None


def kept_interrupt(at, call):
    """Interrupt a call at one of its places; the interrupt with its traceback, as a REPL keeps it, or None."""
    try:
        _traced(_Tracer(at), call)
    except KeyboardInterrupt as interrupt:
        return interrupt
    return None


def raised_at(at, call, fault):
    """Raise an exception at one of a call's places, as a signal's handler does; what the call ended with, or None."""
    try:
        _traced(_Tracer(at, fault), call)
    except BaseException as end:
        return end
    return None


@contextlib.contextmanager
def signalled(seconds):
    """In this, the main thread, raise KeyboardInterrupt once, in so many seconds.

    Only within the package, so that the test itself is not what is interrupted. (SIGUSR1 of a thread, as pytest-timeout
    has the alarm clock.)
    """
    over = threading.Event()

    def interrupt(number, frame):
        while frame is not None and not frame.f_code.co_filename.startswith(PACKAGE):
            frame = frame.f_back
        if frame is not None and not over.is_set():
            over.set()
            raise KeyboardInterrupt

    def send():
        time.sleep(seconds)
        while not over.is_set():
            signal.pthread_kill(threading.main_thread().ident, signal.SIGUSR1)
            time.sleep(2e-5)

    gc.disable()  # or what runs at a collection, as Hypothesis does, would be interrupted in place of the package
    before, switches = signal.signal(signal.SIGUSR1, interrupt), sys.getswitchinterval()
    sys.setswitchinterval(1e-5)  # else the sender waits 5 ms for its turn
    sender = threading.Thread(target=send)
    sender.start()
    try:
        yield
    finally:
        over.set()
        sender.join()
        sys.setswitchinterval(switches)
        signal.signal(signal.SIGUSR1, before)
        gc.enable()
