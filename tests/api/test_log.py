"""What is in the log: no secrets, and no line that a client has written."""
import json
import re
import socket
import subprocess
import sys

import httpx
import pytest
import websockets
from daemon import BIN, MODEL, SLOW, Daemon
from faults import tiny_model
from wire import Wire

SECRET, OTHER = "sk-very-secret-7d41", "sk-other-secret-99aa"
WORDS = "the confession of a burglar"
LINE = re.compile(r'^(time=[0-9T:.Z-]+ )?level=[a-z]+ event=[a-z_]+( [a-z_]+=([^\s"=\\\x00-\x1f\x7f-\uffff]+|"([^"\\]|\\.)*"))*$')
FORGED = "level=error event=forged"
MARKS = ["\n", "\r", "\r\n", "\x00", "\x0b", "\x1b[31m", "\x7f", "\x85", "\u2028", "\u2029", '" ']

pytestmark = pytest.mark.no_model


@pytest.fixture(scope="module")
def logged(tmp_path_factory):
    keys = json.dumps({"keys": [{"name": "ann", "key": SECRET}, {"name": "ops", "key": OTHER, "admin": True}]})
    with Daemon("--api-keys", keys, "--log-level", "debug", "--strict-model",
                model=tiny_model(str(tmp_path_factory.mktemp("tiny")))) as d:
        d.headers = {"authorization": f"Bearer {OTHER}"}
        yield d


def every_line(d):
    """Lines as the most generous reader takes them: str.splitlines knows ten kinds of line ends."""
    text = d.stderr()
    assert text.endswith("\n")
    for line in text.splitlines():
        assert LINE.match(line), repr(line)
        assert not line.startswith(FORGED)
    return text


def raw(d, data):
    with socket.create_connection(("127.0.0.1", d.port), timeout=30 * SLOW) as s:
        s.sendall(data)
        s.shutdown(socket.SHUT_WR)
        answer = b""
        while part := s.recv(65536):
            answer += part
    return answer


@pytest.mark.parametrize("mark", MARKS, ids=ascii)
def test_no_client_writes_a_line_of_its_own(logged, mark):
    d, text = logged, f"a{mark}{FORGED} x=1"
    with httpx.Client(base_url=d.url, timeout=60 * SLOW, headers={"authorization": f"Bearer {SECRET}"}) as c:
        chat = {"messages": [{"role": "user", "content": text}], "max_tokens": 1}
        c.post("/v1/chat/completions", json=chat)
        assert c.post("/v1/chat/completions", json={**chat, "model": text}).status_code == 404
        for name in ("session_id", "stop", "user", "cache_salt", "tool_choice", text):
            c.post("/v1/chat/completions", json={**chat, name: text})
        c.post("/v1/sessions", json={"id": text})
        c.post("/v1/responses", json={"input": text, "previous_response_id": text})
        quoted = "".join(f"%{b:02x}" for b in text.encode())
        for path in (f"/{quoted}", f"/v1/models/{quoted}", f"/v1/sessions/{quoted}", f"/v1/sessions?after={quoted}"):
            c.get(path)
    wire = text.encode()
    for field in (b"x-request-id", b"x-session-token", b"user-agent", b"authorization", b"host", b"origin", b"x-forwarded-for"):
        raw(d, b"POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\nX-Api-Key: " + SECRET.encode() + b"\r\n" + field + b": " + wire +
            b"\r\nContent-Length: 2\r\n\r\n{}")
    raw(d, b"GET /" + wire + b" HTTP/1.1\r\nHost: a\r\n\r\n")
    raw(d, wire + b" / HTTP/1.1\r\nHost: a\r\n\r\n")
    with Wire(d, additional_headers={"x-api-key": SECRET}) as w:
        for body in ({"model": text}, {"session_id": text}, {"previous_response_id": text}, {"stream_id": text}):
            w.send("Hi", **body)
            w.event()
    every_line(d)


def test_what_the_engine_refuses_is_logged_with_its_reason(logged):
    d = logged
    body = {"messages": [{"role": "user", "content": "Hi"}], "session_id": "never-made"}
    assert httpx.post(d.url + "/v1/chat/completions", json=body, headers={"x-api-key": SECRET}).status_code == 404
    line = [x for x in every_line(d).splitlines() if "session=never-made" in x][-1]
    assert "status=404" in line and "code=session_not_found param=session_id" in line


def test_no_secret_and_no_words_of_a_conversation_are_logged(logged):
    d = logged
    body = {"messages": [{"role": "user", "content": WORDS}], "max_tokens": 2}
    for headers in ({"authorization": f"Bearer {SECRET}"}, {"x-api-key": SECRET}, {"authorization": f"Bearer {SECRET}x"},
                    {"authorization": f"Basic {SECRET}"}, {"x-api-key": f"{SECRET}, a"}):
        httpx.post(d.url + "/v1/chat/completions", json=body, headers=headers)
        httpx.post(d.url + "/v1/chat/completions", json={**body, "n": "x"}, headers=headers)
    with Wire(d, additional_headers={"authorization": f"Bearer {SECRET}"}) as w:
        w.ask(WORDS)
    with pytest.raises(websockets.InvalidStatus):
        Wire(d, additional_headers={"authorization": f"Bearer {SECRET}x"})
    text = every_line(d)
    assert "event=request" in text and "key=ann" in text, "the requests are logged"
    for secret in (SECRET, OTHER, WORDS):
        assert secret not in text and secret not in d.stdout()


def test_no_secret_is_shown_by_the_commands():
    def run(*args, env=None):
        r = subprocess.run([BIN, "serve", "--model", MODEL or sys.executable, *args], capture_output=True, text=True, env=env,
                           timeout=20 * SLOW)
        return r.stdout + r.stderr
    keys = json.dumps({"keys": [{"name": "ann", "key": SECRET}]})
    assert SECRET not in run("--api-key", SECRET, "--print-config")
    assert SECRET not in run("--api-keys", keys, "--print-config")
    assert SECRET not in run("--api-keys", keys[:-1], "--check")
    assert SECRET not in run("--print-config", env={"KVASIR_API_KEY": SECRET})
    assert SECRET not in run("--print-config", env={"KVASIR_API_KEYS": keys})


def test_what_operators_see_is_behind_an_admin_key(logged):
    d = logged
    for path in ("/metrics", "/v1/kv", "/v1/sessions"):
        assert httpx.get(d.url + path).status_code == 401
    with httpx.Client(base_url=d.url, headers={"x-api-key": OTHER}) as ops, httpx.Client(base_url=d.url, headers={"x-api-key": SECRET}) as ann:
        ops.post("/v1/sessions", json={"id": "of-ops"})
        assert {k["key"] for k in ops.get("/v1/kv").json()["keys"]} >= {"ann", "ops"}
        assert {k["key"] for k in ann.get("/v1/kv").json()["keys"]} == {"ann"}
        assert "of-ops" not in ann.get("/v1/kv").text and "ops" not in ann.get("/metrics").text
    for path in ("/health/live", "/health/ready"):
        assert httpx.get(d.url + path).status_code == 200, "a balancer has no key"
