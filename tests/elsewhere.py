"""CuPy for a device that is not the current one: each call is made while it is, and afterwards it is not.

So a test that makes arrays and streams by a backend's `xp` has them on the backend's device, while what it tests is
called with another one current.
"""

import contextlib
import functools
import types


class Elsewhere:
    """The names of CuPy, or of a module of it.

    Args:
        names: The module.
        device: CuPy's device.
    """

    def __init__(self, names, device):
        self._names, self._device = names, device

    def __getattr__(self, name):
        found = getattr(self._names, name)
        if isinstance(found, types.ModuleType):
            return Elsewhere(found, self._device)
        if name in {"Stream", "Event"}:
            return _made_there(found, type(self._device), self._device.id)
        if isinstance(found, type) or not callable(found):
            return found
        return _called_there(found, self._device)


def _called_there(function, device):
    @functools.wraps(function)
    def there(*args, **options):
        with device:
            return function(*args, **options)

    return there


@functools.cache  # by number: CuPy's devices have no hash
def _made_there(kind, device_kind, number):
    """A stream or event of the device; to enter the stream makes both current."""
    device = device_kind(number)

    class There(kind):
        def __init__(self, *args, **options):
            self._entered = []
            with device:
                super().__init__(*args, **options)

        def __enter__(self):
            with contextlib.ExitStack() as stack:
                stack.enter_context(device)
                super().__enter__()
                stack.push(super().__exit__)
                self._entered.append(stack.pop_all())
            return self

        def __exit__(self, *fault):
            self._entered.pop().close()

        def record(self, *args):
            with device:
                return super().record(*args)

    if hasattr(kind, "null"):
        There.null = There(null=True)
    return There
