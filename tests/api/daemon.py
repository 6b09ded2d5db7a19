"""A running daemon for tests, and what can be read about it from outside.

KVASIR_BIN names the program, KVASIR_TEST_MODEL the model file, KVASIR_TEST_SLOW how many times slower than a release build this
one may be (sanitizers), KVASIR_TEST_DEVICE the device (default: cpu). Tests that are LONG want KVASIR_FULL=yes.
"""
import os
import re
import signal
import socket
import subprocess
import tempfile
import time

import httpx
import pytest

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
BIN = os.environ.get("KVASIR_BIN", os.path.join(ROOT, "build", "server", "kvasir"))
MODEL = os.environ.get("KVASIR_TEST_MODEL", "")
SLOW = float(os.environ.get("KVASIR_TEST_SLOW", "1"))
DEVICE = os.environ.get("KVASIR_TEST_DEVICE", "cpu")
FULL = os.environ.get("KVASIR_FULL") == "yes"
LONG = pytest.mark.skipif(not FULL, reason="long; KVASIR_FULL=yes")


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def child_of(pid):
    """The one child of a process, as a command that runs another one has it."""
    with open(f"/proc/{pid}/task/{pid}/children") as f:
        return int(f.read())


def eventually(check, seconds, what):
    """Polls until check() is true; the clock is the only judge, so a slow machine waits longer but is not told otherwise."""
    deadline = time.monotonic() + seconds * SLOW
    while True:
        value = check()
        if value:
            return value
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {seconds * SLOW:g} s: {what}; last seen: {value!r}")
        time.sleep(0.02)


class Daemon:
    """Starts `kvasir serve` on a free port; stop() ends it by SIGTERM and returns its exit status."""

    def __init__(self, *args, model=MODEL, wait=True, env=None, key=None, port=None, command=None):
        self.headers = {"authorization": f"Bearer {key}"} if key else {}  # of what is asked here
        self.port = port or free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.ws_url = f"ws://127.0.0.1:{self.port}/v1/responses"
        self.log = tempfile.NamedTemporaryFile("w+", prefix="kvasir-test-", suffix=".log")
        self.out = tempfile.NamedTemporaryFile("w+", prefix="kvasir-test-", suffix=".out")
        clean = {k: v for k, v in os.environ.items() if not k.startswith("KVASIR_")}
        command = command or ("serve", "--model", model, "--port", self.port, "--device", DEVICE, *args)
        self.process = subprocess.Popen(
            [BIN, *map(str, command)],
            stdin=subprocess.DEVNULL, stdout=self.out, stderr=self.log, env={**clean, **(env or {})})
        if wait:
            self.wait_ready()

    def wait_ready(self, seconds=60):
        def ready():
            if self.process.poll() is not None:
                raise AssertionError(f"the daemon ended with {self.process.returncode}:\n{self.stderr()}")
            try:
                return httpx.get(self.url + "/health/ready", timeout=5 * SLOW).status_code == 200
            except httpx.TransportError:
                return False
        try:
            eventually(ready, seconds, "the daemon is ready")
        except AssertionError:
            self.process.kill()
            raise

    def stderr(self):
        with open(self.log.name, errors="replace") as f:
            return f.read()

    def stdout(self):
        with open(self.out.name, errors="replace") as f:
            return f.read()

    def signal(self, number=signal.SIGTERM):
        self.process.send_signal(number)

    def wait(self, seconds=30):
        return self.process.wait(timeout=seconds * SLOW)

    def stop(self):
        if self.process.poll() is None:
            self.signal()
        try:
            return self.wait()
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            raise AssertionError("the daemon did not end after SIGTERM:\n" + self.stderr()) from None

    def __enter__(self):
        return self

    def __exit__(self, kind, *_):
        if kind is None:
            status = self.stop()
            assert status == 0, f"exit status {status}:\n{self.stderr()}"
        else:
            self.process.kill()
            self.process.wait()

    def metrics(self):
        """Every series without its histogram buckets, summed over labels: {"kvasir:kv_pages_free": 812.0, ...}"""
        text = httpx.get(self.url + "/metrics", headers=self.headers, timeout=10 * SLOW).text
        values = {}
        for name, value in re.findall(r"^([a-z_:]+)(?:\{[^}]*\})? (\S+)$", text, re.M):
            if not name.endswith("_bucket"):
                values[name] = values.get(name, 0) + float(value)
        return values

    def kv(self, **query):
        r = httpx.get(self.url + "/v1/kv", params=query, headers=self.headers, timeout=10 * SLOW)
        assert r.status_code == 200, r.text
        return r.json()

    def pages(self):
        """KV pages that new work can have: those nobody holds, and those that the prefix index alone keeps."""
        m = self.metrics()
        return m["kvasir:kv_pages_free"] + m["kvasir:kv_pages_cached"]

    def idle(self):
        m = self.metrics()
        return m["vllm:num_requests_running"] == 0 and m["vllm:num_requests_waiting"] == 0

    def wait_idle(self, seconds=5):
        eventually(self.idle, seconds, "nothing runs")

    def n_files(self):
        return len(os.listdir(f"/proc/{self.process.pid}/fd"))

    def rss_bytes(self):
        with open(f"/proc/{self.process.pid}/statm") as f:
            return int(f.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
