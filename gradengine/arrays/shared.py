"""Host memory that other processes of this host can map.

The memory is a file without a name, freed when no process uses it. It is never in /dev/shm, and no mount limits its
size. The file is sealed so that it cannot shrink, since a process that reads beyond a file's end is killed by SIGBUS.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import sys
import weakref
from typing import Any, final

import numpy as np
import numpy.typing as npt

from gradengine.errors import DeviceUnavailable, OutOfDeviceMemory


@final
class SharedMemory(mmap.mmap):
    """A mapping of memory that this process has made. It is kept as long as an array in it exists.

    Attributes:
        descriptor: The file's descriptor, which can be passed to other processes.
        address: The address at which the file is mapped.
    """

    descriptor: int
    address: int


def shared_array(size: int) -> npt.NDArray[np.float32]:
    """Return flat fp32 zeros at a 128-byte boundary, which other processes can map.

    A forked child's writes are private to the child. Pages that the child has not written show the parent's writes.

    Raises:
        DeviceUnavailable: This system has no such memory.
        OutOfDeviceMemory: The system has too little memory, or this process may have no more file descriptors.
    """
    if not hasattr(os, "memfd_create"):
        refuse_without_shared_memory()
    import fcntl  # noqa: PLC0415  (Windows has none)

    nbytes = max(1, 4 * size)
    try:
        descriptor = os.memfd_create("gradengine", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(descriptor, nbytes)
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
            memory = SharedMemory(descriptor, nbytes)
            # Without this seal other processes can map the memory for writing. Linux before 5.1 lacks the seal.
            with contextlib.suppress(OSError):
                fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEAL_FUTURE_WRITE | fcntl.F_SEAL_SEAL)
        except BaseException:
            os.close(descriptor)
            raise
    except (OSError, ValueError, OverflowError) as fault:
        what = f"the CPU has too little shared memory ({fault})"
        do = 'raise the limits (ulimit -f, -n), or connect with link="unix" on all ranks'
        raise OutOfDeviceMemory(what, got=f"{nbytes} bytes requested", do=do) from None
    weakref.finalize(memory, os.close, descriptor).atexit = False
    # The kernel may have no huge pages. A pass then takes up to 1.15 times as long.
    with contextlib.suppress(OSError):
        memory.madvise(mmap.MADV_HUGEPAGE)
    data = np.frombuffer(memory, np.uint8)
    memory.descriptor, memory.address = descriptor, data.ctypes.data
    _made[id(memory)] = memory
    return data[: 4 * size].view(np.float32)


def has_shared_memory() -> bool:
    """Return whether this process can make such memory. Python or the system may lack or forbid memfd_create."""
    if not hasattr(os, "memfd_create"):
        return False
    try:
        os.close(os.memfd_create("gradengine", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING))
    except OSError:  # This includes too few descriptors, which the next call that opens a file reports.
        return False
    return True


def refuse_without_shared_memory() -> None:
    """Raise `DeviceUnavailable` if this process cannot make such memory."""
    if not has_shared_memory():
        what = "shared memory needs Linux's memfd_create, which this system or Python lacks"
        do = 'pass link="unix" on all ranks'
        raise DeviceUnavailable(what, got=sys.platform, do=do)


def place_of(memory: npt.NDArray[Any]) -> tuple[SharedMemory, int] | None:
    """Return this process's shared memory that contains the array, and the array's byte offset in it, or None."""
    address = memory.ctypes.data
    for reference in _made.valuerefs():  # This is a list, so other threads may add and drop entries.
        whole = reference()
        if whole is not None and whole.address <= address <= whole.address + len(whole) - memory.nbytes:
            return whole, address - whole.address
    return None


def mapped(descriptor: int) -> npt.NDArray[np.uint8]:
    """Map all of another process's shared memory for reading. The descriptor may be closed afterwards.

    Raises:
        OSError, ValueError: The descriptor does not belong to shared memory that never shrinks, or cannot be mapped.
    """
    import fcntl  # noqa: PLC0415  (Windows has none)

    if not fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
        raise ValueError("it is not sealed, and may shrink")
    return np.frombuffer(mmap.mmap(descriptor, 0, prot=mmap.PROT_READ), np.uint8)


_SEAL_FUTURE_WRITE = 0x10  # Linux's F_SEAL_FUTURE_WRITE, which Python lacks
_made: weakref.WeakValueDictionary[int, SharedMemory] = weakref.WeakValueDictionary()  # memory that this process made


def _make_private() -> None:
    """Make a forked child's mappings private, so that its writes do not reach the parent."""
    flags = mmap.MAP_PRIVATE | _MAP_FIXED
    for whole in _made.values():
        place = _map(whole.address, len(whole), mmap.PROT_READ | mmap.PROT_WRITE, flags, whole.descriptor, 0)
        if place != whole.address:
            os.abort()  # The child would write to the parent's memory.
    _made.clear()


_MAP_FIXED = 0x10  # Linux's MAP_FIXED, which Python lacks

if hasattr(os, "memfd_create"):
    _map = ctypes.CDLL(None).mmap  # Python's mmap takes no address.
    _map.restype = ctypes.c_void_p
    _map.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_ssize_t]
    os.register_at_fork(after_in_child=_make_private)
