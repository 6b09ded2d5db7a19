"""--mlflow: figures of requests go to a tracking server; one that fails, hangs or is not there costs a counter, never a request."""
import http.server
import json
import os
import signal
import subprocess
import sys
import threading
import time

import httpx
import pytest

from daemon import BIN, LONG, MODEL, ROOT, SLOW, Daemon, eventually, free_port


class Tracker:
    """A tracking server as far as it is asked here; `mode` says how it behaves: ok, 500, 400, 404, hang."""

    def __init__(self, port=0):
        self.mode, self.calls, self.metrics, self.params, self.runs, self.finished, self.experiment = "ok", [], [], [], 0, 0, None
        self.release = threading.Event()
        outer = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *args):
                pass

            def answer(self, status, body):
                data = json.dumps(body).encode()
                self.send_response(status)
                self.send_header("content-type", "application/json")
                self.send_header("content-length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def do_GET(self):
                self.handle_call(None)

            def do_POST(self):
                self.handle_call(json.loads(self.rfile.read(int(self.headers["content-length"]))))

            def handle_call(self, body):
                name = self.path.split("/mlflow/", 1)[1]
                outer.calls.append(name)
                if outer.mode == "hang":
                    outer.release.wait(60)
                    return
                if outer.mode in ("500", "400", "404"):
                    self.answer(int(outer.mode), {"error_code": "SOMETHING"})
                    return
                self.answer(*outer.handle(name, body))

        class Server(http.server.ThreadingHTTPServer):
            allow_reuse_address = True
            daemon_threads = True

            def handle_error(self, request, address):
                pass

        self.server = Server(("127.0.0.1", port), Handler)
        self.port = self.server.server_address[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.thread = threading.Thread(target=self.server.serve_forever, daemon=True)
        self.thread.start()

    def handle(self, name, body):
        if name.startswith("experiments/get-by-name"):
            if self.experiment is None:
                return 404, {"error_code": "RESOURCE_DOES_NOT_EXIST"}
            return 200, {"experiment": {"experiment_id": "17", "name": self.experiment}}
        if name == "experiments/create":
            self.experiment = body["name"]
            return 200, {"experiment_id": "17"}
        if name == "runs/create":
            assert body["experiment_id"] == "17"
            self.runs += 1
            return 200, {"run": {"info": {"run_id": f"run{self.runs}"}}}
        if name == "runs/log-batch":
            if body["run_id"] != f"run{self.runs}":
                return 404, {"error_code": "RESOURCE_DOES_NOT_EXIST"}
            self.metrics += body.get("metrics", [])
            self.params += body.get("params", [])
            return 200, {}
        if name == "runs/update":
            self.finished += 1
            return 200, {}
        return 400, {}

    def n(self):
        return len({m["step"] for m in self.metrics})

    def of(self, key):
        return [m["value"] for m in self.metrics if m["key"] == key]

    def close(self):
        self.release.set()
        self.server.shutdown()
        self.server.server_close()


@pytest.fixture
def tracker():
    t = Tracker()
    yield t
    t.close()


def ask(d, text="Why is the sky blue?", n=4, **more):
    body = {"prompt": text, "max_tokens": n, "temperature": 0, "ignore_eos": True, **more}
    start = time.monotonic()
    r = httpx.post(d.url + "/v1/completions", json=body, timeout=60 * SLOW)
    assert r.status_code == 200, r.text
    return r.json(), time.monotonic() - start


def figure(d, name):
    return d.metrics()["kvasir:mlflow_" + name]


def serve(url, *args):
    return Daemon("--mlflow", url, "--context", 1024, "--kv-memory", "60M", *args)


def test_each_request_leaves_its_figures(tracker):
    text = " ".join(f"{i} is followed by {i * 7919 % 1000}." for i in range(60))
    with serve(tracker.url + "/", "--mlflow-experiment", "kv study") as d:
        first, _ = ask(d, text)
        again, _ = ask(d, text)
        short, _ = ask(d, text, kv_cache={"policy": "streaming", "max_cache_size": 128})
        eventually(lambda: tracker.n() == 3, 10, "the figures have arrived")
        eventually(lambda: figure(d, "records_total") == 3, 10, "and the daemon has heard that they have")
        assert figure(d, "failures_total") == 0 and figure(d, "up") == 1 and figure(d, "queued") == 0
    assert tracker.experiment == "kv study" and tracker.runs == 1 and tracker.finished == 1
    assert {"key": "model", "value": os.path.basename(MODEL)} in tracker.params
    assert tracker.of("prompt_tokens") == [first["usage"]["prompt_tokens"]] * 3
    cached = again["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert tracker.of("cached_tokens")[:2] == [0, cached] and cached > 500
    assert tracker.of("cache_hit_rate")[1] == pytest.approx(cached / again["usage"]["prompt_tokens"])
    assert tracker.of("shrink_ratio")[0] == 0 and tracker.of("shrink_ratio")[2] == pytest.approx(short["kv_cache"]["shrink_ratio"], rel=1e-4)
    for key in ("queue_ms", "ttft_ms", "e2e_ms", "tokens_per_s"):
        assert len(tracker.of(key)) == 3 and all(v >= 0 for v in tracker.of(key)), key
    for ttft, e2e in zip(tracker.of("ttft_ms"), tracker.of("e2e_ms")):
        assert 0 < ttft <= e2e
    assert all(abs(m["timestamp"] / 1000 - time.time()) < 300 * SLOW for m in tracker.metrics)


def test_an_experiment_that_is_there_is_used(tracker):
    tracker.experiment = "kvasir"
    with serve(tracker.url) as d:
        ask(d)
        eventually(lambda: tracker.n() == 1, 10, "the figures have arrived")
    assert "experiments/create" not in tracker.calls


def test_what_a_server_refuses_for_a_while_is_sent_later(tracker):
    tracker.mode = "500"
    with serve(tracker.url) as d:
        for i in range(5):
            ask(d, f"Question {i}?")
        eventually(lambda: figure(d, "failures_total") >= 2, 20, "it was tried again")
        assert figure(d, "up") == 0 and figure(d, "queued") == 5
        assert d.stderr().count("does not take figures") == 1
        tracker.mode = "ok"
        eventually(lambda: tracker.n() == 5, 20, "the figures have arrived")
        eventually(lambda: figure(d, "up") == 1, 5, "it is up")
        assert "takes figures again" in d.stderr()
        assert sorted({m["step"] for m in tracker.metrics}) == list(range(5))


def test_what_it_refuses_for_good_is_counted_and_gone(tracker):
    with serve(tracker.url) as d:
        ask(d, "One?")
        eventually(lambda: tracker.n() == 1, 10, "the figures have arrived")
        tracker.mode = "400"
        ask(d, "Two?")
        eventually(lambda: figure(d, "failures_total") == 1 and figure(d, "queued") == 0, 10, "it is given up")
        tracker.mode = "ok"
        ask(d, "Three?")
        eventually(lambda: tracker.n() == 2, 10, "the next one is sent")


def test_a_run_that_was_deleted_is_made_again(tracker):
    with serve(tracker.url) as d:
        ask(d, "One?")
        eventually(lambda: tracker.n() == 1, 10, "the figures have arrived")
        tracker.runs += 5  # the daemon's run is none of these
        ask(d, "Two?")
        eventually(lambda: tracker.n() == 2, 20, "the figures have arrived")
        assert tracker.runs == 7


def test_a_server_that_hangs_holds_up_nobody(tracker):
    tracker.mode = "hang"
    d = serve(tracker.url)
    ask(d)
    eventually(lambda: tracker.calls, 10, "the server was asked")
    for i in range(5):
        _, took = ask(d, f"Question {i}?")
        assert took < 5 * SLOW
    start = time.monotonic()
    assert d.stop() == 0
    assert time.monotonic() - start < 4 * SLOW
    assert "were not sent" in d.stderr()


def test_no_server_at_all_and_then_one():
    port = free_port()
    with serve(f"http://127.0.0.1:{port}") as d:
        ask(d)
        eventually(lambda: figure(d, "failures_total") >= 1, 10, "it was tried")
        late = Tracker(port)
        eventually(lambda: late.n() == 1, 20, "the figures have arrived")
        late.close()
    d = serve(f"http://127.0.0.1:{port}")
    ask(d)
    start = time.monotonic()
    assert d.stop() == 0
    assert time.monotonic() - start < 4 * SLOW


def test_a_server_that_sends_nonsense(tracker):
    tracker.handle = lambda name, body: (200, {"experiment": {"experiment_id": {"deep": ["x"]}}})
    with serve(tracker.url) as d:
        ask(d)
        eventually(lambda: figure(d, "failures_total") >= 2, 10, "it was tried again")
        ask(d)


@pytest.mark.no_model
def test_an_address_that_is_none_is_refused(tmp_path):
    for url in ("localhost:5000", "ftp://host", "http://", "http:///x", "http://a b"):
        done = subprocess.run([BIN, "serve", "--model", sys.executable, "--mlflow", url, "--check"], capture_output=True, text=True)
        assert done.returncode == 1 and "mlflow" in done.stderr and "http" in done.stderr, (url, done.stderr)


@LONG
def test_a_real_tracking_server(tmp_path):
    mlflow = os.path.join(ROOT, ".cache", "venv-mlflow", "bin", "mlflow")
    if not os.path.exists(mlflow):
        pytest.skip("mlflow is not in .cache/venv-mlflow: tests/run.sh --full clients puts it there")
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    log = open(tmp_path / "mlflow.log", "w")
    server = subprocess.Popen([mlflow, "server", "--host", "127.0.0.1", "--port", str(port), "--workers", "1", "--backend-store-uri",
                               f"sqlite:///{tmp_path}/mlflow.db", "--artifacts-destination", str(tmp_path / "artifacts")],
                              stdout=log, stderr=log, cwd=tmp_path, start_new_session=True)
    try:
        def healthy():
            try:
                return httpx.get(url + "/health", timeout=2).status_code == 200
            except httpx.TransportError:
                assert server.poll() is None, open(tmp_path / "mlflow.log").read()
                return False
        eventually(healthy, 120, "mlflow serves")
        api = url + "/api/2.0/mlflow/"
        with serve(url, "--mlflow-experiment", "kvasir tests") as d:
            answers = [ask(d, f"Question {i}: why is the sky blue?", n=6)[0] for i in range(3)]
            eventually(lambda: figure(d, "queued") == 0 and figure(d, "up") == 1, 30, "the figures have arrived")
            assert figure(d, "records_total") == 3
        experiment = httpx.get(api + "experiments/get-by-name", params={"experiment_name": "kvasir tests"}).json()["experiment"]
        runs = httpx.post(api + "runs/search", json={"experiment_ids": [experiment["experiment_id"]]}).json()["runs"]
        assert len(runs) == 1 and runs[0]["info"]["status"] == "FINISHED"
        assert {"key": "model", "value": os.path.basename(MODEL)} in runs[0]["data"]["params"]
        history = httpx.get(api + "metrics/get-history", params={"run_id": runs[0]["info"]["run_id"], "metric_key": "prompt_tokens"}).json()
        assert sorted(m["value"] for m in history["metrics"]) == sorted(a["usage"]["prompt_tokens"] for a in answers)
        assert [m["step"] for m in sorted(history["metrics"], key=lambda m: m["step"])] == [0, 1, 2]
    finally:
        os.killpg(server.pid, signal.SIGKILL)  # with its workers; nobody needs what it would still write
        server.wait(30)
        log.close()
