"""Start, health, drain, and models that cannot be loaded."""
import os
import signal
import subprocess
import threading
import time

import httpx
import pytest
import websockets

from daemon import BIN, MODEL, SLOW, Daemon, eventually, free_port
from wire import Wire


def serve(model, *args):
    clean = {k: v for k, v in os.environ.items() if not k.startswith("KVASIR_")}
    return subprocess.run([BIN, "serve", "--model", str(model), "--port", str(free_port()), *args], capture_output=True, text=True,
                          timeout=60 * SLOW, env=clean, stdin=subprocess.DEVNULL)


def test_the_block_at_the_start_names_what_runs(daemon):
    text = daemon.stdout()
    assert f"http://127.0.0.1:{daemon.port}" in text
    for word in ("ready", "model", "SmolLM2", "llama", "context", "8192", "threads" if os.cpu_count() > 1 else "thread", "KV cache"):
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


@pytest.mark.parametrize("kind", ["missing", "empty", "text", "cut in the header", "cut in the tensors", "huge count"])
def test_a_model_that_cannot_be_loaded_is_one_line_and_status_1(tmp_path, kind):
    path = tmp_path / "broken.gguf"
    with open(MODEL, "rb") as f:
        head = f.read(4 << 20)
    content = {"missing": None, "empty": b"", "text": b"This is not a model.\n" * 100, "cut in the header": head[:5000],
               "cut in the tensors": head, "huge count": head[:8] + b"\xff" * 16 + head[24:]}[kind]
    if content is not None:
        path.write_bytes(content)
    r = serve(path)
    assert r.returncode == 1
    lines = r.stderr.splitlines()
    assert len(lines) == 1, r.stderr
    assert "broken.gguf" in lines[0]
    assert r.stdout == ""


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
])
def test_a_wrong_option_is_one_line_that_names_it(args, words):
    r = serve(MODEL, *args)
    assert r.returncode in (1, 2)
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


def stream(d, max_tokens, result):
    with httpx.Client(base_url=d.url, timeout=120 * SLOW) as c:
        with c.stream("POST", "/v1/completions", json={"prompt": "Once upon a time", "max_tokens": max_tokens, "stream": True,
                                                       "temperature": 0, "ignore_eos": True}) as r:
            for line in r.iter_lines():
                if line:
                    result.append(line)


def test_a_drain_lets_a_stream_end_and_refuses_new_work():
    d = Daemon()
    lines = []
    job = threading.Thread(target=stream, args=(d, int(400 / SLOW), lines))
    with Wire(d) as idle:
        job.start()
        eventually(lambda: len(lines) > 1, 10, "the stream has begun")
        d.signal()
        eventually(lambda: httpx.get(d.url + "/health/ready").status_code == 503, 2, "readiness fails")
        assert httpx.get(d.url + "/health/live").status_code == 200
        refused = httpx.post(d.url + "/v1/completions", json={"prompt": "x", "max_tokens": 1})
        assert refused.status_code == 503
        assert int(refused.headers["retry-after"]) > 0
        assert set(refused.json()["error"]) == {"message", "type", "param", "code"}
        assert job.is_alive(), "the stream was over too soon to tell"
        job.join(60 * SLOW)
        assert lines[-1] == "data: [DONE]"
        assert any('"finish_reason":"length"' in line for line in lines[-3:])
        with pytest.raises(websockets.ConnectionClosed) as e:
            idle.event(10)
        assert e.value.rcvd.code == 1012
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
    assert time.monotonic() - start < 4 * SLOW
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
    eventually(lambda: httpx.get(d.url + "/health/ready").status_code == 503, 2, "readiness fails")
    d.signal()
    assert d.wait(2) == -signal.SIGTERM
    job.join(10)


def test_an_idle_daemon_ends_at_once():
    d = Daemon()
    start = time.monotonic()
    assert d.stop() == 0
    assert time.monotonic() - start < 1.5 * SLOW


def test_a_service_manager_is_told(tmp_path):
    import socket
    path = str(tmp_path / "notify")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as s:
        s.bind(path)
        s.settimeout(30 * SLOW)
        d = Daemon(env={"NOTIFY_SOCKET": path})
        assert s.recv(100) == b"READY=1"
        d.signal()
        assert s.recv(100) == b"STOPPING=1"
        assert d.wait() == 0


def test_each_request_leaves_one_line(daemon, http):
    before = len(daemon.stderr().splitlines())
    http.post("/v1/completions", json={"prompt": "Hi\nthere \"you\"", "max_tokens": 2})
    eventually(lambda: len(daemon.stderr().splitlines()) > before, 1, "a line in the log")
    line = daemon.stderr().splitlines()[-1]
    for word in ("time=", "level=info", "event=", "tokens"):
        assert word in line
