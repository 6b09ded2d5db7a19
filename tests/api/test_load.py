"""Under load: many idle WebSockets, many streams, a long prefill. Slow, so only with KVASIR_FULL=yes (tests/run.sh --full).

Each test prints what it measured. Times depend on the machine; what is asserted is what the README promises.
"""
import asyncio
import json
import multiprocessing
import os
import resource
import selectors
import socket
import threading
import time

import httpx
import pytest

from daemon import LONG, SLOW, Daemon, eventually
from transport import PING, PONG, TEXT, frame, read_head

pytestmark = LONG
CHAT = "/v1/chat/completions"


def say(capsys, text):
    with capsys.disabled():
        print("\n    " + text)


def open_files(n):
    """Raises the limit of open files, or skips with what there is."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < n:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (n, n))
        except (ValueError, OSError):
            pytest.skip(f"{n} open files are needed and {hard} are allowed (ulimit -Hn)")
    elif soft < n:
        resource.setrlimit(resource.RLIMIT_NOFILE, (n, hard))


# ---- Idle WebSockets ----

def take_frame(got):
    """The first frame of what came: (opcode, payload, the rest), or None while it is not whole."""
    head = 2 if len(got) < 2 or got[1] < 126 else 4 if got[1] == 126 else 10
    if len(got) < head:
        return None
    n = got[1] if head == 2 else int.from_bytes(got[2:head], "big")
    return (got[0] & 15, got[head:head + n], got[head + n:]) if len(got) >= head + n else None


def hold(port, n, talkers, said, talk, stop, pings):
    """Opens n WebSockets and answers their pings until told to stop; on `talkers` of them has a turn when told to talk. A connection that
    closes is a failure."""
    s = selectors.DefaultSelector()
    upgrade = (b"GET /v1/responses HTTP/1.1\r\nHost: a\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
               b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n\r\n")
    turn = {"type": "response.create", "input": "Say hello.", "max_output_tokens": 4}
    all_of_them = []
    for _ in range(n):
        c = socket.create_connection(("127.0.0.1", port), timeout=60 * SLOW)
        c.sendall(upgrade)
        status, _, rest = read_head(c)
        if status != 101:
            said.put(-1000000)
            return
        c.setblocking(False)
        s.register(c, selectors.EVENT_READ, [rest])
        all_of_them.append(c)
    said.put(n)
    lost = completed = 0
    talked = False
    while not stop.is_set():
        if talk.is_set() and not talked:
            talked = True
            for c in all_of_them[::n // talkers][:talkers]:
                c.send(frame(TEXT, json.dumps(turn).encode()))
        for k, _ in s.select(0.2):
            data = k.fileobj.recv(65536)
            if not data:
                lost += 1
                s.unregister(k.fileobj)
                continue
            k.data[0] += data
            while (one := take_frame(k.data[0])):
                op, payload, k.data[0] = one
                if op == PING:
                    k.fileobj.send(frame(PONG, payload))
                    with pings.get_lock():
                        pings.value += 1
                elif op == TEXT and json.loads(payload)["type"] in ("response.completed", "response.incomplete"):
                    completed += 1
                    if completed == talkers:
                        said.put(completed)
    said.put(-lost)


def test_ten_thousand_idle_websockets(capsys):
    n, workers, talkers = 10000, 4, 10
    # One descriptor each, and some for those that are at work, if all but a few thousand are parked while the others come.
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    open_files(2 * n if hard < 3 * (n + 100) + 1024 else 3 * (n + 100) + 1024)
    said, talk, stop = multiprocessing.Queue(), multiprocessing.Event(), multiprocessing.Event()
    pings = multiprocessing.Value("l", 0)
    with Daemon("--context", 512, "--max-connections", n + 100, "--ws-ping-interval", "5s", "--ws-ping-timeout", "20s") as d:
        d.wait_idle()
        before, files = d.rss_bytes(), d.n_files()
        holders = [multiprocessing.Process(target=hold, args=(d.port, n // workers, talkers, said, talk, stop, pings)) for _ in range(workers)]
        for h in holders:
            h.start()
        try:
            assert sum(said.get(timeout=300 * SLOW) for _ in holders) == n
            assert d.metrics()["kvasir:websockets"] == n
            eventually(lambda: d.metrics()["kvasir:websockets_parked"] == n, 60, "all are parked")
            held, counted, held_files = d.rss_bytes(), d.metrics()["kvasir:client_bytes"], d.n_files()
            # Two rounds of pings are answered by all, the daemon still answers others, and nobody is lost.
            seen = pings.value
            eventually(lambda: pings.value >= seen + 2 * n, 60, "two rounds of pings")
            cpu = process_cpu(d.process.pid)
            start = time.monotonic()
            took = []
            for _ in range(100):
                t = time.monotonic()
                assert httpx.get(d.url + "/health/live", timeout=10 * SLOW).status_code == 200
                took.append(time.monotonic() - t)
                time.sleep(0.05)
            cpu = (process_cpu(d.process.pid) - cpu) / (time.monotonic() - start)
            talk.set()
            assert sum(said.get(timeout=120 * SLOW) for _ in holders) == workers * talkers
            eventually(lambda: d.metrics()["kvasir:websockets_parked"] == n, 60, "all are parked again")
            assert d.metrics()["kvasir:websockets"] == n
        finally:
            stop.set()
        lost = -sum(said.get(timeout=60 * SLOW) for _ in holders)
        for h in holders:
            h.join(30 * SLOW)
        eventually(lambda: d.metrics()["kvasir:websockets"] == 0, 30, "all have gone")
        each = (held - before) / n
        say(capsys, f"{n} idle WebSockets: {each / 1024:.1f} KiB resident each ({counted / n / 1024:.1f} counted), {held_files - files} descriptors, "
                    f"{100 * cpu:.1f}% of a core with a ping every 5 s, {pings.value} pings answered, slowest of 100 health checks "
                    f"{1e3 * max(took):.1f} ms, files {files} -> {d.n_files()}")
        assert lost == 0
        assert each < 12 * 1024
        assert held_files - files < n + 20
        assert d.n_files() <= files + 8  # these questions have connections too


def process_cpu(pid, tid=None):
    """Seconds of processor time of a process, or of one of its threads."""
    path = f"/proc/{pid}/stat" if tid is None else f"/proc/{pid}/task/{tid}/stat"
    with open(path) as f:
        fields = f.read().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


# ---- Streams ----

class Stream:
    """One streamed chat over a raw connection, read as it comes."""

    def __init__(self):
        self.text, self.done, self.finish, self.error = "", False, None, None

    async def run(self, port, body):
        data = json.dumps(body).encode()
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        try:
            writer.write(b"POST %s HTTP/1.1\r\nHost: a\r\nConnection: close\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
                         % (CHAT.encode(), len(data)) + data)
            head = await reader.readuntil(b"\r\n\r\n")
            if b" 200 " not in head[:15]:
                self.error = (head + await reader.read()).decode()
                return
            while line := await reader.readline():
                if line == b"data: [DONE]\n":
                    self.done = True
                elif line.startswith(b"data: {"):
                    chunk = json.loads(line[6:])
                    if "error" in chunk:
                        self.error = chunk["error"]
                        continue
                    choice = chunk["choices"][0]
                    self.text += choice["delta"].get("content") or ""
                    self.finish = choice["finish_reason"] or self.finish
        finally:
            writer.close()


def prompts(n):
    words = ["tea", "rain", "iron", "moss", "salt", "wind", "bread", "light", "stone", "river"]
    return [{"messages": [{"role": "user", "content": f"Say something about {words[i % 10]} number {i // 10 % 5}."}],
             "stream": True, "max_tokens": 12, "temperature": 0} for i in range(n)]


def test_a_thousand_streams_at_once(capsys):
    n = 1000
    open_files(2 * n + 200)
    # Pages for all would not fit: the queue and the cache have to do their work.
    with Daemon("--context", 512, "--max-running", 200, "--max-queue", 2 * n, "--kv-memory", "256M") as d:
        asked = prompts(n)
        alone = {}
        with httpx.Client(base_url=d.url, timeout=60 * SLOW) as http:
            for body in asked[:50]:
                r = http.post(CHAT, json={**body, "stream": False}).json()["choices"][0]
                alone[json.dumps(body)] = (r["message"]["content"], r["finish_reason"])
        before = d.rss_bytes()
        highest = [before]
        watching = True

        def watch():
            while watching:
                highest[0] = max(highest[0], d.rss_bytes())
                time.sleep(0.05)

        watcher = threading.Thread(target=watch)
        watcher.start()

        async def all_of_them():
            streams = [Stream() for _ in range(n)]
            await asyncio.gather(*(s.run(d.port, b) for s, b in zip(streams, asked)))
            return streams

        start = time.monotonic()
        streams = asyncio.run(all_of_them())
        took = time.monotonic() - start
        watching = False
        watcher.join()
        d.wait_idle()
        wrong = [s for s, b in zip(streams, asked) if not s.done or s.error or (s.text, s.finish) != alone[json.dumps(b)]]
        say(capsys, f"{n} streams at once: all in {took:.1f} s, resident {before >> 20} MiB -> {highest[0] >> 20} MiB at most")
        assert not wrong, (len(wrong), vars(wrong[0]))
        assert highest[0] - before < 160 << 20
        assert d.metrics()["kvasir:connections"] <= 1


def test_the_servers_share_of_a_step_with_200_streams(capsys):
    n = 200
    open_files(2 * n + 200)
    with Daemon("--context", 1024, "--max-running", n, "--kv-memory", "1G") as d:
        asked = [{**b, "max_tokens": 64, "ignore_eos": True} for b in prompts(n)]

        async def all_of_them():
            streams = [Stream() for _ in range(n)]
            work = asyncio.gather(*(s.run(d.port, b) for s, b in zip(streams, asked)))
            await asyncio.to_thread(eventually, lambda: all(s.text for s in streams), 120, "all decode")
            first = d.metrics(), process_cpu(d.process.pid, d.process.pid)
            await asyncio.to_thread(eventually, lambda: any(s.done for s in streams), 120, "the first ends")
            last = d.metrics(), process_cpu(d.process.pid, d.process.pid)
            await work
            return first, last

        first, last = asyncio.run(all_of_them())
        steps = last[0]["kvasir:steps_total"] - first[0]["kvasir:steps_total"]
        seconds = last[0]["kvasir:step_seconds_total"] - first[0]["kvasir:step_seconds_total"]
        rows = last[0]["kvasir:step_rows_total"] - first[0]["kvasir:step_rows_total"]
        share = (last[1] - first[1]) / seconds
        say(capsys, f"{n} streams: {steps:.0f} steps of {rows / steps:.0f} rows, {1e3 * seconds / steps:.1f} ms each; "
                    f"the loop thread took {100 * share:.1f}% of that")
        assert steps >= 10
        assert share < 0.05


# ---- Liveness ----

def test_liveness_while_a_long_prompt_is_computed(capsys):
    with Daemon("--context", 8192) as d:
        long = "word " * 7000
        running = True

        def prefill():
            with httpx.Client(base_url=d.url, timeout=120 * SLOW) as http:
                i = 0
                while running:
                    i += 1
                    http.post("/v1/completions", json={"prompt": f"{i} {long}", "max_tokens": 1, "cache_salt": str(i)})

        def ask():
            took = []
            with socket.create_connection(("127.0.0.1", d.port)) as s:
                s.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                for _ in range(1000):
                    start = time.monotonic()
                    s.sendall(b"GET /health/live HTTP/1.1\r\nHost: a\r\n\r\n")
                    got = b""
                    while b"}" not in got:
                        got += s.recv(4096)
                    took.append(time.monotonic() - start)
                    assert b" 200 " in got[:15]
                    time.sleep(0.005)
            return sorted(took)

        alone = ask()  # what the machine itself adds, with whatever else runs on it
        worker = threading.Thread(target=prefill)
        worker.start()
        try:
            eventually(lambda: not d.idle(), 30, "prefill runs")
            took = ask()
            assert not d.idle()
        finally:
            running = False
            worker.join()
        say(capsys, f"/health/live while prefill runs: median {1e3 * took[500]:.2f} ms, p99 {1e3 * took[990]:.2f} ms, "
                    f"slowest {1e3 * took[-1]:.2f} ms; on the idle daemon p99 {1e3 * alone[990]:.2f} ms")
        assert took[990] - alone[990] < 0.010 * SLOW
