""""truncation": "auto" with everything that a conversation may hold, wherever it may be asked for."""
import json
import re

import httpx
import pytest

from daemon import SLOW, Daemon
from wire import Wire

PAGE = 368640  # of SmolLM2-135M in f16
CONTEXT, ANSWER = 600, 8


@pytest.fixture(scope="module")
def daemon():
    with Daemon("--kv-memory", 100 * PAGE, "--context", CONTEXT) as d:
        yield d


def words(n, seed=""):
    return " ".join(f"{seed}{i} is followed by {i * 7919 % 1000}." for i in range(n))


def items_of(messages):
    """Chat messages as the items of the Responses API."""
    items = []
    for m in messages:
        for call in m.get("tool_calls", []):
            items.append({"type": "function_call", "call_id": call["id"], **call["function"]})
        if m["role"] == "tool":
            items.append({"type": "function_call_output", "call_id": m["tool_call_id"], "output": m["content"]})
        elif "tool_calls" not in m:
            items.append({"role": m["role"], "content": m["content"]})
    return items


class Chat:
    def __init__(self, d):
        self.d = d

    def ask(self, messages, **more):
        body = {"messages": messages, "max_tokens": ANSWER, "truncation": "auto", "temperature": 0, **more}
        r = httpx.post(self.d.url + "/v1/chat/completions", json=body, timeout=120 * SLOW)
        return r.status_code, r.json().get("error"), r.json().get("usage"), r.json().get("usage", {}).get("prompt_tokens")


class Responses:
    def __init__(self, d):
        self.d = d

    def ask(self, messages, **more):
        body = {"input": items_of(messages), "max_output_tokens": ANSWER, "truncation": "auto", "temperature": 0, "store": False, **more}
        r = httpx.post(self.d.url + "/v1/responses", json=body, timeout=120 * SLOW)
        return r.status_code, r.json().get("error"), r.json().get("usage"), (r.json().get("usage") or {}).get("input_tokens")


class Lane:
    def __init__(self, d):
        self.d = d

    def ask(self, messages, **more):
        with Wire(self.d) as w:
            w.send(items_of(messages), max_output_tokens=ANSWER, truncation="auto", store=False, stream_id="lane", **more)
            last = list(w.events())[-1]
        if last["type"] == "error":
            assert last["stream_id"] == "lane"
            return last["status"], last["error"], None, None
        usage = last["response"]["usage"]
        return 200, None, usage, usage["input_tokens"]


@pytest.fixture(params=[Chat, Responses, Lane])
def way(request, daemon):
    return request.param(daemon)


def cut_of(way, messages, **more):
    status, error, usage, prompt = way.ask(messages, **more)
    assert status == 200, error
    assert prompt + ANSWER <= CONTEXT
    return usage.get("truncated", {"turns": 0, "messages": []})


def test_calls_and_their_results_leave_with_their_turn(way):
    call = {"type": "function", "id": "c", "function": {"name": "look_up", "arguments": '{"n": 1}'}}
    messages = []
    for i in range(8):
        messages += [{"role": "user", "content": f"Turn {i}. " + words(3)}, {"role": "assistant", "content": "", "tool_calls": [{**call, "id": f"c{i}"}]},
                     {"role": "tool", "tool_call_id": f"c{i}", "content": words(3, "found ")}, {"role": "assistant", "content": "I see."}]
    messages.append({"role": "user", "content": "And?"})
    cut = cut_of(way, messages)
    assert 1 <= cut["turns"] < 8
    assert cut["messages"] == list(range(4 * cut["turns"])), "the user's message, the call, its result and the answer go together"
    # A last turn that has a call and its result in it stays whole.
    cut = cut_of(way, messages[:-1])
    assert cut["messages"] == list(range(4 * cut["turns"])) and cut["turns"] <= 7


@pytest.mark.parametrize("role", ["system", "developer"])
def test_messages_that_instruct_stay_wherever_they_stand(way, role):
    messages = [{"role": role, "content": "Be brief."}]
    for i in range(12):
        messages += [{"role": "user", "content": f"Turn {i}. " + words(5)}, {"role": "assistant", "content": "I see."}]
        if i == 2:
            messages.append({"role": role, "content": "From now on be kind."})
    messages.append({"role": "user", "content": "And?"})
    cut = cut_of(way, messages)
    assert cut["turns"] > 3
    instructs = [i for i, m in enumerate(messages) if m["role"] == role]
    assert not set(instructs) & set(cut["messages"])
    rest = [m for i, m in enumerate(messages) if i not in cut["messages"]]
    _, _, usage, prompt = way.ask(rest)
    assert "truncated" not in usage and prompt == way.ask(messages)[3]


def test_a_talk_that_the_assistant_begins(way):
    messages = [{"role": "assistant", "content": "Hello. " + words(8)}]
    for i in range(12):
        messages += [{"role": "user", "content": f"Turn {i}. " + words(5)}, {"role": "assistant", "content": "I see."}]
    messages.append({"role": "user", "content": "And?"})
    cut = cut_of(way, messages)
    assert cut["turns"] >= 2 and cut["messages"] == list(range(1 + 2 * (cut["turns"] - 1))), "what comes before the first user is a turn"


def too_long(way, messages):
    """400 with both numbers: what there is, and what was asked for."""
    status, error, _, _ = way.ask(messages)
    assert status == 400 and error["code"] == "context_length_exceeded"
    numbers = [int(n) for n in re.findall(r"\d+", error["message"])]
    assert CONTEXT in numbers and max(numbers) > CONTEXT, error
    return error


def test_a_last_turn_that_is_too_long_alone(way):
    messages = [{"role": "user", "content": "One."}, {"role": "assistant", "content": "Yes."}, {"role": "user", "content": words(120)}]
    alone = too_long(way, messages[-1:])
    # What could be left out was: the numbers are those of what has to stay.
    assert too_long(way, messages)["message"] == alone["message"]
    assert too_long(way, [{"role": "system", "content": words(120)}, {"role": "user", "content": "One."}])


def test_only_a_system_message(way):
    status, error, usage, _ = way.ask([{"role": "system", "content": "Be brief."}])
    assert status == 200 and "truncated" not in usage, error
    too_long(way, [{"role": "system", "content": words(120)}])
    too_long(way, [{"role": "system", "content": words(60)}, {"role": "developer", "content": words(60)}])


def test_images_are_refused_not_dropped(way):
    part = {"type": "image_url", "image_url": {"url": "data:,"}} if isinstance(way, Chat) else {"type": "input_image", "image_url": "data:,"}
    messages = [{"role": "user", "content": [part]}, {"role": "assistant", "content": "I see."}] + [
        {"role": "user", "content": words(50)}, {"role": "assistant", "content": "Yes."}, {"role": "user", "content": words(20)}]
    status, error, _, _ = way.ask(messages)
    assert status == 400 and error["param"].endswith("[0].content[0].type") and "image" in json.dumps(error)


def test_a_raw_prompt_has_no_turns(daemon):
    r = httpx.post(daemon.url + "/v1/completions", json={"prompt": "x", "truncation": "auto"})
    assert r.status_code == 400 and r.json()["error"]["param"] == "truncation"
