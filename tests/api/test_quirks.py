"""What breaks real clients of OpenAI-compatible servers, and must not break here."""
import http.client
import json

import pytest

CHAT = "/v1/chat/completions"
HI = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3, "temperature": 0}


def lines(http, body, **more):
    with http.stream("POST", CHAT, json={**HI, "stream": True, **body}, **more) as r:
        assert r.status_code == 200
        return r.headers, [line for line in r.iter_lines()]


def chunks(http, body):
    return [json.loads(line[6:]) for line in lines(http, body)[1] if line.startswith("data: {")]


def test_the_first_delta_is_role_and_empty_content(http):
    assert chunks(http, {})[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}


def test_finish_reason_is_null_until_the_end(http):
    all_ = chunks(http, {})
    assert all(c["choices"][0]["finish_reason"] is None for c in all_[:-1])
    assert all_[-1]["choices"][0]["finish_reason"] in ("stop", "length")


def test_usage_has_a_chunk_of_its_own_with_empty_choices(http):
    *rest, last = chunks(http, {"stream_options": {"include_usage": True}})
    assert last["choices"] == [] and last["usage"]["total_tokens"] > 0
    assert all(c["usage"] is None for c in rest)


def test_continuous_usage_stats(http):
    all_ = chunks(http, {"stream_options": {"include_usage": True, "continuous_usage_stats": True}})
    counts = [c["usage"]["completion_tokens"] for c in all_]
    assert counts == sorted(counts) and counts[-1] > 0


def test_the_stream_ends_with_done_and_a_blank_line(http):
    with http.stream("POST", CHAT, json={**HI, "stream": True}) as r:
        text = "".join(r.iter_text())
    assert text.endswith("data: [DONE]\n\n")
    assert all(part.startswith("data: ") and "\n" not in part for part in text.split("\n\n")[:-1])


def test_a_stream_is_not_buffered_by_proxies(http):
    headers, _ = lines(http, {})
    assert headers["content-type"].startswith("text/event-stream")
    assert headers["cache-control"] == "no-cache"
    assert headers["x-accel-buffering"] == "no"


def test_whole_bodies_have_every_required_field(http):
    r = http.post(CHAT, json=HI).json()
    choice = r["choices"][0]
    assert choice["logprobs"] is None and choice["message"]["refusal"] is None and choice["index"] == 0
    assert all(isinstance(r["usage"][k], int) for k in ("prompt_tokens", "completion_tokens", "total_tokens"))


def test_unknown_fields_and_nulls_are_taken(http):
    nulls = {k: None for k in ("stop", "seed", "tools", "tool_choice", "stream", "stream_options", "n", "top_p", "logprobs",
                               "top_logprobs", "logit_bias", "presence_penalty", "frequency_penalty", "user", "response_format",
                               "max_completion_tokens", "session_id")}
    r = http.post(CHAT, json={**HI, **nulls, "no_such_field": {"a": [1]}, "user": "me", "store": True, "metadata": {}})
    assert r.status_code == 200, r.text


def test_the_developer_role_is_the_system_role(http):
    def tokens(role):
        return http.post("/tokenize", json={"messages": [{"role": role, "content": "Be brief."}, *HI["messages"]]}).json()["tokens"]
    assert tokens("developer") == tokens("system")


@pytest.mark.parametrize("content", ["Hi", [{"type": "text", "text": "Hi"}], [{"type": "text", "text": "H"}, {"type": "text", "text": "i"}]])
def test_content_is_a_string_or_parts(http, content):
    r = http.post(CHAT, json={**HI, "messages": [{"role": "user", "content": content}]})
    assert r.status_code == 200, r.text


def test_an_assistant_may_have_null_content(http):
    r = http.post(CHAT, json={**HI, "messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": None},
                                                 {"role": "user", "content": "Go on"}]})
    assert r.status_code == 200, r.text


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/chat/completions", "/v1/chat/completions/"])
def test_base_urls_with_and_without_v1(http, path):
    assert http.post(path, json=HI).status_code == 200


def test_any_or_no_authorization_when_no_key_is_set(http):
    for headers in ({}, {"authorization": "Bearer dummy"}, {"x-api-key": "dummy"}):
        assert http.post(CHAT, json=HI, headers=headers).status_code == 200


def test_cors(http):
    r = http.options(CHAT, headers={"origin": "http://example.com", "access-control-request-method": "POST",
                                    "access-control-request-headers": "authorization,x-stainless-os"})
    assert r.status_code in (200, 204)
    allowed = r.headers["access-control-allow-headers"]
    assert allowed == "*" or "x-stainless-os" in allowed
    assert r.headers["access-control-allow-origin"] == "*"
    assert http.post(CHAT, json=HI, headers={"origin": "http://example.com"}).headers["access-control-allow-origin"] == "*"
    with http.stream("POST", CHAT, json={**HI, "stream": True}, headers={"origin": "http://example.com"}) as s:
        assert s.headers["access-control-allow-origin"] == "*"


def test_java_clients_offer_h2c(daemon):
    c = http.client.HTTPConnection("127.0.0.1", daemon.port, timeout=60)
    body = json.dumps(HI).encode()
    c.request("POST", CHAT, body=iter([body[:10], body[10:]]), encode_chunked=True,
              headers={"Connection": "Upgrade, HTTP2-Settings", "Upgrade": "h2c", "HTTP2-Settings": "AAMAAABkAAQAAP__",
                       "Transfer-Encoding": "chunked"})
    r = c.getresponse()
    assert r.status == 200
    assert json.loads(r.read())["choices"]
    c.close()


def test_expect_100_continue(daemon):
    import socket
    body = json.dumps(HI).encode()
    with socket.create_connection(("127.0.0.1", daemon.port), timeout=30) as s:
        s.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nExpect: 100-continue\r\nConnection: close\r\n"
                  b"Content-Length: %d\r\n\r\n" % len(body))
        assert s.recv(25).startswith(b"HTTP/1.1 100")
        s.sendall(body)
        rest = b""
        while part := s.recv(65536):
            rest += part
        assert b"200 OK" in rest


def test_http_1_0_gets_a_stream_that_ends_with_the_connection(daemon):
    import socket
    body = json.dumps({**HI, "stream": True}).encode()
    with socket.create_connection(("127.0.0.1", daemon.port), timeout=30) as s:
        s.sendall(b"POST /v1/chat/completions HTTP/1.0\r\nHost: x\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))
        answer = b""
        while part := s.recv(65536):
            answer += part
    head, _, text = answer.partition(b"\r\n\r\n")
    assert b"chunked" not in head.lower()
    assert text.endswith(b"data: [DONE]\n\n")


@pytest.mark.parametrize("path", ["/health", "/v1/models", CHAT, "/nothing", "/"])
def test_head_has_no_body_and_does_not_hang(daemon, path):
    import socket
    with socket.create_connection(("127.0.0.1", daemon.port), timeout=30) as s:
        s.sendall(b"HEAD %s HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n" % path.encode())
        answer = b""
        while part := s.recv(65536):
            answer += part
    assert answer.startswith(b"HTTP/1.1 ")
    assert answer.partition(b"\r\n\r\n")[2] == b""


def test_a_request_id_comes_back(http):
    assert http.post(CHAT, json=HI, headers={"x-request-id": "mine-42"}).headers["x-request-id"] == "mine-42"
    assert http.get("/health").headers["x-request-id"]


def test_the_models_list_has_what_clients_look_for(http):
    r = http.get("/v1/models").json()
    assert r["object"] == "list"
    m = r["data"][0]
    assert m["object"] == "model" and isinstance(m["created"], int) and m["owned_by"]
    assert m["max_model_len"] == 8192


def test_the_chat_page_is_there_and_whole(http):
    r = http.get("/")
    assert r.status_code == 200 and r.headers["content-type"].startswith("text/html")
    assert "<title>Kvasir</title>" in r.text
    for outside in ("http://", "https://", "//cdn"):
        assert outside not in r.text.replace("http://www.w3.org/2000/svg", "")  # a name, nothing that is fetched


def test_tokenize_and_detokenize_are_inverse(http):
    text = "Grüße, 世界! <|im_end|> 🙂"
    ids = http.post("/tokenize", json={"content": text}).json()
    assert ids["count"] == len(ids["tokens"])
    assert http.post("/detokenize", json={"tokens": ids["tokens"]}).json()["content"] == text
    special = http.post("/tokenize", json={"content": text, "parse_special": True}).json()
    assert special["count"] < ids["count"]
