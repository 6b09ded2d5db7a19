"""POST /v1/chunk and `kvasir chunk`: documents longer than the context."""
import json
import subprocess
import threading
import time

import httpx
import pytest

from daemon import BIN, MODEL, SLOW, Daemon, eventually

ASK = {"instruction": "Name what the text speaks of.", "max_output_tokens": 12, "max_chunk_tokens": 160}


def document(paragraphs):
    text = "# A long report\n\n"
    for i in range(paragraphs):
        if i % 4 == 3:
            text += f"## Section {i // 4}\n\n"
        text += " ".join(f"Item {i}.{k} stands near the well; caf\u00e9 number {i * k % 97} is \u201copen\u201d \U0001f600." for k in range(4)) + "\n\n"
    return text


@pytest.fixture(scope="module")
def daemon():
    with Daemon("--context", 640, "--kv-memory", "90M") as d:
        yield d
        d.wait_idle()


def post(d, body, status=200):
    r = httpx.post(d.url + "/v1/chunk", json=body, timeout=240 * SLOW)
    assert r.status_code == status, r.text
    return r.json()


def count(d, text):
    return httpx.post(d.url + "/tokenize", json={"content": text}, timeout=60 * SLOW).json()["count"]


def check_parts(d, text, chunks, most):
    data, at = text.encode(), 0
    for c in chunks:
        assert c["fresh"] == at and c["start"] <= c["fresh"] < c["end"]
        part = data[c["start"]:c["end"]].decode()  # whole code points
        data[c["fresh"]:c["end"]].decode()
        assert c["tokens"] == count(d, part) <= most
        at = c["end"]
    assert at == len(data)


def test_a_document_longer_than_the_context_is_answered_for(daemon):
    text = document(24)
    assert count(daemon, text) > 1500
    j = post(daemon, {**ASK, "input": text, "overlap": 0.2})
    chunks = j["chunks"]
    check_parts(daemon, text, chunks, 160)
    assert len(chunks) > 10 and j["object"] == "chunk.result" and j["output"] and chunks[-1]["cut"] == "end"
    assert {c["cut"] for c in chunks} & {"heading", "paragraph"}
    for a, b in zip(chunks, chunks[1:]):
        assert a["start"] < b["start"] <= a["end"] and 0 <= a["coherence_with_next"] <= 1
    repeated = [count(daemon, text.encode()[c["start"]:c["fresh"]].decode()) for c in chunks[1:]]
    assert max(repeated) <= 32 and sum(n > 12 for n in repeated) > len(repeated) / 2
    known = [c["coherence_with_next"] for c in chunks[:-1]]
    assert j["coherence"]["min"] == pytest.approx(min(known)) and j["coherence"]["mean"] == pytest.approx(sum(known) / len(known))
    levels = [r["level"] for r in j["reductions"]]
    assert levels == sorted(levels) and levels[0] == 1 and j["reductions"][-1]["output"] == j["output"]
    assert j["usage"]["requests"] == len(chunks) + len(j["reductions"])
    assert daemon.kv()["drift_pages"] == 0
    # The same document, the same answer.
    assert post(daemon, {**ASK, "input": text, "overlap": 0.2})["output"] == j["output"]


def test_a_stream_says_the_same(daemon):
    text = document(8)
    whole = post(daemon, {**ASK, "input": text})
    events = []
    with httpx.stream("POST", daemon.url + "/v1/chunk", json={**ASK, "input": text, "stream": True}, timeout=240 * SLOW) as r:
        assert r.status_code == 200 and r.headers["content-type"].startswith("text/event-stream")
        for line in r.iter_lines():
            if line.startswith("data: {"):
                events.append(json.loads(line[6:]))
    kinds = [e["type"] for e in events]
    assert kinds[0] == "chunk.split" and kinds[-1] == "chunk.completed"
    result = events[-1]["result"]
    assert result["output"] == whole["output"] == "".join(e["delta"] for e in events if e["type"] == "chunk.delta")
    answers = [e["answer"] for e in events if e["type"] == "chunk.output"]
    assert len(answers) == result["usage"]["requests"]
    assert sorted(a["index"] for a in answers if a["level"] == 0) == list(range(len(result["chunks"])))


def test_others_are_served_meanwhile(daemon):
    text = document(20)
    done = []
    t = threading.Thread(target=lambda: done.append(post(daemon, {**ASK, "input": text, "parallel": 2})))
    t.start()
    eventually(lambda: not daemon.idle(), 10, "it has begun")
    j = httpx.post(daemon.url + "/v1/completions", json={"prompt": "One two", "max_tokens": 3}, timeout=60 * SLOW)
    assert j.status_code == 200 and not done
    t.join()
    assert done


def test_who_leaves_cancels_all(daemon):
    def generated():
        return daemon.metrics()["vllm:generation_tokens_total"]

    def at_rest():
        before = generated()
        time.sleep(0.3)
        return daemon.idle() and generated() == before

    before = generated()
    with httpx.stream("POST", daemon.url + "/v1/chunk", json={**ASK, "input": document(60), "stream": True}, timeout=60 * SLOW) as r:
        assert "chunk.split" in next(r.iter_lines())
    eventually(at_rest, 10, "nothing is generated any more")
    assert generated() - before < len(post(daemon, {"input": document(60), "split_only": True, "max_chunk_tokens": 160})["chunks"]), "a token of each part at least"
    assert daemon.kv()["drift_pages"] == 0


def test_errors_name_the_field(daemon):
    for more, field in (({"max_chunk_tokens": 600}, "max_chunk_tokens"), ({"max_output_tokens": 600}, "max_output_tokens"),
                        ({"max_output_tokens": 100}, "max_chunk_tokens"), ({"overlap": 0.9}, "overlap"), ({"instruction": None}, "instruction"),
                        ({"input": 7}, "input"), ({"parallel": 0}, "parallel")):
        e = post(daemon, {**ASK, "input": "A text.", **more}, 400)["error"]
        assert e["param"] == field, (more, e)


def test_control_tokens_in_a_document_are_text(daemon):
    text = ("The words <|im_end|> and <|im_start|> stand here. " * 40).strip()
    parts = post(daemon, {"input": text, "split_only": True, "max_chunk_tokens": 32, "overlap": 0.2})["chunks"]
    assert "".join(text[c["fresh"]:c["end"]] for c in parts) == text
    for c in parts:
        assert c["text"] == text[c["start"]:c["end"]]
        assert c["text"].count("<|") == c["text"].count("|>")


def test_the_command_splits_as_the_daemon_does(daemon, tmp_path):
    text = document(12)
    (tmp_path / "report.md").write_text(text, encoding="utf-8")
    done = subprocess.run([BIN, "chunk", "--model", MODEL, "--split-only", "--max-chunk-tokens", "160", "--overlap", "0.2", str(tmp_path / "report.md")],
                          capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == post(daemon, {"input": text, "split_only": True, "max_chunk_tokens": 160, "overlap": 0.2})["chunks"]


def test_the_command_answers_as_the_daemon_does(daemon):
    text = document(6)
    args = ["--model", MODEL, "--instruction", ASK["instruction"], "--max-output-tokens", "12", "--max-chunk-tokens", "160", "--context", "640",
            "--kv-memory", "90M", "--device", "cpu"]
    done = subprocess.run([BIN, "chunk", *args, "-"], input=text, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    wanted = post(daemon, {**ASK, "input": text})
    assert done.stdout.rstrip("\n") == wanted["output"].rstrip("\n")
    done = subprocess.run([BIN, "chunk", *args, "--json", "-"], input=text, capture_output=True, text=True)
    assert json.loads(done.stdout)["usage"]["requests"] == wanted["usage"]["requests"]


@pytest.mark.no_model
def test_the_command_says_what_lacks():
    for args, why in (([], "--model"), (["--model", "x.gguf"], "instruction"), (["--model", "x.gguf", "--instruction", "a"], "document"),
                      (["--model", "/nowhere.gguf", "--split-only", "/nowhere.txt"], "nowhere")):
        done = subprocess.run([BIN, "chunk", *args], capture_output=True, text=True)
        assert done.returncode in (1, 2) and why in done.stderr, (args, done.stderr)
