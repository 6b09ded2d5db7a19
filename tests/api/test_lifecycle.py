"""Start, health, drain, and models that cannot be loaded."""
import json
import os
import signal
import subprocess
import threading
import time

import httpx
import pytest
import websockets

from daemon import BIN, MODEL, SLOW, Daemon, child_of, eventually, free_port
from wire import Wire


def serve(model, *args):
    clean = {k: v for k, v in os.environ.items() if not k.startswith("KVASIR_")}
    return subprocess.run([BIN, "serve", "--model", str(model), "--port", str(free_port()), *args], capture_output=True, text=True,
                          timeout=60 * SLOW, env=clean, stdin=subprocess.DEVNULL)


def test_the_block_at_the_start_names_what_runs(daemon):
    text = daemon.stdout()
    assert f"http://127.0.0.1:{daemon.port}" in text
    for word in ("ready", "model", os.path.basename(MODEL), "llama", "context", "8192", "threads" if os.cpu_count() > 1 else "thread", "KV cache"):
        assert word in text, word


def test_health_goes_from_loading_to_ready_and_never_back():
    d = Daemon(wait=False)
    try:
        seen = []

        def look():
            assert d.process.poll() is None
            try:
                live = httpx.get(d.url + "/health/live", timeout=5 * SLOW)
                ready = httpx.get(d.url + "/health/ready", timeout=5 * SLOW)
            except httpx.ConnectError:
                return False
            assert live.status_code == 200
            if not seen or seen[-1] != ready.status_code:
                seen.append(ready.status_code)
            if ready.status_code == 503:
                assert ready.headers["content-type"].startswith("application/json")
            return ready.status_code == 200
        eventually(look, 60, "it is ready")
        assert seen in ([503, 200], [200])
        assert httpx.get(d.url + "/health").status_code == 200
    finally:
        assert d.stop() == 0


def test_a_model_that_is_not_there_is_one_line_and_status_1(tmp_path):
    r = serve(tmp_path / "absent.gguf")
    assert r.returncode == 1 and r.stdout == ""
    assert len(r.stderr.splitlines()) == 1 and "absent.gguf" in r.stderr


BROKEN = ["empty", "text", "cut in the header", "cut in the tensors", "huge count"]


def broken_model(directory, kind):
    path = directory / "broken.gguf"
    with open(MODEL, "rb") as f:
        head = f.read(4 << 20)
    path.write_bytes({"empty": b"", "text": b"This is not a model.\n" * 100, "cut in the header": head[:5000],
                      "cut in the tensors": head, "huge count": head[:8] + b"\xff" * 16 + head[24:]}[kind])
    return str(path)


@pytest.mark.parametrize("kind", BROKEN)
def test_check_finds_a_broken_model(tmp_path, kind):
    r = serve(broken_model(tmp_path, kind), "--check")
    assert r.returncode == 1 and r.stdout == ""
    assert len(r.stderr.splitlines()) == 1 and "broken.gguf" in r.stderr, r.stderr


@pytest.mark.parametrize("kind", BROKEN)
def test_a_model_that_fails_to_load_leaves_the_daemon_alive_and_not_ready(tmp_path, kind):
    d = Daemon(model=broken_model(tmp_path, kind), wait=False)
    try:
        def failed():
            try:
                r = httpx.get(d.url + "/health/ready", timeout=5 * SLOW)
            except httpx.TransportError:
                return None
            return r if r.status_code != 503 or r.json()["status"] != "loading" else None
        ready = eventually(failed, 30, "loading is over")
        assert ready.status_code == 503 and ready.json()["status"] == "failed"
        assert "broken.gguf" in ready.json()["error"]["message"]
        assert httpx.get(d.url + "/health/live").status_code == 200
        assert "kvasir:ready" in httpx.get(d.url + "/metrics").text
        refused = httpx.post(d.url + "/v1/chat/completions", json={"messages": [{"role": "user", "content": "hi"}]})
        assert refused.status_code == 503 and "broken.gguf" in refused.json()["error"]["message"]
        with pytest.raises(websockets.InvalidStatus) as e:
            Wire(d)
        assert e.value.response.status_code == 503
        # Whatever else is asked gets an answer too.
        for method, path in [("GET", "/"), ("GET", "/v1/models"), ("POST", "/tokenize"), ("GET", "/v1/sessions"),
                             ("POST", "/v1/sessions"), ("DELETE", "/v1/sessions/x"), ("POST", "/v1/sessions/x/heartbeat")]:
            assert httpx.request(method, d.url + path, json={"content": "x"} if method == "POST" else None, timeout=5 * SLOW
                                 ).status_code < 600, path
        assert [line for line in d.stderr().splitlines() if "event=load" in line and "broken.gguf" in line]
        assert d.process.poll() is None
    finally:
        assert d.stop() == 0


def health(d, *args):
    clean = {k: v for k, v in os.environ.items() if not k.startswith("KVASIR_")}
    return subprocess.run([BIN, "health", *args], capture_output=True, text=True, timeout=30 * SLOW,
                          env={**clean, "KVASIR_PORT": str(d.port), "KVASIR_HOST": "0.0.0.0"})


def test_the_health_command_tells_the_states_apart(daemon, tmp_path):
    r = health(daemon)
    assert r.returncode == 0 and '"status":"ok"' in r.stdout and r.stderr == ""
    assert health(daemon, "--live").returncode == 0
    broken = Daemon(model=broken_model(tmp_path, "text"), wait=False)
    try:
        eventually(lambda: health(broken, "--live").returncode == 0, 20, "it lives")
        r = eventually(lambda: (lambda h: h if '"failed"' in h.stdout else None)(health(broken)), 20, "it has failed")
        assert r.returncode == 1 and "503" in r.stderr
    finally:
        assert broken.stop() == 0
    r = health(broken, "--live")
    assert r.returncode == 1 and "refused" in r.stderr and len(r.stderr.splitlines()) == 1


def test_the_health_command_does_not_wait_for_ever():
    import socket
    with socket.create_server(("127.0.0.1", 0)) as s:
        start = time.monotonic()
        r = subprocess.run([BIN, "health", "--host", "127.0.0.1", "--port", str(s.getsockname()[1]), "--timeout", "200ms"],
                           capture_output=True, text=True, timeout=30 * SLOW)
        assert r.returncode == 1 and "time is over" in r.stderr
        assert time.monotonic() - start < 5 * SLOW


def test_a_port_that_is_taken_is_one_line_and_status_1(daemon):
    r = subprocess.run([BIN, "serve", "--model", MODEL, "--port", str(daemon.port)], capture_output=True, text=True,
                       timeout=60 * SLOW, stdin=subprocess.DEVNULL)
    assert r.returncode == 1
    assert len(r.stderr.splitlines()) == 1 and str(daemon.port) in r.stderr


@pytest.mark.parametrize("args,words", [
    (["--prot", "1"], ["--prot", "--port"]),
    (["--threads", "many"], ["threads", "many", "whole number"]),
    (["--chat-template", "no-such"], ["no-such"]),
    (["--device", "abacus"], ["abacus"]),
    (["--device", "cuda:1023"], ["device"]),  # no build or machine has that many
])
def test_a_wrong_option_is_one_line_that_names_it(args, words):
    for check in ([], ["--check"]):
        r = serve(MODEL, *args, *check)
        assert r.returncode in (1, 2)
        assert len(r.stderr.splitlines()) == 1, r.stderr
        for word in words:
            assert word in r.stderr


@pytest.mark.parametrize("args,words", [
    (["--kv-policy", "newest"], ["kv-policy", "newest"]),
    (["--host", "300.1.1.1"], ["host", "300.1.1.1"]),
    (["--kv-memory", "1K"], ["kv-memory", "1024"]),
    (["--api-keys", '{"keys":[{"name":"a","key":"b","kv_memory":"lots"}]}'], ["keys[0].kv_memory"]),
    (["--chat-template", "FILE"], ["line 1"]),
    (["--kv-dtype", "q4"], ["kv-dtype", "q4"]), (["--kv-ram-dtype", "q4"], ["kv-ram-dtype", "q4"]),
    (["--kv-dtype", "int8", "--kv-ram-dtype", "int8"], ["kv-ram-dtype"]),
    (["--kv-remote", "nowhere"], ["kv-remote", "nowhere"]), (["--kv-remote", "nowhere:99999"], ["kv-remote"]),
    (["--cors-origin", "https://a.example/"], ["cors-origin", "https://a.example/"]), (["--cors-origin", "a\nb: c"], ["cors-origin"]),
    (["--api-key", "hush\n"], ["api-key"]), (["--api-keys", '{"keys":[{"name":"a","key":"hush "}]}'], ["keys[0].key"]),
], ids=lambda v: v[0])
def test_check_finds_what_would_go_wrong_later(tmp_path, args, words):
    template = tmp_path / "broken.jinja"
    template.write_text("{% if %}")
    r = serve(MODEL, *(str(template) if a == "FILE" else a for a in args), "--check")
    assert r.returncode == 1 and r.stdout == ""
    assert len(r.stderr.splitlines()) == 1, r.stderr
    for word in words:
        assert word in r.stderr


def test_check_and_print_config(tmp_path):
    path = tmp_path / "kvasir.json"
    path.write_text('{\n  "model": "%s",\n  "api_key": "sesame",\n  "kv_memory": "1G"\n}' % MODEL)
    good = subprocess.run([BIN, "serve", "--config", path, "--check"], capture_output=True, text=True)
    assert (good.returncode, good.stdout, good.stderr) == (0, "", "")
    shown = subprocess.run([BIN, "serve", "--config", path, "--print-config"], capture_output=True, text=True).stdout
    assert '"kv_memory": 1073741824' in shown and "sesame" not in shown
    path.write_text('{\n  "model": "x",\n  "port": "8080"\n}')
    bad = subprocess.run([BIN, "serve", "--config", path, "--check"], capture_output=True, text=True)
    assert bad.returncode == 1 and f"{path}:3" in bad.stderr


def test_sighup_reads_the_configuration_again(tmp_path):
    """What can change does, for connections that are open as well; a file with a mistake changes nothing."""
    path = tmp_path / "kvasir.json"

    def write(**options):
        path.write_text(json.dumps({"log_level": "info", "context": 512, **options}))

    def reload(d, until):
        n = d.stderr().count(until)
        d.signal(signal.SIGHUP)
        eventually(lambda: d.stderr().count(until) > n, 10, f"the log says {until!r}")
    write(max_body="1M", cors_origin="https://a.example")
    with Daemon("--config", path) as d, httpx.Client(base_url=d.url, timeout=60 * SLOW) as c:
        def allowed():
            return c.get("/v1/models", headers={"origin": "https://b.example"}).headers.get("access-control-allow-origin")

        def large():
            return c.post("/tokenize", json={"content": "x" * 2000}).status_code
        assert (allowed(), large()) == ("https://a.example", 200)
        write(max_body="1K", cors_origin="https://b.example", context=600)
        reload(d, "changes when the daemon is started again: context")
        assert "changed from now on: cors-origin, max-body" in d.stderr()
        assert (allowed(), large()) == ("https://b.example", 413)
        for text in ('{"max_body": "1M", "port": "x"}', '{"max_body": "1M"', ""):
            path.write_text(text)
            reload(d, "not read again and stays as it was: ")
            assert (allowed(), large()) == ("https://b.example", 413)
        path.unlink()
        reload(d, "kvasir.json: cannot be opened")
        assert d.process.poll() is None and allowed() == "https://b.example"
        write(log_level="warn", context=600)
        reload(d, "started again: context")
        n = len(d.stderr().splitlines())
        assert large() == 200 and len(d.stderr().splitlines()) == n


def stream(d, max_tokens, result):
    with httpx.Client(base_url=d.url, timeout=120 * SLOW) as c:
        with c.stream("POST", "/v1/completions", json={"prompt": "Once upon a time", "max_tokens": max_tokens, "stream": True,
                                                       "temperature": 0, "ignore_eos": True}) as r:
            for line in r.iter_lines():
                if line:
                    result.append(line)


@pytest.mark.quirk(41)
def test_a_drain_lets_a_stream_end_and_refuses_new_work():
    d = Daemon("--drain-timeout", "120s")
    lines = []
    job = threading.Thread(target=stream, args=(d, int(800 / SLOW), lines))
    with Wire(d) as idle:
        job.start()
        eventually(lambda: len(lines) > 1, 10, "the stream has begun")
        d.signal()
        eventually(lambda: httpx.get(d.url + "/health/ready").status_code == 503, 10, "readiness fails")
        assert httpx.get(d.url + "/health/live").status_code == 200
        refused = httpx.post(d.url + "/v1/completions", json={"prompt": "x", "max_tokens": 1})
        assert refused.status_code == 503
        assert int(refused.headers["retry-after"]) > 0
        assert refused.headers["connection"] == "close"
        assert set(refused.json()["error"]) == {"message", "type", "param", "code"}
        assert httpx.get(d.url + "/metrics").headers["connection"] == "close"
        with pytest.raises(websockets.InvalidStatus) as refusal:
            Wire(d)
        assert refusal.value.response.status_code == 503
        with pytest.raises(websockets.ConnectionClosed) as e:
            idle.event(10)
        assert e.value.rcvd.code == 1012
        assert job.is_alive(), "the stream was over too soon to tell"
        job.join(120 * SLOW)
        assert lines[-1] == "data: [DONE]"
        assert any('"finish_reason":"length"' in line for line in lines[-3:])
    assert d.wait() == 0


def test_a_websocket_ends_what_it_began_before_a_drain_closes_it():
    d = Daemon("--drain-timeout", "120s")
    with Wire(d) as busy:
        busy.send(type="response.create", input="Tell me a story.", max_output_tokens=int(200 / SLOW), temperature=0)
        while busy.event()["type"] != "response.output_text.delta":
            pass
        d.signal()
        eventually(lambda: httpx.get(d.url + "/health/ready").status_code == 503, 10, "readiness fails")
        busy.send(type="response.create", input="And another one.", stream_id="second")
        seen = []
        with pytest.raises(websockets.ConnectionClosed) as e:
            while True:
                seen.append(busy.event(60))
        assert seen[-1]["type"] in ("response.completed", "response.incomplete")
        refusal = next(event for event in seen if event["type"] == "error")
        assert refusal["status"] == 503 and refusal["stream_id"] == "second"
        assert e.value.rcvd.code == 1012
    assert d.wait() == 0


def test_a_connection_made_before_the_end_of_a_drain_is_answered():
    """What the kernel has accepted for us is not reset: its request, sent when nothing else is left, gets its 503."""
    import socket
    d = Daemon("--drain-timeout", 5)
    with socket.create_connection(("127.0.0.1", d.port), timeout=10 * SLOW) as s:
        d.signal()
        time.sleep(0.3)
        assert d.process.poll() is None
        s.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n{}")
        answer = b""
        while chunk := s.recv(4096):
            answer += chunk
    assert answer.startswith(b"HTTP/1.1 503 ")
    assert b"connection: close" in answer.lower() and b"retry-after:" in answer.lower()
    assert d.wait() == 0


def test_a_drain_ends_at_its_deadline():
    d = Daemon("--drain-timeout", 0.3)
    lines = []
    job = threading.Thread(target=stream, args=(d, 7000, lines))
    job.start()
    eventually(lambda: len(lines) > 1, 10, "the stream has begun")
    start = time.monotonic()
    d.signal(signal.SIGINT)
    assert d.wait() == 0
    assert time.monotonic() - start < 8 * SLOW
    job.join(10)
    assert not job.is_alive()
    assert "Traceback" not in d.stderr()


def test_a_second_signal_ends_it_at_once():
    d = Daemon("--drain-timeout", 60)
    lines = []

    def patient():
        try:
            stream(d, 7000, lines)
        except httpx.TransportError:
            pass
    job = threading.Thread(target=patient)
    job.start()
    eventually(lambda: len(lines) > 1, 10, "the stream has begun")
    d.signal()
    eventually(lambda: httpx.get(d.url + "/health/ready").status_code == 503, 10, "readiness fails")
    d.signal()
    # A shell shows both alike. (TSan delivers a signal late, so that a program that raises one has ended by itself before.)
    assert d.wait(10) in (-signal.SIGTERM, 128 + signal.SIGTERM)
    job.join(10)


@pytest.mark.skipif(subprocess.run(["unshare", "--pid", "--fork", "true"], capture_output=True).returncode != 0,
                    reason="unshare --pid is not allowed here")
def test_the_first_process_of_a_container_ends_on_the_second_signal_too():
    """As process 1 it has no default actions: an unhandled SIGTERM would be ignored."""
    port = free_port()
    clean = {k: v for k, v in os.environ.items() if not k.startswith("KVASIR_")}
    # unshare waits for process 1 and reports its status.
    p = subprocess.Popen(["unshare", "--pid", "--fork", "--kill-child", BIN, "serve", "--model", MODEL, "--port", str(port),
                          "--drain-timeout", "60"], env=clean, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        url = f"http://127.0.0.1:{port}"

        def ready():
            try:
                return httpx.get(url + "/health/ready").status_code == 200
            except httpx.TransportError:
                return False
        eventually(ready, 60, "it is ready")
        inner = child_of(p.pid)
        with httpx.stream("POST", url + "/v1/completions", timeout=60 * SLOW, json={
                "prompt": "Once", "max_tokens": 7000, "stream": True, "ignore_eos": True}) as r:
            lines = r.iter_lines()
            next(lines)
            os.kill(inner, signal.SIGTERM)
            eventually(lambda: httpx.get(url + "/health/ready").status_code == 503, 5, "readiness fails")
            os.kill(inner, signal.SIGTERM)
            assert p.wait(5 * SLOW) == 128 + signal.SIGTERM
    finally:
        p.kill()
        p.wait()


def test_an_idle_daemon_ends_at_once():
    d = Daemon()
    start = time.monotonic()
    assert d.stop() == 0
    assert time.monotonic() - start < 5 * SLOW


def test_a_service_manager_is_told(tmp_path):
    import socket
    path = str(tmp_path / "notify")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as s:
        s.bind(path)
        s.settimeout(30 * SLOW)
        d = Daemon(env={"NOTIFY_SOCKET": path})
        assert s.recv(1000) == b"READY=1"
        assert s.recv(1000) == b"STATUS=serving on port %d" % d.port
        d.signal()
        assert s.recv(1000) == b"STOPPING=1"
        assert s.recv(1000) == b"STATUS=draining"
        assert d.wait() == 0
        # Twice as often as the manager asks for; and a manager that does not read (its queue holds few) stops nothing.
        d = Daemon(env={"NOTIFY_SOCKET": path, "WATCHDOG_USEC": "100000"}, wait=False)
        said = []
        while said.count(b"WATCHDOG=1") < 10 or b"READY=1" not in said:
            said.append(s.recv(1000))
        time.sleep(1)
        assert httpx.get(d.url + "/health/live", timeout=5 * SLOW).status_code == 200
        assert d.stop() == 0
        s.setblocking(False)
        with pytest.raises(BlockingIOError):
            while True:
                s.recv(1000)
        s.settimeout(30 * SLOW)
        d = Daemon(model=broken_model(tmp_path, "text"), wait=False, env={"NOTIFY_SOCKET": path})
        said = s.recv(2000)
        assert said.startswith(b"STATUS=the model could not be loaded: ") and b"broken.gguf" in said
        assert d.stop() == 0


def test_each_request_leaves_one_line(daemon, http):
    before = len(daemon.stderr().splitlines())
    http.post("/v1/completions", json={"prompt": "Hi\nthere \"you\"", "max_tokens": 2})
    eventually(lambda: len(daemon.stderr().splitlines()) > before, 1, "a line in the log")
    line = daemon.stderr().splitlines()[-1]
    for word in ("time=", "level=info", "event=", "tokens"):
        assert word in line
