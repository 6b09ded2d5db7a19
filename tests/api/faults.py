"""A daemon whose memory and wall clock a test controls (tests/support/fault.c), and a tiny model that answers at once."""
import ctypes
import functools
import mmap
import os
import subprocess
import sys
import tempfile
import time

import pytest
from daemon import BIN, ROOT, SLOW, Daemon, eventually

LIBRARY = os.environ.get("KVASIR_FAULT", os.path.join(os.path.dirname(os.path.dirname(BIN)), "tests", "support", "fault.so"))


class Control(ctypes.Structure):
    """struct fault_control; each field is written by one aligned store."""
    _fields_ = [(name, ctypes.c_int64) for name in ("fail_at", "fail_for", "one_in", "fired", "seen", "live", "shift_s", "shifted")]


@functools.cache
def sanitizer():
    """Which sanitizer the program was built with, by the library that it loads: "asan", "tsan" or None."""
    libraries = subprocess.run(["ldd", BIN], capture_output=True, text=True).stdout
    return next((s for s in ("asan", "tsan") if f"lib{s}." in libraries), None)


def need_library():
    if not os.path.exists(LIBRARY):
        pytest.skip(f"{LIBRARY} is not built")
    if sanitizer() == "tsan":
        pytest.skip("TSan cannot start with another allocator before its own")


def tiny_model(folder):
    """One layer of random weights with a chat template: a token takes a fraction of a millisecond."""
    path = os.path.join(folder, "tiny.gguf")
    subprocess.run([sys.executable, os.path.join(ROOT, "tests", "tools", "make_model.py"), "--layers", "1", "--ctx", "2048",
                    "--chat-template", "chatml", "--tied", path], check=True, stdout=subprocess.DEVNULL)
    return path


class FaultyDaemon(Daemon):
    def __init__(self, *args, env=None, fail_at=0, **more):
        """fail_at: as arm() has it, from the start of the program."""
        self.file = tempfile.NamedTemporaryFile(prefix="kvasir-fault-")
        self.file.truncate(mmap.PAGESIZE)
        self.map = mmap.mmap(self.file.fileno(), mmap.PAGESIZE)
        self.control = Control.from_buffer(self.map)
        self.control.fail_at = fail_at
        self.trace = tempfile.NamedTemporaryFile("r", prefix="kvasir-fault-trace-")
        options = os.environ.get("ASAN_OPTIONS", "")
        # What the dynamic linker keeps for good, which LSan knows about only when nothing stands before its malloc.
        self.suppressions = tempfile.NamedTemporaryFile("w", prefix="kvasir-lsan-")
        self.suppressions.write("leak:_dl_map_object_deps\n")
        self.suppressions.flush()
        env = {"LD_PRELOAD": LIBRARY, "FAULT_CONTROL": self.file.name, "FAULT_TRACE": self.trace.name,
               "ASAN_OPTIONS": f"verify_asan_link_order=0:{options}",
               "LSAN_OPTIONS": f"suppressions={self.suppressions.name}:print_suppressions=0", **(env or {})}
        super().__init__(*args, env=env, **more)
        eventually(lambda: self.control.seen > 0, 5, "the library is loaded")

    def arm(self, n, span=1):
        """The n-th allocation from now fails, and those after it up to `span` in all."""
        open(self.trace.name, "w").close()
        self.control.fired = 0
        self.control.fail_for = span - 1
        self.control.fail_at = n

    def disarm(self):
        """How many failed."""
        self.control.fail_at = 0
        self.control.fail_for = 0
        self.control.one_in = 0
        return self.control.fired

    def live(self, at_most=None):
        """Blocks that are allocated once all is quiet, or once they are no more than `at_most`."""
        deadline = time.monotonic() + 0.25 * SLOW
        least = self.control.live
        while time.monotonic() < deadline and (at_most is None or least > at_most):
            time.sleep(0.002)
            least = min(least, self.control.live)
        return least

    def where(self):
        """Where the allocations that failed last were asked for: file and line where the program has debug information."""
        self.trace.seek(0)
        lines = []
        for line in self.trace.read().splitlines():
            if line.startswith(BIN + "(+"):
                address = line[len(BIN) + 2:line.index(")")]
                line = subprocess.run(["addr2line", "-fse", BIN, address], capture_output=True, text=True).stdout.replace("\n", " ")
            lines.append("  " + line)
        return "\n".join(lines[:12])

    def wait_same(self, pages, files):
        """What a quiet daemon holds: all pages can be had, no session, no descriptor more, and the books agree."""
        eventually(lambda: self.idle() and self.pages() == pages, 5, f"all {pages} pages are back")
        eventually(lambda: self.metrics()["kvasir:sessions"] == 0, 5, "no session is left")
        eventually(lambda: self.n_files() <= files, 5, f"no more than {files} descriptors are open")
        assert self.kv()["drift_pages"] == 0
