#!/usr/bin/env python3
"""Compares the template engine with jinja2, configured as transformers does, over many small templates.

Usage: test_jinja_diff.py [RENDER_TOOL] [--verbose]
A snippet passes when both give the same text or both refuse. Where jinja2 gives a reason in its own words (its own errors and
raise_exception), the reason has to be the same, too.
"""

import datetime
import json
import os
import sys

from render_tool import RenderTool, tool_path

SKIP = 77  # what meson takes for "skipped"
NOW = datetime.datetime(2026, 1, 15, 12, 0, 0, tzinfo=datetime.timezone.utc)

try:
    import jinja2
    import jinja2.ext
    import jinja2.sandbox
except ImportError:
    jinja2 = None


def make_environment():
    """What transformers builds around a chat template, including its {% generation %} extension."""

    class Generation(jinja2.ext.Extension):
        tags = {"generation"}

        def parse(self, parser):
            line = next(parser.stream).lineno
            body = parser.parse_statements(["name:endgeneration"], drop_needle=True)
            return jinja2.nodes.CallBlock(self.call_method("_render"), [], [], body).set_lineno(line)

        def _render(self, caller):
            return caller()

    def raise_exception(message):
        raise jinja2.exceptions.TemplateError(message)

    def tojson(x, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
        return json.dumps(x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    env = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols])
    env.filters["tojson"] = tojson
    env.globals["raise_exception"] = raise_exception
    env.globals["strftime_now"] = lambda fmt: NOW.replace(tzinfo=None).strftime(fmt)
    return env


VARIABLES = {
    "messages": [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi <b>&\"'</b>\n\ttwo  "},
        {"role": "assistant", "content": None, "tool_calls": [
            {"id": "c1", "type": "function", "function": {"name": "f", "arguments": {"a": 1, "b": [1.5, None, True]}}}]},
        {"role": "tool", "content": "{\"x\": \"\u00fc\U0001f642\"}"},
        {"role": "user", "content": [{"type": "text", "text": "part"}, {"type": "image"}]},
    ],
    "tools": [{"type": "function", "function": {"name": "g", "parameters": {"type": "object", "properties": {}}}}],
    "empty": "", "none": None, "yes": True, "no": False, "zero": 0, "n": 7, "neg": -7, "pi": 3.14159, "half": 0.5, "big": 1e16,
    "tiny": 1e-7, "s": "Hello, World", "u": "\u00c9t\u00e9 stra\u00dfe \u65e5\u672c\u8a9e \U0001f642", "spaces": " \t a b\u00a0c \n",
    "lines": "one\ntwo\r\nthree\n\nfive", "list": [3, 1, 2], "words": ["b", "A", "c", "a"], "mixed": [1, "a", None, True, 2.5],
    "d": {"b": 1, "a": 2, "C": 3}, "nested": {"a": {"b": [{"c": "deep"}]}}, "items": 5,
    "people": [{"name": "Bo", "age": 30, "tags": ["x"]}, {"name": "al", "age": 25, "tags": []}, {"name": "Cy", "age": 30}],
    "dash": "a-b-c--d", "html": "<i>&amp;</i>", "update": {"update": 1, "keys": 2, "get": 3},
}

SNIPPETS = open(os.path.join(os.path.dirname(os.path.abspath(__file__)), "snippets.txt"), encoding="utf-8")


def read_snippets(file):
    """Snippets stand between lines of `---`; one-line ones may stand under each other after a line `--- lines`."""
    mode, lines = "lines", []
    for line in file.read().split("\n"):
        if line.startswith("---"):
            if mode == "block" and lines:
                yield "\n".join(lines)
            mode, lines = ("lines" if line == "--- lines" else "block"), []
        elif mode == "block":
            lines.append(line)
        elif line and not line.startswith("#!"):
            yield line
    if mode == "block" and lines:
        yield "\n".join(lines)


def expected(env, source):
    """("ok", text) or ("error", reason, exact): exact where the reason is jinja2's own and not Python's."""
    try:
        return "ok", env.from_string(source).render(**VARIABLES)
    except jinja2.exceptions.TemplateSyntaxError as e:
        return "error", e.message, False
    except jinja2.exceptions.TemplateError as e:
        return "error", e.message or "", True
    except Exception as e:  # whatever Python raises for a misused value
        return "error", "%s: %s" % (type(e).__name__, e), False


def compare(env, tool, source):
    """None when both agree, else what differs."""
    want = expected(env, source)
    got = tool.render(source, VARIABLES, int(NOW.timestamp()))
    if want[0] == "ok":
        if "error" in got:
            return "gave %r instead of %r" % (got["error"], want[1])
        return None if got["prompt"] == want[1] else "gave %r instead of %r" % (got["prompt"], want[1])
    if "error" not in got:
        return "gave %r instead of failing with %r" % (got["prompt"], want[1])
    if want[2] and want[1] not in got["error"]:
        return "failed with %r instead of %r" % (got["error"], want[1])
    return None


def main():
    if jinja2 is None:
        print("skipped: the Python package jinja2 is not installed")
        return SKIP
    env = make_environment()
    tool = RenderTool(tool_path())
    passed = failed = 0
    for source in read_snippets(SNIPPETS):
        wrong = compare(env, tool, source)
        passed += wrong is None
        failed += wrong is not None
        if wrong:
            print("%s\n    %s" % (source, wrong))
        elif "--verbose" in sys.argv:
            print("%s\n    %r" % (source, tool.render(source, VARIABLES, int(NOW.timestamp()))))
    if tool.close() != 0:
        print("the render tool failed")
        failed += 1
    print("%d passed, %d failed" % (passed, failed))
    return 1 if failed or not passed else 0


if __name__ == "__main__":
    sys.exit(main())
