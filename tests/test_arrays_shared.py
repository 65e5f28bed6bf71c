"""Memory that other processes can map: where it lies, how long it lives, and what a forked child does to it."""

import errno
import fcntl
import gc
import mmap
import os
import subprocess
import sys

import numpy as np
import pytest
from transports import HAS_SHARED_MEMORY

from gradengine.arrays import shared
from gradengine.arrays.shared import mapped, place_of, shared_array
from gradengine.errors import DeviceUnavailable, OutOfDeviceMemory

pytestmark = pytest.mark.skipif(not HAS_SHARED_MEMORY, reason="no memfd on this platform")


def descriptors():
    gc.collect()  # what other tests have left, which else may go in between
    return sorted(os.listdir("/proc/self/fd"))


def mappings():
    with open("/proc/self/maps") as lines:
        return sum("memfd:gradengine" in line for line in lines)


@pytest.mark.parametrize("size", [0, 1, 1000, 1 << 20])
def test_it_is_zeros_at_a_boundary_and_is_found_by_any_view(size):
    array = shared_array(size)
    assert (array.shape, array.dtype, array.ctypes.data % 128) == ((size,), np.float32, 0)
    assert array.flags.writeable
    assert not array.any()
    whole, start = place_of(array)
    assert start == 0
    for first in (0, size // 2):
        assert place_of(array[first:]) == (whole, 4 * first)
        assert place_of(array[first:].view(np.uint8)) == (whole, 4 * first)
    assert place_of(np.zeros(size, np.float32)) is None


def test_memory_that_lies_there_in_part_only_is_not_in_it():
    array = shared_array(mmap.PAGESIZE // 4)
    beyond = np.lib.stride_tricks.as_strided(array, (array.size + 1,))
    assert place_of(array) is not None
    assert place_of(beyond) is None


def test_another_mapping_shows_what_is_written_and_who_is_given_it_can_only_read():
    array = shared_array(1000)
    descriptor = place_of(array)[0].descriptor
    other = mapped(descriptor)[:4000].view(np.float32)
    array[:] = np.arange(1000)
    assert np.array_equal(other, array)
    with pytest.raises(ValueError, match="read-only"):
        other[0] = 1
    for write in (lambda: mmap.mmap(descriptor, 0), lambda: os.pwrite(descriptor, b"x", 0)):
        with pytest.raises(PermissionError):
            write()
    with pytest.raises(PermissionError):
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)


def test_its_file_neither_shrinks_nor_grows_nor_has_a_name():
    array = shared_array(1000)
    descriptor = place_of(array)[0].descriptor
    for size in (0, 3999, 4001):
        with pytest.raises(PermissionError):
            os.ftruncate(descriptor, size)
    assert os.readlink(f"/proc/self/fd/{descriptor}") == "/memfd:gradengine (deleted)"
    assert not [name for name in os.listdir("/dev/shm") if "gradengine" in name]


def test_it_goes_with_the_last_view_and_leaves_nothing_open():
    gc.collect()
    before = descriptors(), mappings()
    arrays = [shared_array(100) for _ in range(10)]
    views = [array[50:] for array in arrays]
    del arrays
    assert mappings() == before[1] + 10
    assert all(place_of(view) for view in views)
    del views
    assert (descriptors(), mappings()) == before


def test_what_may_shrink_is_not_mapped():
    descriptor = os.memfd_create("x", os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, 4096)
    with pytest.raises(ValueError, match="may shrink"):
        mapped(descriptor)
    os.close(descriptor)


@pytest.mark.parametrize("size", [1 << 45, 1 << 60, 10**30])
def test_too_much_is_refused_and_leaves_nothing_open(size):
    before = descriptors()
    with pytest.raises(OutOfDeviceMemory, match=r"the CPU has too little shared memory \(.*\): got \d+ bytes"):
        shared_array(size)
    assert descriptors() == before


@pytest.mark.parametrize("call", ["memfd_create", "ftruncate"])
def test_a_system_that_gives_none_is_named(call, monkeypatch):
    def fails(*_):
        raise OSError(errno.EMFILE, "Too many open files")

    before = descriptors()
    monkeypatch.setattr(shared.os, call, fails)
    with pytest.raises(OutOfDeviceMemory, match="Too many open files"):
        shared_array(1)
    assert descriptors() == before
    monkeypatch.delattr(shared.os, "memfd_create")
    with pytest.raises(
        DeviceUnavailable,
        match=r"needs Linux.s memfd_create, which .* lacks: got .*; pass link=\"unix\"",
    ):
        shared_array(1)


def test_what_a_forked_child_writes_is_its_own():
    script = """
import os
from gradengine.arrays.shared import mapped, place_of, shared_array

array = shared_array(10_000)
array[:] = 1
other = mapped(place_of(array)[0].descriptor).view(array.dtype)
child = os.fork()
if not child:
    is_as_it_was = (array == 1).all() and place_of(array) is None
    array[:] = 2
    os._exit(0 if is_as_it_was and (array == 2).all() and (other == 1).all() else 1)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
assert (array == 1).all()
array[:] = 3
assert (other == 3).all()
"""
    subprocess.run([sys.executable, "-W", "ignore", "-c", script], timeout=60, check=True)
