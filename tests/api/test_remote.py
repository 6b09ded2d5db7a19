"""Daemons behind a balancer share KV by a Redis server: one finds what another has computed; and a server that dies harms nobody."""
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time

import httpx
import pytest

from daemon import SLOW, Daemon, eventually, free_port

SERVER = shutil.which("valkey-server") or shutil.which("redis-server")
pytestmark = pytest.mark.skipif(not SERVER, reason="neither valkey-server nor redis-server is installed")

PAGE = 368640  # of SmolLM2-135M in f16: 30 layers, 3 KV heads of 64
POOL = ("--kv-memory", 120 * PAGE, "--context", 1500)


class Store:
    def __init__(self):
        self.port = free_port()
        self.dir = tempfile.mkdtemp(prefix="kvasir-redis-")
        self.start()

    def start(self):
        self.process = subprocess.Popen([SERVER, "--port", str(self.port), "--save", "", "--dir", self.dir, "--bind", "127.0.0.1"],
                                        stdout=subprocess.DEVNULL)
        eventually(self.up, 10, "the Redis server is up")

    def up(self):
        try:
            return self.ask("PING").startswith(b"+PONG")
        except OSError:
            return False

    def ask(self, *words):
        with socket.create_connection(("127.0.0.1", self.port), timeout=5) as s:
            words = [w if isinstance(w, bytes) else str(w).encode() for w in words]
            s.sendall(b"*%d\r\n" % len(words) + b"".join(b"$%d\r\n%s\r\n" % (len(w), w) for w in words))
            return s.recv(1 << 20)

    def keys(self):
        return [w for w in self.ask("KEYS", "kv:*").split(b"\r\n") if w.startswith(b"kv:")]

    def close(self):
        self.process.kill()
        self.process.wait()
        shutil.rmtree(self.dir, ignore_errors=True)


@pytest.fixture
def store():
    s = Store()
    yield s
    s.close()


def remote(s, *more):
    return (*POOL, "--kv-remote", f"127.0.0.1:{s.port}", *more)


def prompt(seed, words):
    return " ".join(f"{seed} tells {i} of {i * 7919 % 1000} tales." for i in range(words))


def complete(d, text, n=4):
    begun = time.monotonic()
    r = httpx.post(d.url + "/v1/completions", json={"prompt": text, "max_tokens": n, "temperature": 0}, timeout=120 * SLOW)
    assert r.status_code == 200, r.text
    j = r.json()
    found = (j["usage"].get("prompt_tokens_details") or {}).get("cached_tokens", 0)
    return j["choices"][0]["text"], j["usage"]["prompt_tokens"], found, time.monotonic() - begun


def tier(d):
    return next(t for t in d.kv()["tiers"] if t["kind"] == "remote")


def settled(d):
    return eventually(lambda: (lambda t: t if t["writing"] == 0 and t["loading"] == 0 and t["stored"] else None)(tier(d)), 20, "all is stored")


def test_one_finds_what_another_has_computed(store):
    text = prompt("mine", 80)
    with Daemon(*remote(store)) as a, Daemon(*remote(store)) as b:
        first, n, found, cold = complete(a, text)
        assert found == 0
        settled(a)
        again, _, found, warm = complete(b, text)
        assert again == first
        # A server that is slow to take pages gets less than all of them, and sanitizers slow down what moves them, not what computes.
        assert SLOW > 1 or (len(store.keys()) >= n // 16 and found > n // 2 and warm < cold)
        # What nobody has is asked for once, not page by page.
        absent = tier(b)["loads"]["absent"]
        complete(b, prompt("new", 60))
        assert tier(b)["loads"]["absent"] - absent <= 2
        for d in (a, b):
            kv = d.kv()
            assert kv["drift_pages"] == 0 and kv["fetches"]["under_way"] == 0
    # Another model's pages, here another backend's, have other keys.
    with Daemon(*remote(store), "--device", "cpu-reference") as c:
        assert complete(c, prompt("mine", 2))[2] == 0  # a page and a bit: that backend takes its time


def test_a_value_that_is_not_the_page_is_not_used(store):
    text = prompt("mine", 40)
    with Daemon(*remote(store, "--transfer-key", "0123456789abcdef-of-both")) as a:
        first, n, _, _ = complete(a, text)
        settled(a)
    for key in store.keys():
        store.ask("SETRANGE", key, 5000, b"wrong")
    with Daemon(*remote(store, "--transfer-key", "0123456789abcdef-of-both")) as b:
        again, _, found, _ = complete(b, text)
        assert again == first and found == 0 and tier(b)["loads"]["corrupt"] >= 1
    store.ask("FLUSHALL")
    with Daemon(*remote(store, "--transfer-key", "0123456789abcdef-of-both")) as a:
        complete(a, text)
        settled(a)
    # Whole, but by somebody who does not have the secret.
    with Daemon(*remote(store, "--transfer-key", "another-secret-of-theirs")) as b:
        again, _, found, _ = complete(b, text)
        assert again == first and found == 0 and tier(b)["loads"]["corrupt"] >= 1


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_server_that_dies_or_hangs_harms_nobody(store, how):
    with Daemon(*remote(store)) as d:
        first, n, _, cold = complete(d, prompt("mine", 40))
        settled(d)
        os.kill(store.process.pid, how)
        for i in range(3):
            _, _, _, took = complete(d, prompt(f"other{i}", 40))
            assert took < cold * 3 + 2 * SLOW, "nobody waits for long"
        t = eventually(lambda: (lambda t: t if t["state"] == "off" else None)(tier(d)), 10, "the tier is off")
        assert t["writing"] == 0 or how == signal.SIGSTOP
        # One line for each time; a busy machine may have lost it before.
        assert d.stderr().count("event=kv_remote_off") == tier(d)["reconnects"] + 1
        assert d.kv()["drift_pages"] == 0


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_server_that_returns_is_used_again(store, how):
    with Daemon(*remote(store)) as d:
        text = prompt("mine", 40)
        first, n, _, _ = complete(d, text)
        settled(d)
        os.kill(store.process.pid, how)
        complete(d, prompt("other", 40))
        eventually(lambda: tier(d)["state"] == "off", 10, "the tier is off")
        if how == signal.SIGSTOP:
            os.kill(store.process.pid, signal.SIGCONT)
        else:
            store.process.wait()
            store.start()
        t = eventually(lambda: (lambda t: t if t["state"] == "on" else None)(tier(d)), 20 * SLOW, "the tier is on again")
        assert t["reconnects"] >= 1 and t["off_reason"] == ""
        # It is of use: what is computed from now on is there for others.
        text = prompt("new", 40)
        first, n, _, _ = complete(d, text)
        settled(d)
        with Daemon(*remote(store)) as b:
            again, _, found, _ = complete(b, text)
            assert again == first and found >= n - 32
        # One line for each change; a busy machine may see more of them.
        assert d.stderr().count("event=kv_remote_off") == d.stderr().count("event=kv_remote_on") == tier(d)["reconnects"]
        assert d.kv()["drift_pages"] == 0


def test_no_server_is_no_reason_not_to_serve(store):
    store.process.kill()
    store.process.wait()
    with Daemon(*remote(store)) as d:
        complete(d, "Hello")
        assert tier(d)["state"] == "off" and "cannot be reached" in tier(d)["off_reason"]
        # And one that comes later is found.
        store.start()
        eventually(lambda: tier(d)["state"] == "on", 20 * SLOW, "the tier is on")
        complete(d, prompt("mine", 30))
        settled(d)
        assert d.stderr().count("event=kv_remote_off") == 1
