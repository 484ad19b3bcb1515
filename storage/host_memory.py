"""Memory without a name that a second process can map: it is gone when the last process that has it is gone.

A named segment (POSIX shared memory, a file) would outlive a process that is killed, and so would keep a whole model's
bytes from everybody. Here only descriptors and mappings hold the memory, and the kernel drops both with their process,
however it ends. An anonymous file is also not bounded by the size of /dev/shm, which is 64 MB in a usual container.
"""

from __future__ import annotations

import mmap
import os
import tempfile
import weakref

import numpy as np


class HostMemory:
    """`size` bytes, touched once so that a later copy into them meets no page fault. `fd` is what another process needs
    for `MappedMemory`. They live as long as this object, a view of them, or a mapping elsewhere."""

    def __init__(self, size: int) -> None:
        self.fd = _nameless_file()
        weakref.finalize(self, os.close, self.fd)
        os.ftruncate(self.fd, max(1, size))
        self.view = _map(self.fd, size, mmap.PROT_READ | mmap.PROT_WRITE)
        np.frombuffer(self.view, np.uint8)[:: mmap.PAGESIZE] = 0


class MappedMemory:
    """The `HostMemory` of another process, to be read only; takes `fd` over. Only pages that are read are mapped."""

    def __init__(self, fd: int, size: int) -> None:
        self.fd = fd
        weakref.finalize(self, os.close, fd)
        self.view = _map(fd, size, mmap.PROT_READ)


def _map(fd: int, size: int, protection: int) -> memoryview:
    return memoryview(mmap.mmap(fd, max(1, size), flags=mmap.MAP_SHARED, prot=protection))[:size]


def _nameless_file() -> int:
    if hasattr(os, "memfd_create"):
        return os.memfd_create("tidegate-capture")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())
