"""Interrupts at each line of a call and at random times, for tests of what they leave behind."""

import contextlib
import dis
import linecache
import signal
import sys
import threading
import time
from pathlib import Path

import gradengine

PACKAGE = str(Path(gradengine.__file__).parent)


class _Tracer:
    """Notes each line of the package that this thread runs; at one of them it raises what Ctrl-C raises.

    But for where a `with` of a lock ends, which counts as a line: CPython looks for signals behind calls and jumps
    back, and there is none between the last call inside and the lock's release.
    """

    def __init__(self, at=None):
        self.places, self._at = [], at

    def __call__(self, frame, event, argument):
        return self._of_line if frame.f_code.co_filename.startswith(PACKAGE) else None

    def _of_line(self, frame, event, argument):
        if event == "line" and not _releases_lock(frame):
            self.places.append((frame.f_code.co_filename, frame.f_lineno))
            if len(self.places) - 1 == self._at:
                raise KeyboardInterrupt
        return self._of_line


def _releases_lock(frame):
    code = frame.f_code.co_code
    ends_with = code[frame.f_lasti] == code[frame.f_lasti + 2] == code[frame.f_lasti + 4] == dis.opmap["LOAD_CONST"]
    return ends_with and "lock" in linecache.getline(frame.f_code.co_filename, frame.f_lineno)


def _traced(tracer, call):
    before = sys.gettrace()
    sys.settrace(tracer)
    try:
        return call()
    finally:
        sys.settrace(before)


def places_of(call):
    """What to interrupt a call like this one at: every line of the package's, the first and the last time it runs."""
    tracer = _Tracer()
    _traced(tracer, call)
    first = {place: i for i, place in reversed(list(enumerate(tracer.places)))}
    last = {place: i for i, place in enumerate(tracer.places)}
    return {i: tracer.places[i] for i in sorted({*first.values(), *last.values()})}


def interrupted_at(at, call):
    """Interrupt a call where it runs its line number `at`; whether it came so far.

    What the call returned or raised by itself is returned or raised.
    """
    with contextlib.suppress(KeyboardInterrupt):
        return False, _traced(_Tracer(at), call)
    return True, None


@contextlib.contextmanager
def signalled(seconds, within, times=1):
    """In this, the main thread, raise KeyboardInterrupt in so many seconds, and then at short intervals, up to `times`.

    Only where a function with that name is running, so that the test itself is not what is interrupted. (SIGUSR1 of a
    thread, as pytest-timeout has the alarm clock.)
    """
    left, over = [times], threading.Event()

    def interrupt(number, frame):
        while frame is not None and frame.f_code.co_name != within:
            frame = frame.f_back
        if left[0] and frame is not None:
            left[0] -= 1
            raise KeyboardInterrupt

    def send():
        time.sleep(seconds)
        while left[0] and not over.is_set():
            signal.pthread_kill(threading.main_thread().ident, signal.SIGUSR1)
            time.sleep(2e-5)

    before = signal.signal(signal.SIGUSR1, interrupt)
    sender = threading.Thread(target=send)
    sender.start()
    try:
        yield
    finally:
        left[0] = 0
        over.set()
        sender.join()
        signal.signal(signal.SIGUSR1, before)
