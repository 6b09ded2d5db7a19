"""What breaks real clients of OpenAI-compatible servers, and must not break here.

`quirk(N)` is case N of $KVASIR_SHARED/client-quirks.md, where the evidence is. Tests elsewhere are marked as well; the last test
here sees to it that none of the cases is left out.
"""
import glob
import http.client
import json
import os
import re
import socket
import subprocess

import openai
import pytest

from daemon import BIN, MODEL, ROOT, SLOW, Daemon
from transport import read_chunks, read_head

CHAT = "/v1/chat/completions"
HI = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3, "temperature": 0}


def lines(http, body, **more):
    with http.stream("POST", CHAT, json={**HI, "stream": True, **body}, **more) as r:
        assert r.status_code == 200
        return r.headers, [line for line in r.iter_lines()]


def chunks(http, body):
    return [json.loads(line[6:]) for line in lines(http, body)[1] if line.startswith("data: {")]


@pytest.mark.quirk(1)
def test_the_first_delta_is_role_and_empty_content(http):
    assert chunks(http, {})[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}


@pytest.mark.quirk(3)
def test_finish_reason_is_null_until_the_end(http):
    all_ = chunks(http, {})
    assert all("finish_reason" in c["choices"][0] and c["choices"][0]["finish_reason"] is None for c in all_[:-1])
    assert all_[-1]["choices"][0]["finish_reason"] in ("stop", "length")


@pytest.mark.quirk(8)
def test_usage_has_a_chunk_of_its_own_with_empty_choices(http):
    *rest, last = chunks(http, {"stream_options": {"include_usage": True}})
    assert last["choices"] == [] and last["usage"]["total_tokens"] > 0
    assert all(c["usage"] is None for c in rest)


@pytest.mark.quirk(11)
def test_continuous_usage_stats(http):
    all_ = chunks(http, {"stream_options": {"include_usage": True, "continuous_usage_stats": True}})
    counts = [c["usage"]["completion_tokens"] for c in all_]
    assert counts == sorted(counts) and counts[-1] > 0


@pytest.mark.quirk(12)
def test_the_stream_ends_with_done_and_a_blank_line(http):
    with http.stream("POST", CHAT, json={**HI, "stream": True}) as r:
        text = "".join(r.iter_text())
    assert text.endswith("data: [DONE]\n\n")
    assert all(part.startswith("data: ") and "\n" not in part for part in text.split("\n\n")[:-1])


@pytest.mark.quirk(39)
def test_a_stream_is_not_buffered_by_proxies(http):
    headers, _ = lines(http, {})
    assert headers["content-type"].startswith("text/event-stream")
    assert headers["cache-control"] == "no-cache"
    assert headers["x-accel-buffering"] == "no"


@pytest.mark.quirk(20, 21)
def test_whole_bodies_have_every_required_field(http):
    r = http.post(CHAT, json=HI).json()
    choice = r["choices"][0]
    assert choice["logprobs"] is None and choice["message"]["refusal"] is None and choice["index"] == 0
    assert all(isinstance(r["usage"][k], int) for k in ("prompt_tokens", "completion_tokens", "total_tokens"))


@pytest.mark.quirk(24, 25)
def test_unknown_fields_and_nulls_are_taken(http):
    nulls = {k: None for k in ("stop", "seed", "tools", "tool_choice", "stream", "stream_options", "n", "top_p", "logprobs",
                               "top_logprobs", "logit_bias", "presence_penalty", "frequency_penalty", "user", "response_format",
                               "max_completion_tokens", "session_id")}
    r = http.post(CHAT, json={**HI, **nulls, "no_such_field": {"a": [1]}, "user": "me", "store": True, "metadata": {}})
    assert r.status_code == 200, r.text


@pytest.mark.quirk(27)
def test_the_developer_role_is_the_system_role(http):
    def tokens(role):
        return http.post("/tokenize", json={"messages": [{"role": role, "content": "Be brief."}, *HI["messages"]]}).json()["tokens"]
    assert tokens("developer") == tokens("system")


@pytest.mark.quirk(28)
@pytest.mark.parametrize("content", ["Hi", [{"type": "text", "text": "Hi"}], [{"type": "text", "text": "H"}, {"type": "text", "text": "i"}]])
def test_content_is_a_string_or_parts(http, content):
    r = http.post(CHAT, json={**HI, "messages": [{"role": "user", "content": content}]})
    assert r.status_code == 200, r.text


@pytest.mark.quirk(28)
def test_an_assistant_may_have_null_content(http):
    r = http.post(CHAT, json={**HI, "messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": None},
                                                 {"role": "user", "content": "Go on"}]})
    assert r.status_code == 200, r.text


@pytest.mark.quirk(31)
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/chat/completions", "/v1/chat/completions/"])
def test_base_urls_with_and_without_v1(http, path):
    assert http.post(path, json=HI).status_code == 200


@pytest.mark.quirk(34)
def test_any_or_no_authorization_when_no_key_is_set(http):
    for headers in ({}, {"authorization": "Bearer dummy"}, {"x-api-key": "dummy"}):
        assert http.post(CHAT, json=HI, headers=headers).status_code == 200


@pytest.mark.quirk(37)
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


@pytest.mark.quirk(35)
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


@pytest.mark.quirk(36)
def test_expect_100_continue(daemon):
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


@pytest.mark.quirk(40)
def test_http_1_0_gets_a_stream_that_ends_with_the_connection(daemon):
    body = json.dumps({**HI, "stream": True}).encode()
    with socket.create_connection(("127.0.0.1", daemon.port), timeout=30) as s:
        s.sendall(b"POST /v1/chat/completions HTTP/1.0\r\nHost: x\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))
        answer = b""
        while part := s.recv(65536):
            answer += part
    head, _, text = answer.partition(b"\r\n\r\n")
    assert b"chunked" not in head.lower()
    assert text.endswith(b"data: [DONE]\n\n")


@pytest.mark.quirk(42)
@pytest.mark.parametrize("path", ["/health", "/v1/models", CHAT, "/nothing", "/"])
def test_head_has_no_body_and_does_not_hang(daemon, path):
    with socket.create_connection(("127.0.0.1", daemon.port), timeout=30) as s:
        s.sendall(b"HEAD %s HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n" % path.encode())
        answer = b""
        while part := s.recv(65536):
            answer += part
    assert answer.startswith(b"HTTP/1.1 ")
    assert answer.partition(b"\r\n\r\n")[2] == b""


@pytest.mark.quirk(41)
def test_a_request_id_comes_back(http):
    assert http.post(CHAT, json=HI, headers={"x-request-id": "mine-42"}).headers["x-request-id"] == "mine-42"
    assert http.get("/health").headers["x-request-id"]


@pytest.mark.quirk(32)
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


# ---- Shape of streams ----

@pytest.mark.quirk(2)
def test_only_the_first_delta_has_a_role(http):
    first, *rest = chunks(http, {})
    assert first["choices"][0]["delta"]["role"] == "assistant"
    assert rest and not any("role" in c["choices"][0]["delta"] for c in rest)


@pytest.mark.quirk(4)
def test_no_finish_reason_that_clients_do_not_know(http):
    for body in ({}, {"max_tokens": 200, "stop": ["e"]}, {"max_tokens": 1}, {"n": 2}):
        reasons = {c["finish_reason"] for chunk in chunks(http, body) for c in chunk["choices"]}
        assert reasons <= {None, "stop", "length", "tool_calls", "content_filter"}, reasons
        whole = http.post(CHAT, json={**HI, **body}).json()["choices"]
        assert {c["finish_reason"] for c in whole} <= {"stop", "length"}


WEATHER = [{"type": "function", "function": {"name": "weather", "parameters": {
    "type": "object", "properties": {"in": {"enum": ["Oslo", "Rome"]}}, "required": ["in"], "additionalProperties": False}}}]
CALL = {"tools": WEATHER, "tool_choice": "required", "parallel_tool_calls": False, "max_tokens": 100}


@pytest.mark.quirk(6)
def test_streamed_calls_are_numbered_and_named_once(http):
    deltas = [d for c in chunks(http, CALL) for d in c["choices"][0]["delta"].get("tool_calls", [])]
    assert len(deltas) > 1 and all(type(d["index"]) is int for d in deltas)
    first, *rest = deltas
    assert first["id"] and first["type"] == "function" and first["function"]["name"] == "weather"
    assert not any("id" in d or "type" in d or "name" in d["function"] for d in rest)
    assert json.loads("".join(d["function"]["arguments"] for d in deltas))["in"] in ("Oslo", "Rome")


@pytest.mark.quirk(7)
def test_whole_calls_have_no_index(http):
    call, = http.post(CHAT, json={**HI, **CALL}).json()["choices"][0]["message"]["tool_calls"]
    assert set(call) == {"id", "type", "function"} and isinstance(call["function"]["arguments"], str)


@pytest.mark.quirk(9, 10)
def test_there_are_always_choices(http):
    for more in ({}, {"n": 2}, {"stream_options": None}, {"stream_options": {"include_usage": False}}, CALL):
        assert all(len(c["choices"]) == 1 for c in chunks(http, more))
    assert len(http.post(CHAT, json=HI).json()["choices"]) == 1
    assert len(http.post("/v1/completions", json={"prompt": "a", "max_tokens": 1}).json()["choices"]) == 1


@pytest.mark.quirk(13)
def test_each_chunk_on_the_wire_is_whole_events(daemon):
    body = json.dumps({**HI, "stream": True}).encode()
    with socket.create_connection(("127.0.0.1", daemon.port), timeout=60 * SLOW) as s:
        s.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))
        status, headers, rest = read_head(s)
        assert headers["transfer-encoding"] == "chunked"
        pieces, _ = read_chunks(s, rest)
    assert len(pieces) > 1
    for piece in pieces:
        assert piece.startswith(b"data: ") and piece.endswith(b"\n\n")


@pytest.mark.quirk(14, 17)
def test_a_chat_stream_has_no_comments_and_no_event_names(http):
    assert all(line == "" or line.startswith("data: ") for line in lines(http, {"max_tokens": 30})[1])


@pytest.mark.quirk(17, 23)
def test_responses_have_event_names_and_their_nulls(http):
    body = {"input": "Hi", "max_output_tokens": 3, "ignore_eos": True}
    whole = http.post("/v1/responses", json=body).json()
    assert whole["error"] is None and "incomplete_details" in whole
    with http.stream("POST", "/v1/responses", json={**body, "stream": True}) as r:
        events = [e.split("\n") for e in "".join(r.iter_text()).split("\n\n") if e]
    for name, data in events:
        assert name == "event: " + json.loads(data[6:])["type"]
    last = json.loads(events[-1][1][6:])["response"]
    assert last["error"] is None and last["incomplete_details"] == {"reason": "max_output_tokens"}


@pytest.mark.quirk(15)
def test_a_failure_in_a_stream_is_an_event(daemon, http):
    """Here its time runs out."""
    body = {"max_tokens": 5000, "timeout": 1, "ignore_eos": True}
    *_, error, done = [line for line in lines(http, body)[1] if line]
    assert done == "data: [DONE]"
    error = json.loads(error[6:])["error"]
    assert set(error) == {"message", "type", "param", "code"} and error["code"] == "request_timeout"
    with openai.OpenAI(base_url=daemon.url + "/v1", api_key="none", max_retries=0) as client:
        with pytest.raises(openai.APIError, match="did not end"):
            for _ in client.chat.completions.create(model="any", messages=HI["messages"], stream=True, max_tokens=5000,
                                                    extra_body={"timeout": 1, "ignore_eos": True}):
                pass


@pytest.mark.quirk(16)
@pytest.mark.parametrize("body,code", [
    ({"messages": [{"role": "user", "content": "word " * 9000}]}, "context_length_exceeded"),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "no such"}}}}, None),
    ({"logprobs": True, "top_logprobs": 1000}, None),
], ids=["context", "schema", "logprobs"])
def test_what_is_wrong_from_the_start_is_no_stream(http, body, code):
    r = http.post(CHAT, json={**HI, "stream": True, **body})
    assert r.status_code == 400 and r.headers["content-type"] == "application/json"
    assert code in (None, r.json()["error"]["code"])


@pytest.mark.quirk(18)
@pytest.mark.parametrize("path,body", [(CHAT, HI), ("/v1/completions", {"prompt": "Hi", "max_tokens": 3})])
def test_all_chunks_are_of_one_answer(http, path, body):
    with http.stream("POST", path, json={**body, "stream": True}) as r:
        all_ = [json.loads(line[6:]) for line in r.iter_lines() if line.startswith("data: {")]
    for key in ("id", "created", "model", "object", "system_fingerprint"):
        assert len({c[key] for c in all_}) == 1, key
    assert "cmpl" in all_[0]["id"] and all_[0]["system_fingerprint"].startswith("b")


# ---- Bodies ----

@pytest.mark.quirk(20, 21)
def test_whole_completions_have_every_required_field(http):
    r = http.post("/v1/completions", json={"prompt": "Hi", "max_tokens": 2}).json()
    choice = r["choices"][0]
    assert choice["logprobs"] is None and choice["finish_reason"] in ("stop", "length") and choice["index"] == 0
    assert all(isinstance(r["usage"][k], int) for k in ("prompt_tokens", "completion_tokens", "total_tokens"))


@pytest.mark.quirk(22)
@pytest.mark.parametrize("request_,status", [
    (b"GET / HTTP/1.1\r\n\r\n", 400), (b"GET / HTTP/3.0\r\nHost: a\r\n\r\n", 505), (b"GET /nothing HTTP/1.1\r\nHost: a\r\n\r\n", 404),
    (b"GET /v1/completions HTTP/1.1\r\nHost: a\r\n\r\n", 405), (b"GET / HTTP/1.1\r\nHost: a\r\nA: " + b"a" * 40000 + b"\r\n\r\n", 431),
    (b"GET /" + b"a" * 40000 + b" HTTP/1.1\r\nHost: a\r\n\r\n", (414, 431)),
    (b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 99999999\r\n\r\n", 413),
    (b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 2\r\n\r\n{x", 400),
], ids=str)
def test_every_refusal_has_the_error_object(daemon, request_, status):
    with socket.create_connection(("127.0.0.1", daemon.port), timeout=30 * SLOW) as s:
        s.sendall(request_)
        got, headers, body = read_head(s)
        while len(body) < int(headers["content-length"]):
            body += s.recv(65536)
    assert got in (status if isinstance(status, tuple) else (status,)), (got, body)
    assert set(json.loads(body)["error"]) == {"message", "type", "param", "code"}


# ---- Requests ----

@pytest.mark.quirk(25)
def test_nulls_of_completions_and_responses_are_absences(http):
    nulls = {k: None for k in ("stop", "seed", "stream", "stream_options", "n", "top_p", "logprobs", "echo", "suffix", "best_of",
                               "logit_bias", "presence_penalty", "user", "session_id", "cache_salt", "timeout")}
    r = http.post("/v1/completions", json={"prompt": "a", "max_tokens": 1, **nulls})
    assert r.status_code == 200, r.text
    nulls = {k: None for k in ("instructions", "previous_response_id", "tools", "tool_choice", "text", "metadata", "include", "store",
                               "reasoning", "truncation", "stream", "temperature", "background", "user")}
    r = http.post("/v1/responses", json={"input": "a", "max_output_tokens": 1, **nulls})
    assert r.status_code == 200, r.text


@pytest.mark.quirk(28)
@pytest.mark.parametrize("content", [{"content": ""}, {"content": None}, {}], ids=str)
def test_an_assistant_that_called_tools_has_no_content(http, content):
    call = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"in":"Rome"}'}}
    r = http.post(CHAT, json={**HI, "messages": [*HI["messages"], {"role": "assistant", **content, "tool_calls": [call]},
                                                 {"role": "tool", "tool_call_id": "call_1", "content": "rain"}]})
    assert r.status_code == 200, r.text


@pytest.mark.quirk(29)
def test_stream_options_belong_to_streams(http):
    for more in ({"stream": False}, {}):
        r = http.post(CHAT, json={**HI, **more, "stream_options": {"include_usage": True}})
        assert r.status_code == 400 and r.json()["error"]["param"] == "stream_options"


@pytest.mark.quirk(30)
def test_embeddings_which_there_are_none_of_are_never_a_200(http):
    for path in ("/v1/embeddings", "/embeddings"):
        r = http.post(path, json={"model": "any", "input": [[1, 2]], "encoding_format": "base64"})
        assert r.status_code == 404 and set(r.json()["error"]) == {"message", "type", "param", "code"}


@pytest.mark.quirk(33)
def test_any_model_is_taken_unless_the_server_is_strict(http):
    assert http.post(CHAT, json={**HI, "model": "gpt-17"}).status_code == 200
    with Daemon("--strict-model", "--model-name", "mine") as d, openai.OpenAI(base_url=d.url + "/v1", api_key="x", max_retries=0) as c:
        c.chat.completions.create(model="mine", messages=HI["messages"], max_tokens=1)
        with pytest.raises(openai.NotFoundError) as e:
            c.chat.completions.create(model="gpt-17", messages=HI["messages"], max_tokens=1)
        assert e.value.code == "model_not_found" and "gpt-17" in e.value.message


# ---- Transport ----

@pytest.mark.quirk(36)
def test_curl_sends_a_large_body(daemon, tmp_path):
    body = tmp_path / "body.json"
    body.write_text(json.dumps({"content": "word " * 300000}))
    r = subprocess.run(["curl", "-sS", "-w", "%{http_code}", "-o", os.devnull, "-d", f"@{body}", daemon.url + "/tokenize"],
                       capture_output=True, text=True, timeout=60 * SLOW)
    assert r.stdout == "200", r.stderr


@pytest.mark.quirk(37)
def test_any_origin_is_not_offered_credentials(http):
    for r in (http.options(CHAT, headers={"origin": "http://a", "access-control-request-method": "POST"}),
              http.post(CHAT, json=HI, headers={"origin": "http://a"})):
        assert r.headers["access-control-allow-origin"] == "*" and "access-control-allow-credentials" not in r.headers


@pytest.mark.quirk(38)
@pytest.mark.no_model
def test_idle_connections_outlast_the_pools_of_balancers():
    r = subprocess.run([BIN, "serve", "--model", MODEL or "none", "--print-config"], capture_output=True, text=True, timeout=20 * SLOW)
    assert json.loads(r.stdout)["idle_timeout"] >= 120


@pytest.mark.quirk(42)
@pytest.mark.parametrize("path", ["/health", "/v1/models", CHAT, "/nothing", "/", "/v1/sessions/none"])
def test_options_of_any_path_do_not_hang(http, path):
    assert http.options(path).status_code in (200, 204, 404)


@pytest.mark.quirk(43)
def test_a_client_that_leaves_its_stream_cancels_it(daemon, http):
    before = daemon.metrics()["kvasir:api_cancelled_total"]
    with http.stream("POST", CHAT, json={**HI, "max_tokens": 7000, "ignore_eos": True, "stream": True}) as r:
        next(r.iter_lines())
    daemon.wait_idle()
    assert daemon.metrics()["kvasir:api_cancelled_total"] == before + 1


# ---- All of them ----

@pytest.mark.no_model
def test_every_case_has_a_test_that_names_it():
    """All 43 have one. Case 30, about embeddings, concerns nothing here but that there must be no empty answer."""
    listed = os.path.join(os.environ.get("KVASIR_SHARED", os.path.join(os.path.dirname(ROOT), "shared")), "client-quirks.md")
    cases = set(range(1, 44))
    if os.path.exists(listed):
        with open(listed) as f:
            assert {int(n) for n in re.findall(r"^(\d+)\. ", f.read(), re.M)} == cases
    named = set()
    for path in glob.glob(os.path.join(os.path.dirname(__file__), "test_*.py")):
        with open(path) as f:
            for numbers in re.findall(r"^@pytest\.mark\.quirk\(([\d, ]+)\)$", f.read(), re.M):
                named |= {int(n) for n in numbers.split(",")}
    assert named == cases, f"without a test: {sorted(cases - named)}; unknown: {sorted(named - cases)}"
