"""Clients as they are published, unmodified: langchain-openai, litellm and lm-eval; and what the Vercel AI SDK's parser demands.

The openai package itself is in test_openai.py, test_quirks.py and test_tools.py. Run by tests/run.sh --full.
"""
import json
import os
import subprocess
import sys
import textwrap

import pytest

PARIS = "What is the capital of France? Answer in one word."


# ---- langchain-openai ----

@pytest.fixture
def langchain(daemon):
    module = pytest.importorskip("langchain_openai", reason="langchain-openai is not installed")
    return lambda **more: module.ChatOpenAI(base_url=daemon.url + "/v1", api_key="none", model="any", temperature=0, max_tokens=40, **more)


def test_langchain_invoke_and_stream(langchain):
    model = langchain()
    whole = model.invoke(PARIS)
    assert whole.content and whole.usage_metadata["input_tokens"] > 0
    assert whole.response_metadata["finish_reason"] in ("stop", "length")
    parts = list(langchain(stream_usage=True).stream(PARIS))
    assert "".join(p.content for p in parts) == whole.content
    assert sum(p.usage_metadata["output_tokens"] for p in parts if p.usage_metadata) == whole.usage_metadata["output_tokens"]


def test_langchain_batch_and_history(langchain):
    from langchain_core.messages import AIMessage, HumanMessage, SystemMessage
    answers = langchain().batch([PARIS, [SystemMessage("Be brief."), HumanMessage("Hi"), AIMessage("Hello"), HumanMessage("Bye")]])
    assert all(a.content for a in answers)


def test_langchain_tools_and_structured_output(langchain):
    import pydantic
    from langchain_core.tools import tool

    @tool
    def weather(city: str) -> str:
        """The weather of a city."""
        return city

    class City(pydantic.BaseModel):
        """A city."""
        name: str = pydantic.Field(max_length=12)
        large: bool

    calls = langchain().bind_tools([weather], tool_choice="weather").invoke("What is the weather in Rome?").tool_calls
    assert calls[0]["name"] == "weather" and set(calls[0]["args"]) == {"city"}
    for method in ("json_schema", "function_calling"):
        city = langchain().with_structured_output(City, method=method).invoke("Name a city.")
        assert isinstance(city, City), method


def test_langchain_logprobs(langchain):
    answer = langchain(logprobs=True, top_logprobs=2).invoke("Hi")
    assert len(answer.response_metadata["logprobs"]["content"][0]["top_logprobs"]) == 2


def test_langchain_responses_api(langchain):
    answer = langchain(use_responses_api=True).invoke(PARIS)
    assert answer.text and answer.usage_metadata["output_tokens"] > 0


# ---- litellm ----

@pytest.fixture
def litellm(daemon):
    module = pytest.importorskip("litellm", reason="litellm is not installed")
    module.suppress_debug_info = True
    more = dict(api_base=daemon.url + "/v1", api_key="none", model="openai/any", temperature=0, max_tokens=40)
    return module, more


def test_litellm_completion_and_stream(litellm):
    module, more = litellm
    messages = [{"role": "user", "content": PARIS}]
    whole = module.completion(messages=messages, **more)
    assert whole.choices[0].finish_reason in ("stop", "length") and whole.usage.total_tokens > 0
    chunks = list(module.completion(messages=messages, stream=True, stream_options={"include_usage": True}, **more))
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == whole.choices[0].message.content
    built = module.stream_chunk_builder(chunks, messages=messages)
    assert built.usage.completion_tokens == whole.usage.completion_tokens


def test_litellm_tools(litellm):
    module, more = litellm
    tools = [{"type": "function", "function": {"name": "weather", "parameters": {
        "type": "object", "properties": {"city": {"type": "string", "maxLength": 12}}, "required": ["city"]}}}]
    kinds = []
    for stream in (False, True):
        r = module.completion(messages=[{"role": "user", "content": "Rome?"}], tools=tools, tool_choice="required",
                              parallel_tool_calls=False, stream=stream, **more)
        if stream:
            r = module.stream_chunk_builder(list(r))
        call = r.choices[0].message.tool_calls[0].function
        assert r.choices[0].finish_reason == "tool_calls"
        kinds.append((call.name, json.loads(call.arguments)["city"]))
    assert kinds[0] == kinds[1]


def test_litellm_errors_are_its_own(litellm):
    module, more = litellm
    with pytest.raises(module.BadRequestError):
        module.completion(messages=[{"role": "user", "content": PARIS}], **{**more, "max_tokens": 10 ** 6})


def test_litellm_responses(litellm):
    module, more = litellm
    more = {k: v for k, v in more.items() if k != "max_tokens"}
    r = module.responses(input=PARIS, max_output_tokens=20, **more)
    assert r.status in ("completed", "incomplete")
    types = [e.type for e in module.responses(input=PARIS, max_output_tokens=20, stream=True, **more)]
    assert str(types[-1]).endswith(("completed", "incomplete", "COMPLETED", "INCOMPLETE"))


# ---- lm-eval ----

def test_lm_eval_scores_a_task_of_our_own(daemon, tmp_path):
    """Log-likelihoods of choices and a free answer, by `echo` with `logprobs` and token ids, as it asks any such server."""
    pytest.importorskip("lm_eval", reason="lm-eval is not installed")
    rows = [("The capital of France is", [" Paris", " Banana", " Tuesday"], 0), ("Two plus two is", [" purple", " four", " a dog"], 1),
            ("The sky on a clear day is", [" square", " hungry", " blue"], 2), ("Cats like to drink", [" milk", " stones", " Monday"], 0)]
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(json.dumps({"q": q, "choices": c, "label": n}) + "\n" for q, c, n in rows))
    (tmp_path / "tiny.yaml").write_text(textwrap.dedent(f"""\
        task: kvasir_tiny
        dataset_path: json
        dataset_kwargs: {{data_files: {{test: {data}}}}}
        test_split: test
        output_type: multiple_choice
        doc_to_text: "{{{{q}}}}"
        doc_to_target: label
        doc_to_choice: choices
        target_delimiter: ""
        metric_list: [{{metric: acc, aggregation: mean, higher_is_better: true}}]
        """))
    (tmp_path / "free.yaml").write_text(textwrap.dedent(f"""\
        task: kvasir_free
        dataset_path: json
        dataset_kwargs: {{data_files: {{test: {data}}}}}
        test_split: test
        output_type: generate_until
        doc_to_text: "{{{{q}}}}"
        doc_to_target: "{{{{choices[label]}}}}"
        generation_kwargs: {{until: ["\\n"], max_gen_toks: 8, do_sample: false}}
        metric_list: [{{metric: exact_match, aggregation: mean, higher_is_better: true}}]
        """))
    arguments = f"model=any,base_url={daemon.url}/v1/completions,num_concurrent=2,max_retries=1,tokenizer_backend=remote"
    run = subprocess.run([sys.executable, "-m", "lm_eval", "--model", "local-completions", "--model_args", arguments,
                          "--tasks", "kvasir_tiny,kvasir_free", "--include_path", str(tmp_path), "--output_path", str(tmp_path / "out")],
                         capture_output=True, text=True, timeout=400, env={**os.environ, "HF_HOME": str(tmp_path / "hf"), "HF_HUB_OFFLINE": "1"})
    assert run.returncode == 0, run.stderr[-3000:]
    found = list((tmp_path / "out").rglob("results*.json"))
    results = json.loads(found[0].read_text())["results"]
    assert results["kvasir_tiny"]["acc,none"] >= 0.75
    assert "kvasir_free" in results


# ---- Vercel AI SDK: no Node here, so its schemas as client-quirks.md has them ----

def check_vercel_chunk(chunk):
    """chatCompletionChunk of @ai-sdk/openai-compatible: what its zod schema accepts."""
    assert chunk.get("id") is None or isinstance(chunk["id"], str)
    assert isinstance(chunk["choices"], list)
    for choice in chunk["choices"]:
        assert choice.get("finish_reason") in (None, "stop", "length", "tool_calls", "content_filter", "function_call")
        delta = choice.get("delta") or {}
        assert delta.get("role", "assistant") in ("assistant", "", None)
        assert delta.get("content") is None or isinstance(delta["content"], str)
        for call in delta.get("tool_calls") or []:
            assert isinstance(call["index"], int)
            assert isinstance(call["function"].get("arguments", ""), str)
    usage = chunk.get("usage")
    assert usage is None or all(isinstance(usage[k], int) for k in ("prompt_tokens", "completion_tokens", "total_tokens"))


@pytest.mark.parametrize("tools", [False, True])
def test_vercel_ai_sdk_chunks(http, tools):
    body = {"model": "any", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 60, "temperature": 0, "stream": True,
            "stream_options": {"include_usage": True}}
    if tools:
        body |= {"tool_choice": "required", "tools": [{"type": "function", "function": {
            "name": "f", "parameters": {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}}}]}
    started, ended = set(), []
    with http.stream("POST", "/v1/chat/completions", json=body) as r:
        for line in r.iter_lines():
            if not line.startswith("data: {"):
                continue
            chunk = json.loads(line[6:])
            check_vercel_chunk(chunk)
            for choice in chunk["choices"]:
                ended += [choice["finish_reason"]] if choice["finish_reason"] else []
                for call in choice["delta"].get("tool_calls") or []:
                    # The SDK throws when the first delta of a call lacks these.
                    if call["index"] not in started:
                        assert call["id"] and call["function"]["name"] and call.get("type") == "function"
                    started.add(call["index"])
    assert ended in (["tool_calls"], ["length"]) if tools else ended in (["stop"], ["length"])
    assert bool(started) == tools
