"""The transport without an engine (tests/support/echo_server.c), and a client for it that speaks in raw bytes.

KVASIR_ECHO names the program; by default it is looked for beside KVASIR_BIN.
"""
import base64
import importlib.util
import json
import os
import re
import signal
import socket
import struct
import subprocess
import tempfile

import pytest

from daemon import BIN, ROOT, SLOW

BUILD = os.path.dirname(os.path.dirname(BIN))
ECHO = os.environ.get("KVASIR_ECHO", os.path.join(BUILD, "tests", "support", "echo-server"))
GET = b"GET /health/live HTTP/1.1\r\nHost: a\r\n"
POST = b"POST /echo HTTP/1.1\r\nHost: a\r\n"
SHARED = os.environ.get("KVASIR_SHARED", os.path.join(os.path.dirname(ROOT), "shared"))


def load_probe():
    """The probe of the shared folder, as a module; skips the test when it is not there."""
    path = os.path.join(SHARED, "probes", "http_probe.py")
    if not os.path.exists(path):
        pytest.skip(f"{path} is not there")
    spec = importlib.util.spec_from_file_location("http_probe", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Echo:
    """Starts the echo server with options (bytes and milliseconds); stop() checks that it ends clean."""

    def __init__(self, wrap=(), **options):
        args = [a for k, v in options.items() for a in ("--" + k.replace("_", "-"), str(v))]
        if "port" not in options:
            args += ["--port", "0"]
        self.err = tempfile.TemporaryFile("w+")
        self.process = subprocess.Popen([*wrap, ECHO, *args], stdout=subprocess.PIPE, stderr=self.err, text=True)
        line = self.process.stdout.readline()
        found = re.match(r"listening on port (\d+)", line)
        if not found:
            self.process.wait()
            raise RuntimeError(line + self.stderr())
        self.port = int(found[1])

    def stderr(self):
        self.err.seek(0)
        return self.err.read()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.stop()

    def stop(self):
        """SIGTERM: drains, closes everything, frees everything (a sanitizer build says if not)."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        out, _ = self.process.communicate(timeout=30 * SLOW)
        assert self.process.returncode == 0, f"exit {self.process.returncode}: {out}{self.stderr()}"
        counts = re.search(r"ended: (\d+) of (\d+) exchanges, (\d+) of (\d+) websockets closed, loop closed", out)
        assert counts, out
        assert counts[1] == counts[2] and counts[3] == counts[4], out

    def connect(self, host="127.0.0.1", timeout=10, receive_buffer=None):
        s = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
        if receive_buffer:
            s.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        s.settimeout(timeout * SLOW)
        s.connect((host, self.port))
        return s

    def ask(self, data, **more):
        """Sends raw bytes and reads one answer: (status, headers, body)."""
        with self.connect(**more) as s:
            s.sendall(data)
            return read_answer(s)

    def get(self, path):
        return self.ask(b"GET " + path.encode() + b" HTTP/1.1\r\nHost: a\r\n\r\n")

    def stats(self):
        return json.loads(self.get("/stats")[2])

    def fds(self):
        return len(os.listdir(f"/proc/{self.process.pid}/fd"))

    def rss(self):
        with open(f"/proc/{self.process.pid}/statm") as f:
            return int(f.read().split()[1]) * 4096


def read_head(s, got=b""):
    """Reads up to the empty line: (status, headers, bytes read beyond it)."""
    while b"\r\n\r\n" not in got:
        data = s.recv(65536)
        if not data:
            raise ConnectionError(f"closed after {got!r}")
        got += data
    head, rest = got.split(b"\r\n\r\n", 1)
    lines = head.decode("latin-1").split("\r\n")
    headers = {}
    for line in lines[1:]:
        name, value = line.split(":", 1)
        headers[name.lower()] = value.strip()
    return int(lines[0].split()[1]), headers, rest


def read_chunks(s, rest=b""):
    """The chunks of a chunked body, and what came behind it."""
    chunks = []

    def more():
        nonlocal rest
        data = s.recv(65536)
        if not data:
            raise ConnectionError("closed inside a chunked body")
        rest += data

    while True:
        while b"\r\n" not in rest:
            more()
        size, rest = rest.split(b"\r\n", 1)
        n = int(size, 16)
        while len(rest) < n + 2:
            more()
        assert rest[n:n + 2] == b"\r\n"
        if n == 0:
            return chunks, rest[2:]
        chunks.append(rest[:n])
        rest = rest[n + 2:]


def read_answer(s, got=b"", method="GET"):
    """One final answer: (status, headers, body). Bytes of a next one are an error."""
    status, headers, rest = read_head(s, got)
    while status < 200:
        status, headers, rest = read_head(s, rest)
    if method == "HEAD":
        return status, headers, b""
    if headers.get("transfer-encoding") == "chunked":
        chunks, rest = read_chunks(s, rest)
        assert rest == b""
        return status, headers, b"".join(chunks)
    if "content-length" in headers:
        n = int(headers["content-length"])
        while len(rest) < n:
            data = s.recv(65536)
            if not data:
                raise ConnectionError(f"closed after {len(rest)} of {n} bytes")
            rest += data
        assert len(rest) == n, rest[n:]
        return status, headers, rest
    return status, headers, rest + read_to_end(s)[0]


def read_to_end(s):
    """All that comes: (bytes, how it ended: closed, reset or timeout)."""
    out = b""
    try:
        while True:
            data = s.recv(65536)
            if not data:
                return out, "closed"
            out += data
    except socket.timeout:
        return out, "timeout"
    except ConnectionError:
        return out, "reset"


def error_of(body):
    """The error object, which must have its four keys."""
    error = json.loads(body)["error"]
    assert set(error) == {"message", "type", "param", "code"}, error
    return error


def post(body, path=b"/echo", fields=b""):
    return b"POST %s HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n%s\r\n" % (path, len(body), fields) + body


class Ws:
    """A WebSocket client that can break the rules."""

    def __init__(self, echo, path="/v1/responses", fields="", first=b"", receive_buffer=None):
        self.s = echo.connect(receive_buffer=receive_buffer)
        key = base64.b64encode(os.urandom(16)).decode()
        self.s.sendall((f"GET {path} HTTP/1.1\r\nHost: a\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
                        f"Sec-WebSocket-Key: {key}\r\nSec-WebSocket-Version: 13\r\n{fields}\r\n").encode() + first)
        self.status, self.headers, self.rest = read_head(self.s)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.s.close()

    def send(self, op, data=b"", fin=True, mask=True, rsv=0):
        self.s.sendall(frame(op, data, fin, mask, rsv))

    def read(self, n):
        while len(self.rest) < n:
            data = self.s.recv(65536)
            if not data:
                raise ConnectionError(f"closed with {self.rest!r} unread")
            self.rest += data
        out, self.rest = self.rest[:n], self.rest[n:]
        return out

    def frame(self):
        """The next frame: (opcode, payload)."""
        first, n = self.read(2)
        assert first & 0x70 == 0 and n & 0x80 == 0
        if n == 126:
            n, = struct.unpack(">H", self.read(2))
        elif n == 127:
            n, = struct.unpack(">Q", self.read(8))
        assert first & 0x80
        return first & 0xF, self.read(n)

    def close_code(self):
        """The code of the close frame that comes next."""
        op, data = self.frame()
        assert op == 8, (op, data[:50])
        return struct.unpack(">H", data[:2])[0] if data else None

    def ended(self):
        """True when the server has closed the TCP connection."""
        return read_to_end(self.s)[1] != "timeout"


TEXT, BINARY, CLOSE, PING, PONG = 1, 2, 8, 9, 10


def frame(op, data=b"", fin=True, mask=True, rsv=0):
    n = len(data)
    m = 0x80 if mask else 0
    out = bytes([(0x80 if fin else 0) | rsv << 4 | op])
    out += bytes([m | n]) if n < 126 else bytes([m | 126]) + struct.pack(">H", n) if n < 65536 else \
        bytes([m | 127]) + struct.pack(">Q", n)
    if not mask:
        return out + data
    key = os.urandom(4)
    whole = int.from_bytes(data, "big") ^ int.from_bytes((key * (n // 4 + 1))[:n], "big")
    return out + key + whole.to_bytes(n, "big")


def close_frame(code, reason=b""):
    return struct.pack(">H", code) + reason

