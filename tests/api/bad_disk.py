"""A daemon whose disk a test controls (tests/support/bad_disk.c)."""
import ctypes
import mmap
import os
import tempfile

import pytest
from daemon import BIN, Daemon
from faults import sanitizer

LIBRARY = os.path.join(os.path.dirname(os.path.dirname(BIN)), "tests", "support", "bad-disk.so")


class Disk(ctypes.Structure):
    """struct bad_disk; each field is written by one aligned store."""
    _fields_ = [(name, ctypes.c_int64) for name in
                ("read_error", "write_error", "allocate_error", "read_us", "hang_reads", "hang_writes", "halve", "flip_reads",
                 "n_failed", "n_hung", "n_halved", "n_flipped", "n_reads", "n_writes")]

    def heal(self):
        for name, _ in self._fields_[:8]:
            setattr(self, name, 0)


class BadDiskDaemon(Daemon):
    """Keyword arguments that name a field of Disk hold from the start."""

    def __init__(self, *args, env=None, **more):
        if sanitizer() == "tsan":
            pytest.skip("TSan has to be the first library that is loaded")
        self.file = tempfile.NamedTemporaryFile(prefix="kvasir-bad-disk-")
        self.file.truncate(mmap.PAGESIZE)
        self.map = mmap.mmap(self.file.fileno(), mmap.PAGESIZE)
        self.disk = Disk.from_buffer(self.map)
        fields = {name for name, _ in Disk._fields_}
        for name in fields & set(more):
            setattr(self.disk, name, more.pop(name))
        env = {"LD_PRELOAD": LIBRARY, "BAD_DISK": self.file.name,
               "ASAN_OPTIONS": "verify_asan_link_order=0:" + os.environ.get("ASAN_OPTIONS", ""), **(env or {})}
        super().__init__(*args, env=env, **more)

    def stop(self):
        self.disk.heal()  # what hangs would keep it from ending
        return super().stop()
