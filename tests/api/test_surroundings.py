"""What happens around a daemon: standard streams that are closed, full or not read, a wall clock that jumps, and floods."""
import asyncio
import http.client
import json
import os
import subprocess
import threading
import time

import httpx
import pytest
from daemon import BIN, DEVICE, SLOW, Daemon, eventually, free_port
from faults import FaultyDaemon, need_library, sanitizer, tiny_model
from wire import Wire

TEN_YEARS = 10 * 365 * 86400
HI = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3, "temperature": 0}

pytestmark = pytest.mark.no_model


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return tiny_model(str(tmp_path_factory.mktemp("tiny")))


class Started(Daemon):
    """A daemon whose standard streams are as the test says."""

    def __init__(self, model, **streams):
        self.headers = {}
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        clean = {k: v for k, v in os.environ.items() if not k.startswith("KVASIR_")}
        self.process = subprocess.Popen([BIN, "serve", "--model", model, "--port", str(self.port), "--device", DEVICE], env=clean,
                                        **{"stdin": subprocess.DEVNULL, **streams})
        self.wait_ready()

    def stderr(self):
        return "(not kept)"

    def works(self, n=5):
        for _ in range(n):
            assert httpx.post(self.url + "/v1/chat/completions", json=HI, timeout=60 * SLOW).status_code == 200
            assert httpx.post(self.url + "/v1/chat/completions", json={}, timeout=60 * SLOW).status_code == 400


# ---- Standard streams ----

@pytest.mark.parametrize("closed", [(1,), (2,), (0, 1, 2)], ids=str)
def test_streams_that_are_closed_from_the_start(tiny, closed):
    """Else the first socket would be "standard error", and a client would read the log."""
    def close():
        for fd in closed:
            os.close(fd)
    with Started(tiny, preexec_fn=close, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as d:
        d.works()
        for fd in closed:
            assert os.readlink(f"/proc/{d.process.pid}/fd/{fd}") == "/dev/null"


def test_streams_whose_reader_leaves(tiny):
    with Started(tiny, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as d:
        d.works(1)
        d.process.stdout.close()
        d.process.stderr.close()
        d.works()
        assert d.metrics()["kvasir:log_lines_lost_total"] >= 5


def test_streams_on_a_full_disk(tiny):
    with open("/dev/full", "w") as full, Started(tiny, stdout=full, stderr=full) as d:
        d.works()
        assert d.metrics()["kvasir:log_lines_lost_total"] >= 5


def test_a_log_whose_reader_sleeps_holds_nothing_up(tiny):
    with Started(tiny, stderr=subprocess.PIPE) as d:
        with httpx.Client(base_url=d.url, timeout=60 * SLOW) as c:
            def full():
                for _ in range(200):
                    assert c.post("/v1/chat/completions", json={}).status_code == 400
                return d.metrics()["kvasir:log_lines_lost_total"] > 0
            eventually(full, 60, "the pipe is full")
            d.works()
            # Once somebody reads again, it is said what is missing.
            lines = []
            reader = threading.Thread(target=lambda: lines.extend(d.process.stderr), daemon=True)
            reader.start()
            eventually(lambda: c.post("/v1/chat/completions", json={}) and any(b"lines before this one were lost" in x for x in lines),
                       20, "the log tells of the lines that it lacks")
        d.stop()
        reader.join(10)


# ---- The wall clock ----

@pytest.fixture(scope="module")
def shifted(tiny):
    need_library()
    with FaultyDaemon("--session-heartbeat", "1h", "--session-ttl", "1h", "--session-gc", "100ms", "--request-timeout", "60s", "--idle-timeout", "60s",
                      "--ws-ping-interval", "500ms", "--ws-ping-timeout", "20s", model=tiny) as d:
        yield d


@pytest.mark.parametrize("years", [10, -10])
def test_a_clock_that_jumps_moves_timestamps_only(shifted, years):
    d = shifted
    jump = years // 10 * TEN_YEARS
    with httpx.Client(base_url=d.url, timeout=60 * SLOW) as c, Wire(d) as w:
        try:
            session = c.post("/v1/sessions", json={}).json()
            w.ask("Hi", max_output_tokens=3)
            begun = time.monotonic()
            with c.stream("POST", "/v1/completions", json={"prompt": "a", "max_tokens": 1500, "ignore_eos": True, "stream": True}) as r:
                lines = r.iter_lines()
                next(lines)
                d.control.shift_s = jump
                rest = [line for line in lines if line]
            assert rest[-1] == "data: [DONE]" and '"finish_reason":"length"' in rest[-2]
            time.sleep(1.2)  # pings and collections come in between
            now = c.get(f"/v1/sessions/{session['id']}").json()
            assert now["expires_in"] > 3500 and now["age"] < 60 * SLOW
            created = c.post("/v1/chat/completions", json=HI).json()["created"]
            assert abs(created - time.time() - jump) < 60 * SLOW
            assert c.get("/health/live").headers["date"].split()[3] in (time.strftime("%Y", time.gmtime(time.time() + jump + s))
                                                                       for s in (-60, 60))
            final, _ = w.ask("Hi", max_output_tokens=3)
            assert final["type"] in ("response.completed", "response.incomplete")
            d.control.shift_s = 0
            assert c.get(f"/v1/sessions/{session['id']}").status_code == 200
            # One that does end, ends by the time that has passed.
            c.post("/v1/sessions", json={"id": "short", "heartbeat_timeout": 2})
            d.control.shift_s = jump
            assert c.get("/v1/sessions/short").status_code == 200
            eventually(lambda: c.get("/v1/sessions/short").status_code == 404, 20, "the session ends by its heartbeat timeout")
            assert time.monotonic() - begun < 120 * SLOW
            assert d.control.shifted > 0, "the daemon has seen the jump"
        finally:
            d.control.shift_s = 0
        c.delete(f"/v1/sessions/{session['id']}")


# ---- Floods ----

def test_a_flood_of_sessions_is_refused_and_costs_nothing(tiny):
    with Daemon("--max-sessions", 100, "--session-heartbeat", "1h", "--session-ttl", "1h", "--log-level", "warn", model=tiny) as d:
        def post(c, body=b"{}"):
            c.request("POST", "/v1/sessions", body, {"content-type": "application/json"})
            r = c.getresponse()
            return r, r.read()
        counts, lock = {}, threading.Lock()

        def flood(n):
            c = http.client.HTTPConnection("127.0.0.1", d.port, timeout=60 * SLOW)
            mine = {}
            for _ in range(n):
                r, body = post(c)
                mine[r.status] = mine.get(r.status, 0) + 1
                if r.status == 429:
                    assert int(r.headers["retry-after"]) >= 1
                    assert json.loads(body)["error"]["type"] == "rate_limit_error"
            c.close()
            with lock:
                for status, k in mine.items():
                    counts[status] = counts.get(status, 0) + k
        flood(200)  # the first ones, and what a warm daemon holds
        before = d.rss_bytes()
        threads = [threading.Thread(target=flood, args=(2450,)) for _ in range(4)]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
        assert sum(counts.values()) == 10000 and set(counts) == {200, 429} and counts[200] == 100, counts
        if not sanitizer():  # ASan keeps what is freed for a while
            assert d.rss_bytes() <= before + (4 << 20)
        assert d.metrics()["kvasir:sessions"] == 100
        ids = [s["id"] for s in httpx.get(d.url + "/v1/sessions", params={"limit": 1000}).json()["data"]]
        assert len(ids) == 100
        for i in ids:
            httpx.delete(d.url + f"/v1/sessions/{i}")
        assert httpx.post(d.url + "/v1/sessions", json={}).status_code == 200


def test_a_full_queue_refuses_at_once_and_says_when_to_come_again(tiny):
    """Over every wire: a real 429, before a stream begins; and what has found a place keeps it."""
    kinds = [("/v1/completions", {"prompt": "a", "max_tokens": 1900, "ignore_eos": True}),
             ("/v1/completions", {"prompt": "a", "max_tokens": 1900, "ignore_eos": True, "stream": True, "stream_options": {"include_usage": True}}),
             ("/v1/chat/completions", {**HI, "max_tokens": 1900, "ignore_eos": True}),
             ("/v1/responses", {"input": "Hi", "max_output_tokens": 1900, "ignore_eos": True})]

    async def all_at_once(url):
        async with httpx.AsyncClient(base_url=url, timeout=120 * SLOW) as c:
            return await asyncio.gather(*(c.post(path, json=body) for path, body in kinds * 10))
    with Daemon("--max-running", 1, "--max-queue", 2, model=tiny) as d, Wire(d) as w:
        for i in range(10):
            w.send("Hi", stream_id=f"lane{i}", max_output_tokens=200, ignore_eos=True)
        answers = asyncio.run(all_at_once(d.url))
        refused, served = [r for r in answers if r.status_code == 429], [r for r in answers if r.status_code == 200]
        assert len(refused) + len(served) == len(answers) and len({r.request.url.path for r in refused}) == 3, [r.status_code for r in answers]
        for r in refused:
            assert int(r.headers["retry-after"]) >= 1 and r.headers["content-type"].startswith("application/json")
            assert r.json()["error"]["type"] == "rate_limit_error" and r.json()["error"]["code"] == "rate_limit_exceeded", r.text
        for r in served:
            assert '"completion_tokens":1900' in r.text or '"output_tokens":1900' in r.text, r.text[-300:]
        ends = [e for _ in range(10) for e in w.events()]
        ends = [e for e in ends if e["type"] in ("error", "response.completed", "response.incomplete")]
        told = [e for e in ends if e["type"] == "error"]
        assert len(ends) == 10 and told and all(e["status"] == 429 and e["stream_id"] for e in told)
        assert httpx.post(d.url + "/v1/chat/completions", json=HI, timeout=60 * SLOW).status_code == 200
