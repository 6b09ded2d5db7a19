"""deploy/kvasir.service: what systemd says of it, and whether the daemon lives within its system call filter."""
import ctypes
import os
import platform
import re
import shutil
import struct
import subprocess

import httpx
import pytest

import daemon as daemon_module
from daemon import BIN, MODEL, ROOT, SLOW, Daemon
from wire import Wire

UNIT = os.path.join(ROOT, "deploy", "kvasir.service")
NUMBERS = f"/usr/include/{platform.machine()}-linux-gnu/asm/unistd_64.h"
EXPOSURE_BOUND = 1.5

needs_systemd = pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="systemd-analyze is not installed")


def settings(name):
    with open(UNIT) as f:
        return re.findall(rf"^{name}=(.*)$", f.read(), re.M)


@needs_systemd
def test_systemd_finds_nothing_wrong_with_the_unit(tmp_path):
    """As it is, but for the program's place: that must exist."""
    with open(UNIT) as f:
        text = f.read()
    assert text.count("/usr/local/bin/kvasir ") == 2
    (tmp_path / "kvasir.service").write_text(text.replace("/usr/local/bin/kvasir ", "/bin/true "))
    r = subprocess.run(["systemd-analyze", "verify", "--man=no", str(tmp_path / "kvasir.service")], capture_output=True, text=True)
    assert r.returncode == 0 and "kvasir.service" not in r.stderr, r.stderr


@needs_systemd
def test_the_unit_exposes_little():
    r = subprocess.run(["systemd-analyze", "security", "--offline=true", "--no-pager", UNIT], capture_output=True, text=True)
    level = re.search(r"Overall exposure level for kvasir.service: ([0-9.]+)", r.stdout)
    assert level, r.stdout + r.stderr
    assert float(level[1]) <= EXPOSURE_BOUND, r.stdout


def test_the_unit_stops_gracefully_and_can_reload():
    assert settings("Type") == ["notify"] and settings("ExecReload") == ["/bin/kill -HUP $MAINPID"]
    assert not settings("KillSignal"), "SIGTERM is what drains"
    shown = subprocess.run([BIN, "serve", "--print-config"], capture_output=True, text=True).stdout
    drain_s = float(re.search(r'"drain_timeout": ([0-9.]+)', shown)[1])
    assert float(settings("TimeoutStopSec")[0]) > drain_s + 4, "the drain, and a grace twice"


def filter_set(name, seen):
    """The system calls of a set of systemd, which may hold other sets."""
    out = subprocess.run(["systemd-analyze", "syscall-filter", name], capture_output=True, text=True, check=True).stdout
    calls = set()
    for word in (line.strip() for line in out.splitlines()[1:]):
        if word.startswith("@") and word not in seen:
            seen.add(word)
            calls |= filter_set(word, seen)
        elif word and word[0] not in "#@":
            calls.add(word)
    return calls


def allowed_numbers():
    with open(NUMBERS) as f:
        number = {m[1]: int(m[2]) for m in re.finditer(r"#define __NR_(\w+)\s+(\d+)", f.read())}
    allowed, first = set(), True
    for line in settings("SystemCallFilter"):
        assert first != line.startswith("~"), "a list of what is allowed, then lists of what is not"
        sets = set().union(*(filter_set(word, set()) for word in line.lstrip("~").split()))
        allowed = sets if first else allowed - sets
        first = False
    # systemd itself always lets a program be executed.
    return {number[c] for c in allowed | {"execve"} if c in number}


def seccomp_program(numbers):
    """struct sock_fprog's instructions: whoever calls anything else is killed, so that nothing goes unseen (seccomp(2))."""
    load, equal, give = 0x20, 0x15, 0x06
    kill, allow = 0x80000000, 0x7FFF0000
    code = [struct.pack("HBBI", load, 0, 0, 0)]
    for n in sorted(numbers):
        code += [struct.pack("HBBI", equal, 0, 1, n), struct.pack("HBBI", give, 0, 0, allow)]
    code.append(struct.pack("HBBI", give, 0, 0, kill))
    return code


class Fprog(ctypes.Structure):
    _fields_ = [("n", ctypes.c_ushort), ("code", ctypes.c_char_p)]


@needs_systemd
@pytest.mark.needs_model
@pytest.mark.skipif(platform.machine() != "x86_64" or not os.path.exists(NUMBERS), reason="the numbers of system calls are not known")
def test_the_daemon_lives_within_its_system_calls(monkeypatch):
    """All it does, from loading to draining, under the filter of the unit; a call outside of it would kill it."""
    code = seccomp_program(allowed_numbers())
    program = Fprog(len(code), b"".join(code))
    libc = ctypes.CDLL(None, use_errno=True)
    start = subprocess.Popen

    def confine():
        assert libc.prctl(38, 1, 0, 0, 0) == 0  # PR_SET_NO_NEW_PRIVS
        assert libc.prctl(22, 2, ctypes.byref(program)) == 0  # PR_SET_SECCOMP, SECCOMP_MODE_FILTER

    monkeypatch.setattr(daemon_module.subprocess, "Popen", lambda *a, **k: start(*a, preexec_fn=confine, **k))
    with Daemon("--kv-memory", "128M") as d:
        with open(f"/proc/{d.process.pid}/status") as f:
            assert "Seccomp:\t2\n" in f.read()
        with httpx.Client(base_url=d.url, timeout=60 * SLOW) as c:
            assert c.post("/v1/completions", json={"prompt": "x", "max_tokens": 4}).status_code == 200
            assert c.get("/metrics").status_code == 200 and c.get("/").status_code == 200
            with c.stream("POST", "/v1/chat/completions", json={"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4,
                                                                "stream": True}) as r:
                assert list(r.iter_lines())[-2:]
        with Wire(d) as w:
            assert w.ask("hi", max_output_tokens=4)[1]
        assert httpx.post(d.url + "/v1/sessions", json={"id": "s"}).status_code < 300
    confined = start([BIN, "serve", "--model", MODEL, "--host", "no-such-name.invalid"], preexec_fn=confine,
                     stderr=subprocess.PIPE, text=True)
    assert "no-such-name" in confined.communicate(timeout=60 * SLOW)[1] and confined.returncode == 1
