"""HTTP on the wire: framing, connections, deadlines, limits, disconnects. No engine and no model."""
import json
import os
import resource
import socket
import threading
import time

import httpx
import pytest

from daemon import SLOW, eventually
from transport import (CLOSE, GET, POST, TEXT, Echo, Ws, close_frame, error_of, load_probe, post, read_answer, read_chunks,
                       read_head, read_to_end)

pytestmark = pytest.mark.no_model


# ---- Framing ----

def test_probe(echo):
    p = load_probe()
    assert p.run(p.CASES, echo.port) == 0


def test_probe_on_a_kept_alive_connection(echo):
    """What is refused as a first request is refused as a second one, and behind another in a pipeline."""
    p = load_probe()
    failed = []
    for name, kind, want, data in p.CASES:
        # A client waits for the first answer, then sends the case.
        with echo.connect(timeout=2) as s:
            s.sendall(GET + b"\r\n")
            assert read_answer(s)[0] == 200
            out = b""
            closed = True
            try:
                s.sendall(data)
                s.settimeout(2 * SLOW)
                while True:
                    got = s.recv(65536)
                    if not got:
                        break
                    out += got
                    if b"\r\n\r\n" in out:
                        s.settimeout(0.3 * SLOW)
            except socket.timeout:
                closed = False
            except OSError:
                pass
        why = p.judge(kind, want, out, closed)
        if why:
            failed.append(f"second: {name}: {why}")
    assert not failed, "\n".join(failed)


def test_probe_in_a_pipeline(echo):
    p = load_probe()
    failed = []
    for name, kind, want, data in p.CASES:
        if kind != "R":
            continue
        out, closed = p.exchange("127.0.0.1", echo.port, GET + b"\r\n" + data)
        first, _, rest = out.partition(b'{"status":"ok"}')
        if b" 200 " not in first[:16]:
            failed.append(f"{name}: the request before it was not served: {out[:80]!r}")
        why = p.judge(kind, want, rest, closed)
        if why:
            failed.append(f"{name}: {why}")
    assert not failed, "\n".join(failed)


@pytest.mark.quirk(22)
def test_refusals_are_json(echo):
    for data in (b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01", b"GET / HTTP/2.0\r\n",
                 b"FOO / HTTP/1.1\r\nHost: a\r\n\r\n", POST + b"Transfer-Encoding: gzip\r\n\r\n",
                 POST + b"Expect: tea\r\n\r\n",
                 POST + b"Content-Length: 99999999999\r\n\r\n", GET + b"X: " + b"y" * 100000 + b"\r\n\r\n"):
        status, headers, body = echo.ask(data)
        assert 400 <= status < 600
        assert headers["content-type"] == "application/json" and headers["connection"] == "close" and "date" in headers
        error_of(body)


def test_split_at_every_byte(echo):
    """A request arrives in two parts, whatever the cut."""
    data = (b"POST /echo?q=a%20b HTTP/1.1\r\nHost: a\r\nX-Test: t\r\nTransfer-Encoding: chunked\r\n\r\n"
            b"5\r\nhello\r\n1;x=y\r\n!\r\n0\r\nT: u\r\n\r\n")
    with echo.connect() as s:
        s.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for cut in range(1, len(data)):
            s.sendall(data[:cut])
            time.sleep(0.001)
            s.sendall(data[cut:])
            status, _, body = read_answer(s)
            body = json.loads(body)
            assert status == 200 and body["length"] == 6 and body["q"] == "a b" and body["x-test"] == "t", (cut, body)


def test_empty_lines_before_a_request(echo):
    assert echo.ask(b"\r\n\r\n" + GET + b"\r\n")[0] == 200


def test_absolute_target(echo):
    data = b"POST http://example/echo?q=1 HTTP/1.1\r\nHost: example\r\nContent-Length: 2\r\n\r\nhi"
    body = json.loads(echo.ask(data)[2])
    assert body["path"] == "/echo" and body["q"] == "1" and body["length"] == 2


def test_pipeline(echo):
    """Fifty requests at once, of several kinds, are answered in order."""
    with echo.connect() as s:
        s.sendall(b"".join(post(b"x" * i) + GET + b"\r\n" for i in range(25)))
        got = b""
        while got.count(b"HTTP/1.1 200") < 50 or not got.endswith(b"}"):
            got += s.recv(65536)
    lengths = [int(part.split(b"}")[0].split(b",")[0]) for part in got.split(b'"length":')[1:]]
    assert lengths == list(range(25))
    assert got.count(b'{"status":"ok"}') == 25


@pytest.mark.quirk(35)
def test_h2c_offer_is_ignored(echo):
    body = b'{"content":"A"}'
    status, headers, _ = echo.ask(post(body, b"/tokenize", b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\n"
                                       b"HTTP2-Settings: AAMAAABkAAQAoAAAAAIAAAAA\r\n"))
    assert status == 200 and "upgrade" not in headers


# ---- Answers ----

@pytest.mark.quirk(42)
def test_head_has_no_body(echo):
    for path in ("/health/live", "/stream?n=3", "/burst", "/nothing", "/v1/responses"):
        with echo.connect() as s:
            for _ in range(2):
                s.sendall(b"HEAD " + path.encode() + b" HTTP/1.1\r\nHost: a\r\n\r\n")
                status, headers, rest = read_head(s)
                assert rest == b"" and "transfer-encoding" not in headers, (path, rest)
            s.sendall(GET + b"\r\n")
            assert read_answer(s)[0] == 200
    # Nor has one that is refused, wherever that is.
    for fields in (b"HEAD * HTTP/1.1\r\nHost: a\r\n\r\n", b"HEAD / HTTP/1.1\r\n\r\n", b"HEAD / HTTP/9.1\r\n\r\n",
                   b"HEAD / HTTP/1.1\r\nHost: a\r\nX: " + b"x" * 100000 + b"\r\n\r\n",
                   b"HEAD / HTTP/1.1\r\nHost: a\r\nContent-Length: 99999999999\r\n\r\n"):
        with echo.connect() as s:
            s.sendall(fields)
            head, _, body = read_to_end(s)[0].partition(b"\r\n\r\n")
            assert head[9:10] in b"45" and body == b"", fields[:40]


def test_request_ids(echo):
    ids = {echo.get("/health/live")[1]["x-request-id"] for _ in range(10)}
    assert len(ids) == 10
    assert echo.ask(GET + b"X-Request-Id: mine-1.2\r\n\r\n")[1]["x-request-id"] == "mine-1.2"
    for odd in (b"a b", b"<script>", b"x" * 64, b"\xc3\xa9"):
        assert echo.ask(GET + b"X-Request-Id: " + odd + b"\r\n\r\n")[1]["x-request-id"].startswith("req_")


@pytest.mark.quirk(13)
def test_stream_chunks_are_events(echo):
    with echo.connect() as s:
        for path in (b"/stream?n=20&ms=1", b"/burst?n=200", b"/stream?n=3&ms=0&size=30000"):
            s.sendall(b"GET " + path + b" HTTP/1.1\r\nHost: a\r\n\r\n")
            status, headers, rest = read_head(s)
            assert status == 200 and headers["transfer-encoding"] == "chunked"
            chunks, rest = read_chunks(s, rest)
            assert rest == b""
            assert all(c.startswith(b"data: ") and c.endswith(b"\n\n") for c in chunks), chunks
        assert len(chunks) == 4 and len(chunks[0]) >= 30000


def test_stream_is_prompt(echo):
    """The head comes before the first event, and each event when it is written."""
    with echo.connect() as s:
        s.sendall(b"GET /stream?n=5&ms=200 HTTP/1.1\r\nHost: a\r\n\r\n")
        _, headers, rest = read_head(s)
        assert rest == b"" and headers["x-accel-buffering"] == "no"
        start, times = time.monotonic(), []
        while rest.count(b"data: ") < 5:
            rest += s.recv(65536)
            times.append(time.monotonic() - start)
        assert len(times) >= 5 and times[-1] - times[0] > 0.5


@pytest.mark.quirk(40)
def test_stream_to_http_1_0_and_to_close(echo):
    """Without chunks the end of the connection is the end of the stream."""
    status, headers, body = echo.ask(b"GET /stream?n=5 HTTP/1.0\r\n\r\n")
    assert status == 200 and "transfer-encoding" not in headers
    assert body.count(b"data: ") == 6 and body.endswith(b"[DONE]\n\n")
    with echo.connect() as s:
        s.sendall(b"GET /stream?n=5 HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n")
        status, headers, body = read_answer(s)
        assert status == 200 and headers["connection"] == "close" and body.count(b"data: ") == 6
        assert read_to_end(s) == (b"", "closed")


def test_http_1_0_keep_alive(echo):
    with echo.connect() as s:
        for _ in range(3):
            s.sendall(b"GET /health/live HTTP/1.0\r\nConnection: keep-alive\r\n\r\n")
            assert read_answer(s)[0] == 200


def test_big_answer(echo):
    status, _, body = echo.get("/big?bytes=20000000")
    assert status == 200 and len(body) == 20000000


def test_client_library(echo):
    with httpx.Client(base_url=f"http://127.0.0.1:{echo.port}") as c:
        assert c.get("/health/live").json() == {"status": "ok"}
        with c.stream("GET", "/stream", params={"n": 7}) as r:
            assert sum(1 for line in r.iter_lines() if line.startswith("data: ")) == 8
        assert c.get("/nothing").status_code == 404
        assert c.put("/echo").status_code == 405


# ---- Bodies ----

def checksum(data):
    total = 0
    for b in data:
        total = (total * 31 + b) & 0xFFFFFFFF
    return total


def test_big_body(echo):
    data = os.urandom(1 << 20)
    for fields, wire in ((b"Content-Length: %d\r\n" % len(data), data),
                         (b"Transfer-Encoding: chunked\r\n",
                          b"".join(b"%x\r\n%s\r\n" % (len(data[i:i + 70000]), data[i:i + 70000])
                                   for i in range(0, len(data), 70000)) + b"0\r\n\r\n")):
        body = json.loads(echo.ask(POST + fields + b"\r\n" + wire)[2])
        assert body["length"] == len(data) and body["sum"] == checksum(data)


def test_body_of_any_method(echo):
    for method in (b"PATCH", b"DELETE"):
        with echo.connect() as s:
            for _ in range(2):
                s.sendall(method + b" /echo HTTP/1.1\r\nHost: a\r\nContent-Length: 5\r\n\r\nhello")
                assert json.loads(read_answer(s)[2])["length"] == 5


@pytest.mark.quirk(36)
def test_continue(echo):
    """The body is asked for, and not when it is not wanted."""
    with echo.connect() as s:
        s.sendall(POST + b"Content-Length: 5\r\nExpect: 100-continue\r\n\r\n")
        status, _, rest = read_head(s)
        assert status == 100 and rest == b""
        s.sendall(b"hello")
        assert json.loads(read_answer(s)[2])["length"] == 5
    for path in (b"/nothing", b"/stats"):
        status, headers, body = echo.ask(b"POST " + path + b" HTTP/1.1\r\nHost: a\r\nContent-Length: 5\r\n"
                                         b"Expect: 100-continue\r\n\r\n")
        assert status in (404, 405) and headers["connection"].lower() == "close"
        error_of(body)


def test_refused_before_the_body_keeps_the_connection(echo):
    with echo.connect() as s:
        for _ in range(3):
            s.sendall(post(b"x" * 100000, b"/nothing"))
            assert read_answer(s)[0] == 404
        s.sendall(GET + b"\r\n")
        assert read_answer(s)[0] == 200


def test_refused_before_a_huge_body_is_readable():
    """The client is still sending when the answer comes; it must not be lost to an RST."""
    with Echo(max_body=100 << 20) as e:
        for path, want in ((b"/nothing", 404), (b"/echo", 413)):
            n = 50 << 20 if want == 404 else 200 << 20
            with e.connect() as s:
                s.sendall(b"POST %s HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n" % (path, n))
                sent = 0
                try:
                    while sent < 20 << 20:
                        sent += s.send(b"x" * 65536)
                except ConnectionError:
                    pass
                status, _, body = read_answer(s)
                assert status == want
                error_of(body)


def test_body_limit():
    with Echo(max_body=1000) as e:
        assert e.ask(post(b"x" * 1000))[0] == 200
        status, _, body = e.ask(post(b"x" * 1001))
        assert status == 413 and error_of(body)["code"] == "request_too_large"
        # Known too large: refused without a byte of it.
        assert e.ask(POST + b"Content-Length: 1001\r\nExpect: 100-continue\r\n\r\n")[0] == 413
        chunk = b"64\r\n" + b"x" * 100 + b"\r\n"
        assert e.ask(POST + b"Transfer-Encoding: chunked\r\n\r\n" + chunk * 10 + b"0\r\n\r\n")[0] == 200
        assert e.ask(POST + b"Transfer-Encoding: chunked\r\n\r\n" + chunk * 11)[0] == 413


def sized(n, given=b"x"):
    """A request that announces n bytes of body, and has sent some."""
    return POST + b"Content-Length: %d\r\n\r\n" % n + given


def test_memory_of_all_clients_together_is_bounded_and_counted():
    with Echo(max_client_memory=3 << 20) as e:
        before = e.stats()["client_bytes"]
        assert before > 0
        held = [e.connect() for _ in range(2)]
        for s in held:
            s.sendall(sized(1040000, b"x" * 1000000))
        eventually(lambda: e.stats()["client_bytes"] - before > 2000000, 5, "what came of the bodies is counted")
        # What is large has no room now, announced or not, and is told when to come again; what is small has.
        large = 1100000
        for data in (sized(large), POST + b"Content-Length: %d\r\nExpect: 100-continue\r\n\r\n" % large,
                     POST + b"Transfer-Encoding: chunked\r\n\r\n%x\r\n" % large + b"x" * large + b"\r\n0\r\n\r\n"):
            status, headers, body = e.ask(data)
            assert status == 503 and headers["retry-after"] == "1" and error_of(body)["code"] == "server_overloaded", data[:80]
        assert e.ask(post(b"x" * 60000))[0] == 200
        with Ws(e) as ws:
            ws.send(TEXT, b"x" * 60000)
            assert ws.frame() == (TEXT, b"x" * 60000)
            ws.send(TEXT, b"x" * large)
            assert ws.close_code() == 1013
        for s in held:
            s.sendall(b"x" * 40000)
            assert read_answer(s)[0] == 200
            s.close()
        assert e.ask(post(b"x" * large))[0] == 200
        eventually(lambda: e.stats()["client_bytes"] == before, 5, "nothing is left of it")


def test_unread_output_is_counted():
    with Echo(stream_buffer=1 << 20) as e:
        before = e.stats()["client_bytes"]
        with e.connect(receive_buffer=4096) as s:
            s.sendall(b"GET /big?bytes=20000000 HTTP/1.1\r\nHost: a\r\n\r\n")
            eventually(lambda: e.stats()["client_bytes"] - before > 19e6, 5, "the answer is counted")
        eventually(lambda: e.stats()["client_bytes"] == before, 5, "and is gone with its client")
        with Ws(e, receive_buffer=4096) as ws:
            while e.stats()["client_bytes"] - before < 500000:
                ws.send(TEXT, b"flood 1 50000")
        eventually(lambda: e.stats()["client_bytes"] == before, 5, "and a WebSocket's as well")


def test_head_limit():
    with Echo(max_header=2000) as e:
        assert e.ask(GET + b"X: " + b"y" * 1900 + b"\r\n\r\n")[0] == 200
        status, _, body = e.ask(GET + b"X: " + b"y" * 2000 + b"\r\n\r\n")
        assert status == 431
        error_of(body)


def test_largest_head():
    """Whatever the limit allows, libmicrohttpd's memory has room for."""
    with Echo(max_header=1 << 20) as e:
        for n in (100000, 1000000):
            assert e.ask(GET + b"X: " + b"y" * n + b"\r\n\r\n")[0] == 200
            with e.connect() as s:
                for _ in range(2):
                    s.sendall(post(b"z" * 300000, fields=b"X-Test: " + b"y" * n + b"\r\n"))
                    body = json.loads(read_answer(s)[2])
                    assert body["length"] == 300000 and len(body["x-test"]) == n


def test_many_small_fields(echo):
    """Each takes memory of libmicrohttpd, which hangs when that runs out."""
    for data in (b"GET /health/live?" + b"a&" * 15000 + b" HTTP/1.1\r\nHost: a\r\n\r\n",
                 GET + b"Cookie: " + b"a;" * 15000 + b"\r\n\r\n", GET + b"a:b\r\n" * 5000 + b"\r\n"):
        status, _, body = echo.ask(data)
        assert status == 431
        error_of(body)
    most = GET.replace(b" HTTP", b"?" + b"a&" * 80 + b" HTTP") + b"a:b\r\n" * 80
    most += b"Cookie: " + b"a;" * 80 + b"b" * 30000
    with echo.connect() as s:
        for _ in range(3):
            s.sendall(most + b"\r\n\r\n")
            assert read_answer(s)[0] == 200


# ---- Deadlines and limits ----

def test_deadlines():
    with Echo(header_timeout=300, body_timeout=400, idle_timeout=500) as e:
        start = time.monotonic()
        sockets = {}
        for name, data in (("silent", b""), ("head", GET), ("body", POST + b"Content-Length: 5\r\n\r\nab"),
                           ("idle", GET + b"\r\n")):
            sockets[name] = e.connect()
            sockets[name].sendall(data)
        # A client that trickles its head gets no more time than one that stops.
        trickle = e.connect()
        for c in b"GET /health/live HTTP/1.1\r\n":
            try:
                trickle.sendall(bytes([c]))
            except ConnectionError:
                break
            time.sleep(0.03)
        status, _, body = read_answer(trickle)
        assert status == 408 and error_of(body)
        out, how = read_to_end(sockets["silent"])
        assert (out, how) == (b"", "closed")
        for name, want in (("head", 408), ("body", 408), ("idle", 200)):
            status, _, body = read_answer(sockets[name])
            assert status == want, name
            if want == 408:
                error_of(body)
            assert read_to_end(sockets[name]) == (b"", "closed")
        assert 0.45 < time.monotonic() - start < 10 * SLOW
        # A second head has the head's time, not the idle time.
        with e.connect() as s:
            s.sendall(GET + b"\r\n")
            read_answer(s)
            s.sendall(b"GET /health")
            assert read_answer(s)[0] == 408


def test_idle_connections_are_cheap_and_come_back(echo):
    """After a second without a request only the socket is left of a connection, and it serves again."""
    fds = echo.fds()
    held = [echo.connect() for _ in range(50)]
    for _ in range(2):
        for s in held:
            s.sendall(post(b"hello"))
            assert json.loads(read_answer(s)[2])["length"] == 5
        eventually(lambda: echo.fds() - fds <= 50 + 3, 5, "the pairs are closed")
    assert echo.stats()["connections"] == 51
    for s in held:
        s.close()


def test_slow_answers_have_no_deadline():
    with Echo(header_timeout=100, body_timeout=100, idle_timeout=100) as e:
        status, _, body = e.get("/slow?ms=700")
        assert status == 200 and json.loads(body) == {"slow": True}


def test_connection_limit():
    with Echo(max_connections=10) as e:
        held = [e.connect() for _ in range(10)]
        for s in held:
            s.sendall(GET + b"\r\n")
            assert read_answer(s)[0] == 200
        status, headers, body = e.get("/health/live")
        assert status == 503 and "retry-after" in headers and error_of(body)["code"] == "too_many_connections"
        # Far over it, connections are just closed; and it recovers.
        crowd = [e.connect() for _ in range(200)]
        for s in crowd + held:
            s.close()
        eventually(lambda: served(e), 5, "it serves again")


def served(echo):
    try:
        return echo.get("/health/live")[0] == 200
    except OSError:
        return False


def test_thousand_connections():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 8192), hard))
    try:
        with Echo() as e:
            before = e.fds()
            held = [e.connect() for _ in range(1000)]
            for s in held:
                s.sendall(GET + b"\r\n")
            for s in held:
                assert read_answer(s)[0] == 200
            for s in held:
                s.sendall(b"GET /stream?n=3&ms=20 HTTP/1.1\r\nHost: a\r\n\r\n")
            assert e.stats()["connections"] == 1001
            for s in held:
                assert read_answer(s)[2].endswith(b"[DONE]\n\n")
            for s in held:
                s.close()
            eventually(lambda: e.fds() <= before + 3, 10, "all descriptors are closed")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_out_of_descriptors():
    """Accepting pauses, is said once in the log, and goes on when there is room again."""
    with Echo(wrap=["prlimit", "--nofile=64:64"]) as e:
        held = []
        for _ in range(100):
            s = e.connect()
            s.sendall(GET + b"\r\n")
            held.append(s)
        time.sleep(0.5)
        for s in held:
            s.close()
        eventually(lambda: served(e), 10, "it serves again")
        assert 1 <= e.stderr().count("accepting pauses") <= 5


# ---- Disconnects ----

def disconnected(echo, before):
    return lambda: echo.stats()["closed"] - before["closed"] == echo.stats()["started"] - before["started"]


@pytest.mark.parametrize("how", ["fin", "rst"])
@pytest.mark.parametrize("path", ["/slow?ms=60000", "/stream?n=100000&ms=50"])
def test_disconnect_is_noticed_at_once(echo, how, path):
    before = echo.stats()
    sockets = []
    for _ in range(20):
        s = echo.connect()
        s.sendall(b"GET " + path.encode() + b" HTTP/1.1\r\nHost: a\r\n\r\n")
        sockets.append(s)
    eventually(lambda: echo.stats()["started"] - before["started"] == 20, 5, "all have begun")
    assert echo.stats()["active"] == 21
    for s in sockets:
        if how == "rst":
            s.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        s.close()
    eventually(disconnected(echo, before), 5, "all have ended")


def test_disconnect_behind_a_pipelined_request(echo):
    """The FIN is seen although unread bytes lie before it."""
    before = echo.stats()
    s = echo.connect()
    s.sendall(b"GET /slow?ms=60000 HTTP/1.1\r\nHost: a\r\n\r\n" + GET + b"\r\n")
    eventually(lambda: echo.stats()["started"] > before["started"], 5, "it has begun")
    s.close()
    eventually(disconnected(echo, before), 5, "it has ended")


def test_disconnect_inside_head_and_body(echo):
    for data in (b"", b"GET /hea", POST + b"Content-Length: 100\r\n\r\nabc",
                 POST + b"Transfer-Encoding: chunked\r\n\r\n5\r\nab"):
        s = echo.connect()
        s.sendall(data)
        time.sleep(0.02)
        s.close()
    eventually(lambda: echo.stats()["connections"] == 1, 5, "all are gone")


def test_half_close(echo):
    """A client that has shut down its side gets an answer that is there at once; one that is not is cancelled."""
    with echo.connect() as s:
        s.sendall(GET + b"\r\n" + GET + b"\r\n")
        s.shutdown(socket.SHUT_WR)
        out, how = read_to_end(s)
        assert out.count(b"HTTP/1.1 200") == 2 and how == "closed"
    before = echo.stats()
    with echo.connect() as s:
        s.sendall(b"GET /slow?ms=60000 HTTP/1.1\r\nHost: a\r\n\r\n")
        time.sleep(0.05)
        s.shutdown(socket.SHUT_WR)
        assert read_to_end(s)[0] == b""
    eventually(disconnected(echo, before), 1, "it was cancelled")


# ---- Slow readers ----

def test_slow_reader_is_dropped():
    with Echo(stream_buffer=100000) as e:
        s = e.connect(receive_buffer=4096)
        s.sendall(b"GET /stream?n=1000000&ms=1&size=50000 HTTP/1.1\r\nHost: a\r\n\r\n")
        # Meanwhile others are served, also by streams.
        others = 0
        deadline = time.monotonic() + 30 * SLOW
        while e.stats()["dropped_slow"] == 0:
            assert e.get("/burst?n=20")[0] == 200
            others += 1
            assert time.monotonic() < deadline
        stats = e.stats()
        assert others and stats["closed"] == stats["started"]
        assert e.rss() < 60e6 * SLOW
        out, how = read_to_end(s)
        assert how == "reset" and not out.endswith(b"0\r\n\r\n")


@pytest.mark.parametrize("size", [200, 5000])
def test_little_is_written_for_nobody(size):
    """The kernel's buffers are bounded as well: a client that stops reading is found out within a megabyte, not after many."""
    with Echo(stream_buffer=4096) as e:
        s = e.connect(receive_buffer=4096)
        s.sendall(b"GET /stream?n=1000000&ms=0&size=%d HTTP/1.1\r\nHost: a\r\n\r\n" % size)
        eventually(lambda: e.stats()["dropped_slow"] == 1, 20, "it was dropped")
        assert e.stats()["written"] < 1 << 20
        s.close()


def test_slow_reader_that_keeps_up_is_served():
    """Back pressure passes through: a reader that is slow but reads gets every byte."""
    with Echo(stream_buffer=16 << 20) as e:
        with e.connect(receive_buffer=8192) as s:
            s.sendall(b"GET /stream?n=300&ms=1&size=20000 HTTP/1.1\r\nHost: a\r\n\r\n")
            got = 0
            while True:
                data = s.recv(50000)
                got += len(data)
                if data.endswith(b"0\r\n\r\n") or not data:
                    break
                time.sleep(0.002)
            assert got > 300 * 20000


def test_reader_that_stops_is_dropped():
    """A whole answer that nobody reads does not stay for ever."""
    with Echo(idle_timeout=300) as e:
        s = e.connect(receive_buffer=4096)
        s.sendall(b"GET /big?bytes=30000000 HTTP/1.1\r\nHost: a\r\n\r\n")
        eventually(lambda: e.stats()["started"] == 1, 5, "it has begun")
        eventually(lambda: e.stats()["closed"] == 1, 5, "it was dropped")
        s.close()


# ---- Listening ----

def test_address_in_use(echo):
    with pytest.raises(RuntimeError, match=rf"127.0.0.1:{echo.port} is in use"):
        Echo(port=echo.port)


def test_addresses():
    for host, client in (("::1", "::1"), ("[::1]", "::1"), ("localhost", "127.0.0.1"), ("0.0.0.0", "127.0.0.1"),
                         ("", "127.0.0.1"), ("*", "127.0.0.1")):
        try:
            e = Echo(host=host)
        except RuntimeError as error:
            if ":" in host and not os.path.exists("/proc/net/if_inet6"):
                continue
            raise AssertionError(host) from error
        with e:
            data = post(b"")
            peer = json.loads(e.ask(data, host=client)[2])["peer"]
            assert peer.rpartition(":")[0] == ("[::1]" if client == "::1" else peer.rpartition(":")[0])
            assert client in peer
    with pytest.raises(RuntimeError, match="host no.such.host.invalid cannot be resolved"):
        Echo(host="no.such.host.invalid")


def test_port_can_be_reused_at_once():
    e = Echo()
    with e.connect() as s:
        s.sendall(GET + b"\r\n")
        read_answer(s)
        e.stop()
    with Echo(port=e.port) as again:
        assert again.get("/health/live")[0] == 200


# ---- Draining ----

def test_drain():
    """Work goes on to its end, idle connections close, nothing new is accepted, WebSockets get 1012."""
    e = Echo()
    idle, slow, stream = e.connect(), e.connect(), e.connect()
    idle.sendall(GET + b"\r\n")
    read_answer(idle)
    slow.sendall(b"GET /slow?ms=500 HTTP/1.1\r\nHost: a\r\n\r\n")
    stream.sendall(b"GET /stream?n=10&ms=30 HTTP/1.1\r\nHost: a\r\n\r\n")
    ws = Ws(e)
    eventually(lambda: e.stats()["started"] == 2, 5, "both have begun")
    stopping = threading.Thread(target=e.stop)
    stopping.start()
    assert read_to_end(idle) == (b"", "closed")
    with pytest.raises(ConnectionError):
        e.connect()
    assert ws.close_code() == 1012
    ws.send(CLOSE, close_frame(1012))
    assert ws.ended()
    status, headers, body = read_answer(slow)
    assert status == 200 and headers["connection"].lower() == "close" and json.loads(body) == {"slow": True}
    assert read_answer(stream)[2].endswith(b"[DONE]\n\n")
    stopping.join()


def test_end_with_everything_open():
    """Connections in every state are closed, and all memory is freed (ASan looks), when the drain gives up on them."""
    e = Echo()
    held = []
    for data in (b"", b"GET /hea", POST + b"Content-Length: 100\r\n\r\nabc",
                 b"GET /slow?ms=600000 HTTP/1.1\r\nHost: a\r\n\r\n",
                 b"GET /stream?n=1000000&ms=10 HTTP/1.1\r\nHost: a\r\n\r\n", b"\x16", GET + b"\r\n",
                 b"GET /big?bytes=30000000 HTTP/1.1\r\nHost: a\r\n\r\n"):
        s = e.connect()
        s.sendall(data)
        held.append(s)
    sockets = [Ws(e) for _ in range(3)]
    sockets[0].send(TEXT, b"half a mess", fin=False)
    sockets[1].send(TEXT, b"flood 100 10000")
    eventually(lambda: e.stats()["started"] == 3, 5, "all have begun")
    e.stop()
