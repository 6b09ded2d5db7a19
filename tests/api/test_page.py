"""The chat page in headless Chromium: what a person sees and does. Skipped without playwright and a Chromium."""
import os
import re
import shutil

import httpx
import pytest

from daemon import SLOW, Daemon, free_port

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = pytest.mark.skipif(not CHROMIUM, reason="there is no Chromium")
WAIT = 60000 * SLOW


@pytest.fixture(scope="module")
def browser():
    with playwright.sync_playwright() as p:
        b = p.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield b
        b.close()


class Page:
    """A page of its own, with everything that went wrong in it collected."""

    def __init__(self, browser, url, **context):
        self.context = browser.new_context(**{"viewport": {"width": 1300, "height": 800}, **context})
        self.page = self.context.new_page()
        self.wrong = []
        self.outside = []
        self.page.on("pageerror", lambda e: self.wrong.append(str(e)))
        self.page.on("console", lambda m: m.type == "error" and self.wrong.append(m.text))
        self.page.on("request", lambda r: r.url.startswith((url, "data:", url.replace("http", "ws"))) or self.outside.append(r.url))
        self.page.set_default_timeout(WAIT)
        self.page.goto(url)
        self.page.wait_for_selector(".link.on")

    def set(self, **settings):
        self.page.evaluate("s => { Object.assign(settings, s); keepSettings(); }", settings)

    def ask(self, text, wait=True):
        self.page.fill("#input", text)
        self.page.keyboard.press("Enter")
        if wait:
            self.page.wait_for_selector("#go:not(.stop)")

    def answers(self):
        return self.page.locator(".turn.assistant .text").all_inner_texts()


@pytest.fixture
def page(browser, daemon):
    p = Page(browser, daemon.url)
    p.set(limit=24, temperature=0)
    yield p
    p.context.close()
    assert p.wrong == []
    assert p.outside == []


def test_an_answer_is_streamed_and_told_of(page):
    page.ask("Say hello.", wait=False)
    page.page.wait_for_selector(".turn.assistant.live")
    page.page.wait_for_selector("#go:not(.stop)")
    assert len(page.answers()) == 1 and page.answers()[0]
    assert re.search(r"\d+ tokens", page.page.inner_text(".turn.assistant .meta"))
    # The second turn finds the first one's KV.
    page.ask("And again.")
    facts = page.page.inner_text("#turn-facts")
    assert int(re.search(r"found in the cache\s+(\d+)", facts)[1]) > 0
    page.page.wait_for_function("() => /pages\\s+[1-9]/.test(document.getElementById('kv-facts').innerText)")
    assert page.page.inner_text("#kv-session").startswith("sess_")


def test_the_picture_tells_where_pages_are(browser):
    """A conversation that others have pushed out into RAM, as far as RAM has room: its pages are told by place, and drawn paler."""
    with Daemon("--context", 900, "--kv-memory", 64 * 368640, "--kv-ram", 20 * 368640, "--session-heartbeat", "200s") as d:
        p = Page(browser, d.url)
        try:
            p.set(limit=8, temperature=0)
            p.ask("word " * 600)
            facts = "() => document.getElementById('kv-facts').innerText.replace(/\\s+/g, ' ')"
            p.page.wait_for_function("() => /on the device\\s+[1-9]/.test(document.getElementById('kv-facts').innerText)")
            asked = []
            p.page.on("request", lambda r: asked.append(r.url))
            before = p.page.evaluate("() => document.getElementById('kv-map').toDataURL()")
            r = httpx.post(d.url + "/v1/completions", json={"prompt": "other " * 750, "max_tokens": 1}, timeout=60 * SLOW)
            assert r.status_code == 200, r.text
            p.page.wait_for_function("() => /to compute again\\s+[1-9]/.test(document.getElementById('kv-facts').innerText)")
            shown = p.page.evaluate(facts)
            told = {name: int(n) for name, n in re.findall(r"(in RAM|to compute again|pages) (\d+)", shown)}
            by = httpx.get(f"{d.url}/v1/sessions/{p.page.inner_text('#kv-session')}").json()["pages_by_tier"]
            assert told["in RAM"] == by["ram"] > 0 and told["to compute again"] == by["lost"] > 0, (shown, by)
            assert told["pages"] == sum(by.values())
            assert re.search(r"left the device (\d+) pages", shown) and "below the device" in p.page.inner_text(".legend"), shown
            assert asked == [], "the server tells, nobody asks"
            assert p.page.evaluate("() => document.getElementById('kv-map').toDataURL()") != before
            if os.environ.get("KVASIR_SCREENSHOTS"):
                p.page.screenshot(path=os.path.join(os.environ["KVASIR_SCREENSHOTS"], "tiers.png"))
            assert p.wrong == []
        finally:
            p.context.close()


def shows(page, words):
    """Waits until the facts beside the text match a pattern, spaces being alike; returns them."""
    page.wait_for_function("p => new RegExp(p).test(document.getElementById('kv-facts').innerText.replace(/\\s+/g, ' '))", arg=words)
    return page.evaluate("() => document.getElementById('kv-facts').innerText.replace(/\\s+/g, ' ')")


def test_what_a_policy_lets_go_of_is_shown(browser, daemon):
    p = Page(browser, daemon.url)
    try:
        p.set(limit=40, temperature=0, policy="streaming", kept=128)
        p.ask("word " * 300)
        shown = shows(p.page, "policy streaming let go of \\d+ tokens pages 8 ")
        kept = int(re.search(r"let go of (\d+)", shown)[1])
        assert kept > 150 and "let go of" in p.page.inner_text(".legend")
        p.ask("And?")  # the policy goes on, and so does the picture
        assert int(re.search(r"let go of (\d+)", shows(p.page, "state idle"))[1]) > kept
        if os.environ.get("KVASIR_SCREENSHOTS"):
            p.page.screenshot(path=os.path.join(os.environ["KVASIR_SCREENSHOTS"], "streaming.png"))
        assert p.wrong == []
    finally:
        p.context.close()


def test_a_summary_of_old_turns_is_shown(page):
    page.set(limit=8, summary=300)
    for i in range(4):
        page.ask(f"{i} " + "word " * 80)
    assert "→" in shows(page.page, "summary \\d+ turns")


def test_a_session_that_ends_is_told(page, daemon):
    page.ask("Say hello.")
    session = page.page.inner_text("#kv-session")
    shows(page.page, "state idle")
    assert httpx.delete(f"{daemon.url}/v1/sessions/{session}").status_code == 200
    page.page.wait_for_function("() => document.getElementById('kv-session').innerText === 'the session has ended'")
    page.ask("And again.")
    assert len(page.answers()) == 2 and page.page.inner_text("#kv-session") not in (session, "the session has ended")


def test_stop_keeps_what_there_is(page, daemon):
    page.set(limit=4000)
    page.ask("Count from one to ten thousand.", wait=False)
    page.page.wait_for_selector(".turn.assistant.live .text p")
    page.page.keyboard.press("Escape")
    page.page.wait_for_selector("#go:not(.stop)")
    assert "stopped" in page.page.inner_text(".turn.assistant .meta")
    assert page.answers()[0]
    daemon.wait_idle()


def test_conversations_are_kept_and_run_side_by_side(page):
    page.set(limit=300)
    page.ask("Tell a long story.", wait=False)
    page.page.wait_for_selector(".turn.assistant.live .text p")
    page.page.keyboard.press("Alt+n")
    page.set(limit=8)
    page.ask("Short one.")
    assert page.page.locator("#list a").count() == 2
    page.page.wait_for_function("() => !document.querySelector('#list a.busy')")
    page.page.reload()
    page.page.wait_for_selector(".link.on")
    assert page.page.locator("#list a").count() == 2
    assert page.page.locator(".turn.user .text").all_inner_texts() == ["Short one."]
    page.page.click("#list a:has-text('Tell a long story')")
    page.page.wait_for_selector(".turn.user .text:has-text('Tell a long story.')")
    assert page.page.locator(".turn.user .text").all_inner_texts() == ["Tell a long story."]
    # After the reload nothing is known to the socket: the whole conversation is sent, and goes on.
    page.ask("More.")
    assert len(page.answers()) == 2
    page.page.click("#list a[aria-current] button")
    assert page.page.locator("#list a").count() == 1


def test_again_writes_the_last_answer_anew(page):
    page.ask("Say hello.")
    first = page.answers()
    page.page.click("text=Again")
    page.page.wait_for_selector("#go:not(.stop)")
    assert page.answers() == first  # temperature 0


def test_markdown_becomes_nodes_and_never_html(page):
    text = "# T\\n\\n- a\\n- **b**\\n\\n```c\\nint x;\\n```\\n\\n<img src=x onerror=alert(1)> [l](javascript:alert(1)) `c`"
    html = page.page.evaluate(f"() => {{ const d = document.createElement('div'); d.append(...render('{text}')); return d.innerHTML; }}")
    assert "<h3>T</h3>" in html and "<li><strong>b</strong></li>" in html and "<code>int x;</code>" in html
    assert "<img" not in html and "<a" not in html and "&lt;img src=x" in html and "<code>c</code>" in html


def test_the_policy_lets_nothing_else_run(page):
    """The page's own script and style by their hashes; no inline handler, no eval, no foreign connection."""
    refused = page.page.evaluate("""async () => {
        const out = {};
        const s = document.createElement('script'); s.textContent = 'window.ran = 1'; document.body.append(s); out.script = !window.ran;
        const d = document.createElement('div'); d.innerHTML = '<i onclick="window.ran2 = 1"></i>'; document.body.append(d);
        d.firstChild.click(); out.handler = !window.ran2;
        try { await fetch('http://127.0.0.1:9/'); out.fetch = false; } catch (e) { out.fetch = true; }
        return out;
    }""")
    assert refused == {"script": True, "handler": True, "fetch": True}
    assert any("Content Security Policy" in w for w in page.wrong)
    page.wrong.clear()
    page.outside.clear()


def test_a_key_goes_by_events(browser):
    with Daemon("--context", 512, "--api-key", "secret") as d:
        p = browser.new_context().new_page()
        p.set_default_timeout(WAIT)
        p.goto(d.url)
        p.wait_for_selector("#notice:not([hidden])")
        p.click("#notice-act")
        p.fill("#key", "secret")
        p.fill("#limit", "8")
        p.click("text=Done")
        p.wait_for_selector(".link.on")
        p.fill("#input", "Hello")
        p.keyboard.press("Enter")
        p.wait_for_selector(".turn.assistant:not(.live) .meta span")
        p.context.close()


def test_a_lost_server_is_told_of_and_found_again(browser):
    port = free_port()
    first = Daemon("--context", 512, "--port", port, wait=False)
    p = None
    try:
        first.port, first.url = port, f"http://127.0.0.1:{port}"
        first.wait_ready()
        p = Page(browser, first.url)
        p.set(limit=8)
        p.ask("Hello")
        first.stop()
        p.page.wait_for_selector("#notice:not([hidden])")
        assert "restarts" in p.page.inner_text("#notice")
        second = Daemon("--context", 512, "--port", port, wait=False)
        second.port, second.url = port, first.url
        with second:
            second.wait_ready()
            p.page.wait_for_selector(".link.on")
            p.page.wait_for_selector("#notice", state="hidden")
            p.ask("Go on.")
            assert len(p.answers()) == 2
    finally:
        if p:
            p.context.close()
        if first.process.poll() is None:
            first.process.kill()
            first.wait()


def test_an_error_is_shown_with_a_way_to_try_again(page):
    page.set(limit=1000000)
    page.ask("Hello")
    assert "context length" in page.page.inner_text(".turn.error")
    page.set(limit=8)
    page.page.click("text=Try again")
    page.page.wait_for_selector(".turn.assistant:not(.live) .text")
    assert page.page.locator(".turn.error").count() == 0


@pytest.mark.parametrize("size", [(360, 640), (390, 844), (820, 1180), (1440, 900)])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_fits_every_screen(browser, daemon, size, scheme):
    p = Page(browser, daemon.url, viewport={"width": size[0], "height": size[1]}, color_scheme=scheme, is_mobile=size[0] < 800,
             has_touch=size[0] < 800)
    try:
        p.page.evaluate("""() => { current.turns.push({role: 'user', content: 'x'.repeat(300)},
            {role: 'assistant', content: '```c\\n' + 'int x; '.repeat(60) + '\\n```\\n' + 'word '.repeat(400)}); conversations.push(current); showTurns(true); }""")
        box = p.page.evaluate("() => [document.documentElement.scrollWidth, innerWidth, document.getElementById('log').getBoundingClientRect().right]")
        assert box[0] <= box[1] and box[2] <= box[1], box
        for name in ("#form", "header", "#go", "#settings-open"):
            r = p.page.locator(name).bounding_box()
            assert r["x"] >= 0 and r["x"] + r["width"] <= size[0] and r["y"] + r["height"] <= size[1], (name, r)
        assert p.page.evaluate("() => document.documentElement.dataset.theme") == scheme
        if size[0] < 800:  # the list and the cache slide in, and out again
            p.page.click("#side-open")
            p.page.click("#side-close")
            p.page.click("#kv-toggle")
            p.page.wait_for_selector("#kv-map", state="visible")
            p.page.click("#kv-close")
        assert p.wrong == []
    finally:
        p.context.close()
