"""What context policies cost where it hurts: a number that is told once, somewhere in a long text, and asked for at its end.

The score of a policy is the share of the number's digits that the answer has right, over several numbers at three
depths; longer texts have one depth each. With KVASIR_FULL=yes they have all, and Qwen2.5-Coder-0.5B (KVASIR_QWEN_MODEL)
is asked as well, at up to 30,000 tokens, and SmolLM2 beyond its trained length. `pytest -s` prints the table.
"""
import os
import random
import re

import httpx
import pytest

from daemon import FULL, LONG, SLOW, Daemon

QWEN = os.environ.get("KVASIR_QWEN_MODEL", "")
DEPTHS = (0.1, 0.5, 0.9)
KEYS = (71432, 50918, 26387)
pytestmark = pytest.mark.trained
TOKENS_OF_A_SENTENCE = 9.2  # by both models' tokenizers, on average
PLACES = "river road bird hill house garden market bridge tower forest harbour mill".split()
DOINGS = "lies still,is busy,is far from here,can be seen at dawn,was painted red,smells of rain,has been closed,is never quite silent".split(",")


def sentence(r):
    return f"The {r.choice(PLACES)} by the {r.choice(PLACES)} {r.choice(DOINGS)}."


def post(d, path, body):
    r = httpx.post(d.url + path, json=body, timeout=600 * SLOW)
    assert r.status_code == 200, r.text
    return r.json()


def prompt(d, n_tokens, depth, key):
    """About n_tokens of a text that tells the key at that depth, and goes on to tell it again at its end."""
    r = random.Random(key * 1000 + int(depth * 10))
    n = int((n_tokens - 60) / TOKENS_OF_A_SENTENCE)
    text = [sentence(r) for _ in range(n)]
    text.insert(int(n * depth), f"The pass key is {key}. Remember it: the pass key is {key}.")
    return "There is a pass key in this text. Find it and remember it.\n\n" + " ".join(text) + "\n\nWhat is the pass key? The pass key is"


def digits(answer, key):
    """How many of the key's five digits the first number in an answer has in their places."""
    found = re.search(r"\d+", answer)
    return sum(a == b for a, b in zip(found.group() if found else "", str(key)))


def score(d, n_tokens, policies, keys, depths=DEPTHS):
    """The score of each policy, and what was asked of tokens at least."""
    right, asked, least = dict.fromkeys(policies, 0), 0, n_tokens
    for key in keys:
        for depth in depths:
            text = prompt(d, n_tokens, depth, key)
            asked += 5
            for name, kv in policies.items():
                j = post(d, "/v1/completions", {"prompt": text, "max_tokens": 16, "temperature": 0, "kv_cache": kv})
                right[name] += digits(j["choices"][0]["text"], key)
                least = min(least, j["usage"]["prompt_tokens"])
    return {name: n / asked for name, n in right.items()}, least


def table(model, n, scores):
    print(f"{model} {n}: " + ", ".join(f"{name} {s:.2f}" for name, s in scores.items()))


def quarter(n):
    return {"full": {"policy": "full"}, "quest": {"policy": "quest", "max_cache_size": n // 4}}


def lossy(n):
    return {"evict": {"policy": "evict", "max_cache_size": n // 4}, "streaming": {"policy": "streaming", "max_cache_size": n // 4}}


@pytest.fixture(scope="module")
def smol():
    with Daemon("--kv-bounds", "--context", 8192, "--kv-memory", "400M") as d:
        yield d


@pytest.mark.parametrize("n, depths", [(2000, DEPTHS), pytest.param(4000, DEPTHS[1:2], marks=LONG), (7000, DEPTHS[:1])])
def test_a_quarter_of_the_pages_finds_what_all_do(smol, n, depths):
    scores, least = score(smol, n, quarter(n), KEYS if FULL else KEYS[:1], DEPTHS if FULL else depths)
    table("SmolLM2-135M", n, scores)
    assert least > 0.9 * n
    assert scores["full"] > 0.5, "the model finds it at all"
    assert scores["quest"] >= 0.9 * scores["full"], scores


def test_what_is_dropped_is_not_found_and_nothing_else_is_claimed(smol):
    n = 1000
    scores, _ = score(smol, n, lossy(n), KEYS[:1])
    table("SmolLM2-135M", n, scores)
    # The last depth is within the window; the others have left it.
    assert scores["streaming"] <= 0.5


@LONG
@pytest.mark.skipif(not QWEN, reason="KVASIR_QWEN_MODEL names no model")
@pytest.mark.parametrize("n", [8000, 16000, 30000])
def test_so_it_does_in_a_longer_context(n):
    with Daemon("--kv-bounds", "--context", 32768, "--kv-memory", "500M", model=QWEN) as d:
        scores, least = score(d, n, quarter(n), KEYS[:2] if n < 30000 else KEYS[:1])
        table("Qwen2.5-Coder-0.5B", n, scores)
        assert least > 0.9 * n
        assert scores["full"] > 0.5 and scores["quest"] >= 0.9 * scores["full"], scores


@LONG
def test_chunks_find_it_beyond_the_trained_length():
    """Trained on 8,192 tokens: by Dual Chunk Attention it is found at 12,000, and less by positions as they are."""
    n, found = 12000, {}
    for scaling in ("dca:2", "none"):
        with Daemon("--rope-scaling", scaling, "--context", 16384, "--kv-memory", "400M") as d:
            scores, least = score(d, n, {"full": {"policy": "full"}}, KEYS[:1])
            table(f"SmolLM2-135M {scaling}", n, scores)
            assert least > 0.9 * n
            found[scaling] = scores["full"]
    assert found["dca:2"] > 0.5 and found["none"] < found["dca:2"], found
