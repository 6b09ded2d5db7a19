"""The raw cases of the probe against the daemon itself: first on a connection, and behind a request that was served."""
import http.client
import socket

import pytest

from daemon import SLOW
from transport import load_probe

GET = b"GET /health/live HTTP/1.1\r\nHost: a\r\n\r\n"


@pytest.fixture(scope="module")
def probe():
    return load_probe()


def test_the_probe_passes_whole(probe, daemon, capsys):
    assert probe.run(probe.CASES, daemon.port) == 0, capsys.readouterr().out


def test_the_same_faults_are_refused_as_later_requests(probe, daemon):
    failed = []
    for name, kind, want, data in probe.CASES:
        with socket.create_connection(("127.0.0.1", daemon.port)) as s:
            s.settimeout(2 * SLOW)
            s.sendall(GET)
            first = http.client.HTTPResponse(s)
            first.begin()
            assert first.status == 200 and first.read()
            out, closed = b"", True
            try:
                s.sendall(data)
                while got := s.recv(65536):
                    out += got
                    if b"\r\n\r\n" in out:
                        s.settimeout(0.3 * SLOW)
            except socket.timeout:
                closed = False
            except OSError:
                pass
        if why := probe.judge(kind, want, out, closed):
            failed.append(f"{name}: {why}")
    assert not failed, "\n".join(failed)


@pytest.mark.parametrize("number", ["1e999", "9" * 400, "-" + "9" * 30])
def test_numbers_that_no_program_can_hold_are_named(http, number):
    r = http.post("/v1/completions", content='{"prompt":"a","seed":%s}' % number, headers={"content-type": "application/json"})
    assert r.status_code == 400 and r.json()["error"]["param"] == "seed"


def test_depth_is_bounded(http):
    for depth, n in ((100, 200), (200, 400), (100000, 400)):
        body = '{"prompt":"a","max_tokens":1,"x":%s%s}' % ("[" * depth, "]" * depth)
        assert http.post("/v1/completions", content=body, headers={"content-type": "application/json"}).status_code == n, depth
