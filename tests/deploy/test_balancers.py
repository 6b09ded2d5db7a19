"""Two daemons behind the real HAProxy and nginx, as deploy/ configures them."""
import json
import subprocess
import threading
import time

import httpx
import pytest
import websockets

from balancer import KINDS, Balancer, configuration, program
from daemon import SLOW, Daemon, eventually
from wire import Wire

pytestmark = pytest.mark.needs_model
OPTIONS = ("--threads", 1, "--kv-memory", "128M", "--drain-timeout", "20s")


def require(kind):
    if not program(kind):
        pytest.skip(f"{kind} is not installed")


@pytest.fixture(scope="module")
def daemons():
    with Daemon(*OPTIONS, wait=False) as a, Daemon(*OPTIONS, wait=False) as b:
        for d in a, b:
            d.wait_ready()
        yield a, b


@pytest.fixture(scope="module", params=KINDS)
def front(request, daemons):
    require(request.param)
    with Balancer(request.param, daemons) as b:
        yield b


@pytest.mark.parametrize("kind", KINDS)
def test_the_configuration_is_valid_without_a_warning(kind, tmp_path):
    require(kind)
    command = configuration(kind, str(tmp_path), 1080, [1081, 1082])
    r = subprocess.run([*command, "-c" if kind == "haproxy" else "-t"], capture_output=True, text=True)
    assert r.returncode == 0, r.stdout + r.stderr
    assert "warn" not in (r.stdout + r.stderr).lower(), r.stdout + r.stderr


def test_a_session_stays_on_its_daemon(front, daemons):
    """Twelve sessions: every request of one meets its KV cache, and both daemons have some."""
    homes = []
    with httpx.Client(base_url=front.url, timeout=60 * SLOW) as c:
        for i in range(12):
            name = f"affinity-{front.port}-{i}"
            headers = {"x-session-token": name}
            assert c.post("/v1/sessions", json={"id": name}, headers=headers).status_code < 300
            for _ in range(2):
                r = c.post("/v1/completions", headers=headers, json={"prompt": f"The number {i} is the number. " * 8, "max_tokens": 1})
                assert r.status_code == 200, r.text
            assert r.json()["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
            found = [d for d in daemons if httpx.get(f"{d.url}/v1/sessions/{name}").status_code == 200]
            assert len(found) == 1
            homes.append(daemons.index(found[0]))
            assert c.delete(f"/v1/sessions/{name}", headers=headers).status_code < 300
    assert set(homes) == {0, 1}


def test_requests_without_a_session_use_both_daemons(front, daemons):
    before = [d.metrics()["kvasir:api_requests_total"] for d in daemons]
    for i in range(16):
        r = httpx.post(front.url + "/v1/completions", json={"prompt": "x", "max_tokens": 1}, timeout=60 * SLOW)
        assert r.status_code == 200
    assert all(d.metrics()["kvasir:api_requests_total"] > n for d, n in zip(daemons, before))


def test_a_stream_passes_as_it_is_made(front):
    """Each token leaves the balancer when it comes, not with the last one. Each is a whole word, so that none is held back for the next."""
    times = []
    with httpx.Client(base_url=front.url, timeout=60 * SLOW) as c:
        word = c.post("/tokenize", json={"content": " the"}).json()["tokens"]
        assert len(word) == 1
        with c.stream("POST", "/v1/completions", json={"prompt": "Once upon a time", "max_tokens": 60, "stream": True,
                                                       "logit_bias": {str(word[0]): 100}}) as r:
            assert r.headers["content-type"].startswith("text/event-stream")
            for line in r.iter_lines():
                if line.startswith("data: {"):
                    times.append(time.monotonic())
    assert len(times) >= 60
    whole = times[-1] - times[0]
    # Held back, they would come in one burst or two; a client that had to wait for a processor reads some of them together.
    assert sum(1 for a, b in zip(times, times[1:]) if b - a > whole / 600) > 10, [b - a for a, b in zip(times, times[1:])]
    assert whole > 0.02


def test_a_websocket_passes(front):
    with Wire(front) as w:
        event, text = w.ask("Say hello.", max_output_tokens=8)
        assert event["type"] in ("response.completed", "response.incomplete") and text
        event, _ = w.ask("Again.", previous_response_id=event["response"]["id"], max_output_tokens=4)
        assert event["response"]["usage"]["input_tokens_details"]["cached_tokens"] > 0


def test_a_body_of_a_megabyte_passes(front):
    r = httpx.post(front.url + "/v1/completions", timeout=60 * SLOW,
                   json={"prompt": "x", "max_tokens": 1, "metadata": {"padding": "y" * (1 << 20)}})
    assert r.status_code == 200, r.text


class Load:
    """Clients of several kinds that ask without a pause until told to stop, and what went wrong."""

    def __init__(self, front):
        self.front = front
        self.failed, self.n = [], {}
        self.stopping = threading.Event()
        self.lock = threading.Lock()
        kinds = {"kept alive": self.kept_alive, "fresh": self.fresh, "session": self.session, "stream": self.stream,
                 "large": self.large, "websocket": self.websocket}
        self.threads = [threading.Thread(target=self.loop, args=item) for item in kinds.items()]

    def loop(self, name, request):
        with httpx.Client(base_url=self.front.url, timeout=60 * SLOW) as client:
            while not self.stopping.is_set():
                try:
                    request(client)
                except (httpx.HTTPError, AssertionError, OSError, websockets.WebSocketException) as e:
                    with self.lock:
                        self.failed.append((name, round(time.monotonic() - self.start, 3), repr(e)))
                with self.lock:
                    self.n[name] = self.n.get(name, 0) + 1

    @staticmethod
    def ask(client, **more):
        r = client.post("/v1/completions", json={"prompt": "One, two, three", "max_tokens": 3, **more.pop("body", {})}, **more)
        assert r.status_code == 200, r.text
        assert r.json()["usage"]["completion_tokens"] > 0

    def kept_alive(self, client):
        self.ask(client)

    def fresh(self, _):
        with httpx.Client(base_url=self.front.url, timeout=60 * SLOW) as client:
            self.ask(client)

    def session(self, client):
        """Four conversations. A drained daemon takes its sessions along: the client makes them again, on another one."""
        for name in "abcd":
            headers = {"x-session-token": name}
            body = {"prompt": f"The story of {name}", "max_tokens": 3}
            r = client.post("/v1/completions", json=body, headers=headers)
            # Twice, if the drain begins between the session's making and its first use.
            for _ in range(2):
                if r.status_code == 404:
                    made = client.post("/v1/sessions", json={"id": name}, headers=headers)
                    assert made.status_code < 300, made.text
                    r = client.post("/v1/completions", json=body, headers=headers)
            assert r.status_code == 200, r.text

    def large(self, client):
        self.ask(client, body={"metadata": {"padding": "y" * 100_000}})

    def stream(self, client):
        lines = []
        with client.stream("POST", "/v1/completions", json={"prompt": "Once", "max_tokens": 30, "stream": True,
                                                            "ignore_eos": True}) as r:
            assert r.status_code == 200
            lines = [line for line in r.iter_lines() if line]
        assert lines[-1] == "data: [DONE]"
        assert json.loads(lines[-2][6:])["choices"][0]["finish_reason"] == "length", lines[-2]

    def websocket(self, _):
        """Asks until the server restarts, then goes on over a new connection. A turn that has begun must end."""
        with Wire(self.front) as w:
            while not self.stopping.is_set():
                began = False
                try:
                    w.send("Hello", max_output_tokens=4)
                    for event in w.events():
                        assert event["type"] != "error", event
                        began = True
                except websockets.ConnectionClosed as e:
                    assert not began and e.rcvd and e.rcvd.code == 1012, e
                    return

    def __enter__(self):
        self.start = time.monotonic()
        for t in self.threads:
            t.start()
        return self

    def __exit__(self, *_):
        self.stopping.set()
        for t in self.threads:
            t.join(90 * SLOW)


def takes_part(daemon):
    """A rolling restart goes on when the balancer has seen that the new daemon is there, not merely when it is."""
    before = daemon.metrics()["vllm:generation_tokens_total"]
    eventually(lambda: daemon.metrics()["vllm:generation_tokens_total"] > before + 20, 30, "the daemon has its share")


@pytest.mark.parametrize("kind", KINDS)
def test_a_drain_under_load_loses_nothing(kind):
    """Each of two daemons is drained, ends with 0, and comes back, while all kinds of clients go on without one failure."""
    require(kind)
    daemons = [Daemon(*OPTIONS, wait=False) for _ in range(2)]
    try:
        for d in daemons:
            d.wait_ready()
        with Balancer(kind, daemons) as front:
            with Load(front) as load:
                for i in range(2):
                    for d in daemons:
                        takes_part(d)
                    assert daemons[i].stop() == 0
                    time.sleep(0.5)
                    daemons[i] = Daemon(*OPTIONS, port=daemons[i].port)
                takes_part(daemons[1])
            assert load.failed == [], (load.n, len(load.failed), load.failed[:5], [l for l in front.stderr().splitlines() if "error" in l.lower() or " 50" in l][:12])
            # Its daemon was drained, so the WebSocket had to come back at least once.
            assert len(load.n) == len(load.threads) and all(n >= 2 for n in load.n.values()), load.n
    finally:
        for d in daemons:
            d.stop()
