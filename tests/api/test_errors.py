"""Nonsense: each is answered with a 4xx and an error of four keys, and the daemon goes on."""
import json
import socket

import pytest

from daemon import SLOW

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
HI = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1}


def with_(**more):
    return json.dumps({**HI, **more})


BODIES = [
    (CHAT, "", 400), (CHAT, "{", 400), (CHAT, "[]", 400), (CHAT, "null", 400), (CHAT, "5", 400), (CHAT, "\xff\xfe", 400),
    (CHAT, '{"a":' * 10000, 400), (CHAT, '{"messages":[{"role":"user","content":"\\ud800"}]}', 400),
    (CHAT, '{"messages":[],"messages":[]}', 400),
    (CHAT, "{}", 400), (CHAT, '{"messages":"Hi"}', 400), (CHAT, '{"messages":[]}', 400), (CHAT, '{"messages":[5]}', 400),
    (CHAT, '{"messages":[{}]}', 400), (CHAT, '{"messages":[{"role":5,"content":"x"}]}', 400),
    (CHAT, '{"messages":[{"role":"user","content":5}]}', 400),
    (CHAT, '{"messages":[{"role":"user","content":[{"type":"image_url","image_url":{"url":"x"}}]}]}', 400),
    (CHAT, with_(max_tokens="many"), 400), (CHAT, with_(max_tokens=-2), 400), (CHAT, with_(max_tokens=1.5), 400),
    (CHAT, with_(max_tokens=1e30), 400), (CHAT, with_(temperature=-1), 400), (CHAT, with_(temperature="x"), 400),
    (CHAT, with_(top_p=2), 400), (CHAT, with_(n=0), 400), (CHAT, with_(n=100000), 400), (CHAT, with_(stop=5), 400),
    (CHAT, with_(stop=[[]]), 400), (CHAT, with_(stream="yes"), 400), (CHAT, with_(top_logprobs=3), 400),
    (CHAT, with_(logprobs=True, top_logprobs=1000), 400), (CHAT, with_(logit_bias={"x": 1}), 400),
    (CHAT, with_(logit_bias={"99999999": 1}), 400), (CHAT, with_(logit_bias=[5]), 400), (CHAT, with_(seed="x"), 400),
    (CHAT, with_(stream_options={"include_usage": True}), 400), (CHAT, with_(session_id="no such"), 400),
    (CHAT, with_(presence_penalty=3), 400), (CHAT, with_(frequency_penalty=-3), 400),
    (CHAT, with_(max_tokens=100000), 400),
    (TEXT, "{}", 400), (TEXT, '{"prompt":5}', 400), (TEXT, '{"prompt":[1,"a"]}', 400), (TEXT, '{"prompt":[-1]}', 400),
    (TEXT, '{"prompt":[99999999]}', 400), (TEXT, '{"prompt":[[1],["a"]]}', 400), (TEXT, '{"prompt":[]}', 400),
    (TEXT, '{"prompt":"x","logprobs":1000}', 400), (TEXT, '{"prompt":"x","logprobs":"x"}', 400),
    ("/tokenize", "{}", 400), ("/tokenize", '{"content":5}', 400),
    ("/detokenize", "{}", 400), ("/detokenize", '{"tokens":["a"]}', 400), ("/detokenize", '{"tokens":[99999999]}', 400),
    ("/detokenize", '{"tokens":[-1]}', 400),
    ("/v1/sessions", '{"id":5}', 400), ("/v1/sessions", "[", 400),
    ("/v1/responses", "{}", 400), ("/v1/responses", '{"input":5}', 400),
    ("/v1/responses", '{"input":"x","previous_response_id":"none"}', 404),
]


def assert_error(status, headers, body, expected=None):
    assert 400 <= status < 500 or status == expected, (status, body[:300])
    if expected:
        assert status == expected or {status, expected} == {400, 404}, (status, body[:300])
    assert headers["content-type"].startswith("application/json")
    error = json.loads(body)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert isinstance(error["message"], str) and error["message"]
    assert isinstance(error["type"], str)


@pytest.mark.parametrize("path,body,status", BODIES, ids=lambda v: str(v)[:40])
def test_a_body_that_makes_no_sense(http, path, body, status):
    data = body.encode("latin-1") if "\xff" in body else body.encode()
    r = http.post(path, content=data, headers={"content-type": "application/json"})
    assert_error(r.status_code, r.headers, r.text, status)


@pytest.mark.parametrize("method,path,status", [
    ("GET", "/nothing", 404), ("POST", "/v1/nothing", 404), ("GET", CHAT, 405), ("DELETE", "/v1/models", 405),
    ("PUT", CHAT, 405), ("GET", "/v1/models/none", 404), ("GET", "/v1/sessions/none", 404), ("POST", "/health/live", 405),
    ("GET", "/../../etc/passwd", 404), ("GET", "/%00", 400), ("GET", "/v1/%ff", 404),
])
def test_a_place_that_is_not_there(http, method, path, status):
    r = http.request(method, path)
    assert_error(r.status_code, r.headers, r.text)
    assert r.status_code in (status, 400)
    if r.status_code == 405:
        assert r.headers["allow"]


def raw(daemon, data, seconds=15):
    with socket.create_connection(("127.0.0.1", daemon.port)) as s:
        s.settimeout(seconds * SLOW)
        try:
            s.sendall(data)
            answer = b""
            while part := s.recv(65536):
                answer += part
        except ConnectionResetError:
            pass
        return answer


H = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
RAW = {
    "two lengths": H + b"Content-Length: 2\r\nContent-Length: 3\r\n\r\n{}",
    "length and chunked": H + b"Content-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n",
    "negative length": H + b"Content-Length: -1\r\n\r\n",
    "huge length": H + b"Content-Length: 99999999999999999999\r\n\r\n",
    "body over the limit": H + b"Content-Length: 999999999\r\n\r\n",
    "space before colon": H + b"Content-Length : 2\r\n\r\n{}",
    "unknown coding": H + b"Transfer-Encoding: gzip\r\n\r\n",
    "bad chunk": H + b"Transfer-Encoding: chunked\r\nConnection: close\r\n\r\nzz\r\n{}\r\n0\r\n\r\n",
    "nul in head": b"GET /health\0 HTTP/1.1\r\nHost: x\r\n\r\n",
    "no version": b"GET /health\r\n\r\n",
    "bare newline": b"GET /health HTTP/1.1\nHost: x\n\n",
    "binary": bytes(range(256)) * 4 + b"\r\n\r\n",
    "long head": b"GET /health HTTP/1.1\r\nHost: x\r\nX: " + b"a" * 100000 + b"\r\n\r\n",
    "folded header": b"GET /health HTTP/1.1\r\nHost: x\r\nX: a\r\n b\r\n\r\n",
}


@pytest.mark.parametrize("path", [CHAT, TEXT, "/tokenize", "/v1/responses", "/v1/sessions"])
def test_a_body_that_is_compressed_is_told_so(http, path):
    for encoding in ("gzip", "br, gzip", "identity, gzip"):
        r = http.post(path, content=b"\x1f\x8b", headers={"content-encoding": encoding})
        assert r.status_code == 415 and r.json()["error"]["code"] == "unsupported_content_encoding", encoding
        assert r.headers["accept-encoding"] == "identity"
    assert http.post("/tokenize", json={"content": "x"}, headers={"content-encoding": "Identity"}).status_code == 200


def test_the_server_as_a_whole_has_options(http):
    with socket.create_connection((http.base_url.host, http.base_url.port)) as s:
        s.settimeout(10 * SLOW)
        s.sendall(b"OPTIONS * HTTP/1.1\r\nHost: a\r\n\r\n")
        head = s.recv(4096)
        assert head.startswith(b"HTTP/1.1 204 ") and b"Allow: GET, HEAD, POST, DELETE, OPTIONS\r\n" in head


@pytest.mark.parametrize("body,param", [({"max_completion_tokens": 0}, "max_completion_tokens"), ({"max_tokens": 0}, "max_tokens")])
def test_the_field_that_was_given_is_named(http, body, param):
    r = http.post(CHAT, json={"messages": HI["messages"], **body})
    assert r.status_code == 400 and r.json()["error"]["param"] == param


@pytest.mark.parametrize("name", RAW)
def test_framing_that_makes_no_sense(daemon, name):
    answer = raw(daemon, RAW[name])
    assert answer, "no answer"
    head, _, body = answer.partition(b"\r\n\r\n")
    status = int(head.split()[1])
    headers = {k.strip().lower(): v.strip() for k, _, v in (line.partition(":") for line in head.decode().split("\r\n")[1:])}
    assert_error(status, headers, body, 501 if name == "unknown coding" else None)  # RFC 9112, 6.1
    assert headers.get("connection", "").lower() == "close"


def test_after_all_that_it_still_answers(daemon, http):
    daemon.wait_idle()
    assert http.post(TEXT, json={"prompt": "Hi", "max_tokens": 2}).status_code == 200
