"""HTTPS and wss: the same answers as without, refusals before and after the handshake, certificates read again."""
import json
import signal
import socket
import ssl
import subprocess
import threading
import time

import httpx
import pytest
from websockets.sync.client import connect as ws_connect

from daemon import BIN, MODEL, SLOW, Daemon, eventually, free_port
from transport import GET, TEXT, Echo, close_frame, error_of, frame, post, read_answer, read_chunks, read_head

no_model = pytest.mark.no_model


def make_certificate(folder, name="localhost", kind="ec"):
    """A certificate of its own and its key: two paths."""
    cert, key = folder / f"{name}.pem", folder / f"{name}.key"
    new = ["-newkey", "rsa:2048"] if kind == "rsa" else ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1"]
    subprocess.run(["openssl", "req", "-x509", *new, "-nodes", "-days", "2", "-subj", f"/CN={name}", "-addext",
                    "subjectAltName=DNS:localhost,IP:127.0.0.1", "-keyout", key, "-out", cert], check=True, capture_output=True)
    return cert, key


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    return make_certificate(tmp_path_factory.mktemp("tls"))


@pytest.fixture(scope="module")
def trusting(pair):
    return ssl.create_default_context(cafile=pair[0])


@pytest.fixture(scope="module")
def echo(pair):
    with Echo(tls_cert=pair[0], tls_key=pair[1]) as e:
        yield e


def dial(e, context, **more):
    return context.wrap_socket(e.connect(**more), server_hostname="localhost")


# ---- The wire, without a model ----

@no_model
def test_requests_on_one_connection(echo, trusting):
    with dial(echo, trusting) as s:
        assert s.version() == "TLSv1.3"
        for n in (0, 1, 16383, 16384, 16385, 100000, 1000000):
            body = b"x" * n
            s.sendall(b"POST /echo HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n" % n + body)
            status, _, answer = read_answer(s)
            assert status == 200 and json.loads(answer)["length"] == n


@no_model
def test_a_pipeline_in_one_record(echo, trusting):
    with dial(echo, trusting) as s:
        s.sendall((GET + b"\r\n") * 5)
        got = b""
        while got.count(b'{"status":"ok"}') < 5:
            data = s.recv(65536)
            assert data, got
            got += data


@no_model
def test_a_request_in_records_of_one_byte(echo, trusting):
    with dial(echo, trusting) as s:
        for byte in b"POST /echo HTTP/1.1\r\nHost: a\r\nContent-Length: 3\r\n\r\nabc":
            s.sendall(bytes([byte]))
        assert json.loads(read_answer(s)[2])["length"] == 3


@no_model
def test_records_in_segments_of_one_byte(echo, trusting):
    """The handshake and a request, cut anywhere by the network."""
    raw = echo.connect()
    raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    into, out = ssl.MemoryBIO(), ssl.MemoryBIO()
    tls = trusting.wrap_bio(into, out, server_hostname="localhost")

    def flush():
        for byte in out.read():
            raw.sendall(bytes([byte]))

    def until(step):
        while True:
            try:
                return step()
            except ssl.SSLWantReadError:
                flush()
                data = raw.recv(65536)
                assert data
                into.write(data)
    until(tls.do_handshake)
    tls.write(GET + b"\r\n")
    flush()
    assert b"200 OK" in until(lambda: tls.read(65536))
    raw.close()


@no_model
def test_a_large_answer_to_a_slow_reader(echo, trusting):
    with dial(echo, trusting, receive_buffer=4096) as s:
        s.sendall(b"GET /big?n=3000000 HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n")
        time.sleep(0.3)
        status, headers, body = read_answer(s)
        assert status == 200 and len(body) == int(headers.get("content-length", len(body))) and len(body) >= 1000000
        assert s.recv(1) == b""  # closed by an alert, not cut


@no_model
def test_a_stream_comes_as_it_is_made(echo, trusting):
    with dial(echo, trusting) as s:
        s.sendall(b"GET /stream?n=5&ms=50 HTTP/1.1\r\nHost: a\r\n\r\n")
        status, headers, rest = read_head(s)
        assert status == 200 and headers["content-type"].startswith("text/event-stream")
        assert read_chunks(s, rest)[0]


@no_model
def test_a_websocket(echo, trusting):
    with ws_connect(f"wss://localhost:{echo.port}/v1/responses", ssl=trusting, sock=echo.connect()) as ws:
        for text in ("hello", "", "x" * 200000):
            ws.send(text)
            assert ws.recv() == (text or "(empty)")


@no_model
def test_a_websocket_that_was_parked(pair, trusting):
    """The TLS session stays with the client's socket: heartbeats, messages and the close go on over it."""
    with Echo(tls_cert=pair[0], tls_key=pair[1], ws_park_after=50, ws_ping_interval=100, ws_ping_timeout=1000) as e:
        before = e.fds()
        with ws_connect(f"wss://localhost:{e.port}/v1/responses", ssl=trusting, sock=e.connect()) as ws:
            for text in ("hello", "", "x" * 200000):
                time.sleep(0.5)
                eventually(lambda: e.fds() == before + 1, 5, "it takes one descriptor")
                ws.send(text)
                assert ws.recv() == (text or "(empty)")
            time.sleep(1.5)  # some of its pings were answered, or it would be gone
            eventually(lambda: e.fds() == before + 1, 5, "it takes one descriptor")
            ws.close(4000, "enough")
            assert ws.close_code == 4000


@no_model
def test_a_websocket_frame_behind_its_upgrade(echo, trusting):
    with dial(echo, trusting) as s:
        s.sendall(b"GET /v1/responses HTTP/1.1\r\nHost: a\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
                  b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n\r\n" + frame(TEXT, b"early"))
        status, _, rest = read_head(s)
        assert status == 101
        while b"early" not in rest:
            rest += s.recv(4096)
        s.sendall(close_frame(1000))


@no_model
def test_a_refusal_is_read_to_its_end(echo, trusting):
    with dial(echo, trusting) as s:
        s.sendall(b"GET / HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n" + b"z" * 100000)
        status, headers, body = read_answer(s)
        assert status == 400 and headers["connection"] == "close" and error_of(body)["message"]


@no_model
def test_plain_http_is_told(echo):
    status, _, body = echo.get("/health/live")
    assert status == 400 and error_of(body)["code"] == "tls_required"
    with echo.connect() as s:
        s.sendall(post(b"{}" * 50000))
        assert read_answer(s)[0] == 400


@no_model
@pytest.mark.parametrize("data", [b"\x00" * 100, b"\x16\x03\x01\xff\xff" + b"\xff" * 100, b"SSH-2.0-x\r\n", b"\x16\x03\x01"],
                         ids=["zeros", "record", "ssh", "cut"])
def test_what_is_not_tls_ends_the_connection(echo, trusting, data):
    with echo.connect() as s:
        try:
            s.sendall(data)
            s.shutdown(socket.SHUT_WR)
            while s.recv(4096):
                pass
        except OSError:  # reset, perhaps before all was sent
            pass
    with dial(echo, trusting) as s:
        s.sendall(GET + b"\r\n")
        assert read_answer(s)[0] == 200


@no_model
def test_old_versions_are_refused(echo):
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.minimum_version = context.maximum_version = ssl.TLSVersion.TLSv1_1
    context.set_ciphers("ALL:@SECLEVEL=0")
    with pytest.raises((ssl.SSLError, ConnectionError)):
        dial(echo, context)


@no_model
def test_tls_1_2_and_alpn(echo, pair):
    context = ssl.create_default_context(cafile=pair[0])
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["h2", "http/1.1"])
    with dial(echo, context) as s:
        assert s.version() == "TLSv1.2" and s.selected_alpn_protocol() == "http/1.1"
        s.sendall(GET + b"\r\n")
        assert read_answer(s)[0] == 200
    context.set_alpn_protocols(["h2"])
    with pytest.raises((ssl.SSLError, ConnectionError)):
        dial(echo, context)


@no_model
def test_a_handshake_has_a_deadline(pair):
    with Echo(tls_cert=pair[0], tls_key=pair[1], header_timeout=300) as e:
        with e.connect() as s:
            start = time.monotonic()
            assert s.recv(1) == b""
            assert time.monotonic() - start < 5 * SLOW


@no_model
@pytest.mark.parametrize("how", ["fin", "rst", "alert"])
def test_a_client_that_leaves_is_noticed(echo, trusting, how):
    before = stats(echo, trusting)
    s = dial(echo, trusting)
    s.sendall(b"GET /slow?ms=60000 HTTP/1.1\r\nHost: a\r\n\r\n")
    eventually(lambda: stats(echo, trusting)["started"] == before["started"] + 1, 5, "it has begun")
    if how == "rst":
        s.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    elif how == "alert":
        s.settimeout(0.2)
        try:
            s.unwrap()
        except (ssl.SSLError, OSError):
            pass
    s.close()
    eventually(lambda: stats(echo, trusting)["closed"] == before["closed"] + 1, 1, "it has ended")


def stats(echo, context):
    with dial(echo, context) as s:
        s.sendall(b"GET /stats HTTP/1.1\r\nHost: a\r\n\r\n")
        return json.loads(read_answer(s)[2])


@no_model
def test_many_connections_leave_nothing(echo, trusting):
    def some():
        for _ in range(20):
            with dial(echo, trusting) as s:
                s.sendall(GET + b"\r\n")
                assert read_answer(s)[0] == 200
    some()
    eventually(lambda: echo.fds() < 40, 10, "descriptors are closed")
    fds, rss = echo.fds(), echo.rss()
    threads = [threading.Thread(target=some) for _ in range(10)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    eventually(lambda: echo.fds() <= fds, 10, "descriptors are closed")
    if SLOW == 1:
        assert echo.rss() - rss < 8 << 20


@no_model
def test_connections_of_one_address():
    with Echo(max_connections_per_address=5) as e:
        held = [e.connect() for _ in range(5)]
        for s in held:
            s.sendall(GET + b"\r\n")
            assert read_answer(s)[0] == 200
        status, headers, body = e.get("/health/live")
        assert status == 429 and "retry-after" in headers and error_of(body)["code"] == "too_many_connections"
        other = socket.create_connection(("127.0.0.1", e.port), source_address=("127.0.0.2", 0), timeout=10 * SLOW)
        other.sendall(GET + b"\r\n")
        assert read_answer(other)[0] == 200  # another address has its own
        crowd = [e.connect() for _ in range(100)]
        eventually(lambda: e.fds() < 60, 5, "those far over it are just closed")
        for s in crowd + held + [other]:
            s.close()

        def served():
            try:
                return e.get("/health/live")[0] == 200
            except OSError:
                return False
        eventually(served, 10, "it serves again")


# ---- The daemon ----

def test_a_daemon_with_a_certificate(tmp_path):
    cert, key = make_certificate(tmp_path)
    d = Daemon("--tls-cert", cert, "--tls-key", key, wait=False)
    try:
        context = ssl.create_default_context(cafile=cert)
        url = f"https://localhost:{d.port}"
        where = ["--host", "127.0.0.1", "--port", str(d.port), "--tls"]
        eventually(lambda: subprocess.run([BIN, "health", *where], capture_output=True).returncode == 0, 60, "it is ready")
        assert f"listening  https://127.0.0.1:{d.port}" in d.stdout()
        plain = subprocess.run([BIN, "health", *where[:-1]], capture_output=True, text=True)
        assert plain.returncode == 1 and "HTTPS" in plain.stdout + plain.stderr
        with httpx.Client(base_url=url, verify=context, timeout=60 * SLOW) as http:
            body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4, "temperature": 0}
            whole = http.post("/v1/chat/completions", json=body).json()
            with http.stream("POST", "/v1/chat/completions", json={**body, "stream": True}) as r:
                parts = [json.loads(line[6:]) for line in r.iter_lines() if line.startswith("data: {")]
            assert "".join(p["choices"][0]["delta"].get("content") or "" for p in parts) == whole["choices"][0]["message"]["content"]
        with ws_connect(f"wss://localhost:{d.port}/v1/responses", ssl=context, sock=socket.create_connection(("127.0.0.1", d.port))) as ws:
            ws.send(json.dumps({"type": "response.create", "input": "Hi", "max_output_tokens": 4}))
            while json.loads(ws.recv(timeout=60 * SLOW))["type"] not in ("response.completed", "response.incomplete"):
                pass
        # A certificate is read again; one that cannot be read changes nothing.
        old = served_certificate(d.port)
        fresh = make_certificate(tmp_path, "fresh")
        cert.write_bytes(fresh[0].read_bytes())
        d.process.send_signal(signal.SIGHUP)  # the key does not belong to it yet
        eventually(lambda: "certificate was not read again" in d.stderr(), 5, "it says so")
        assert served_certificate(d.port) == old
        key.write_bytes(fresh[1].read_bytes())
        d.process.send_signal(signal.SIGHUP)
        eventually(lambda: served_certificate(d.port) != old, 5, "the new certificate is shown")
        assert key.read_text() not in d.stderr()
    finally:
        assert d.stop() == 0


def served_certificate(port):
    return ssl.get_server_certificate(("127.0.0.1", port))


@pytest.mark.parametrize("case", ["cert only", "key only", "no file", "not a certificate", "another key", "locked key"])
def test_wrong_files_are_one_line(tmp_path, case):
    cert, key = make_certificate(tmp_path)
    words = {"cert only": "go together", "key only": "go together", "no file": "No such file", "not a certificate": str(cert),
             "another key": "is not that of", "locked key": str(key)}[case]
    if case == "no file":
        cert.unlink()
    elif case == "not a certificate":
        cert.write_text("hello")
    elif case == "another key":
        key.write_bytes(make_certificate(tmp_path, "other", "rsa")[1].read_bytes())
    elif case == "locked key":
        subprocess.run(["openssl", "ec", "-aes128", "-passout", "pass:secret", "-in", key, "-out", key], check=True, capture_output=True)
    options = (["--tls-cert", str(cert)] if case != "key only" else []) + (["--tls-key", str(key)] if case != "cert only" else [])
    for more in (["--check"], ["--port", str(free_port())]):
        r = subprocess.run([BIN, "serve", "--model", MODEL, *options, *more], capture_output=True, text=True, timeout=60 * SLOW)
        assert r.returncode != 0 and words in r.stderr, r.stderr
