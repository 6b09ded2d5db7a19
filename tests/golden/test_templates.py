#!/usr/bin/env python3
"""Renders every case of the published chat templates and compares it with what transformers' jinja2 gave.

Usage: test_templates.py [RENDER_TOOL]
"""

import datetime
import json
import os
import sys

from render_tool import RenderTool, shared_path, tool_path

SKIP = 77  # what meson takes for "skipped"


def check(tool, cases, source, case):
    """None when the case renders as it should, else what is wrong."""
    variables = {k: v for k, v in case.items() if k not in ("case", "prompt", "error")}
    variables["bos_token"] = cases["bos_token"]
    variables["eos_token"] = cases["eos_token"]
    clock = datetime.datetime.fromisoformat(cases["clock"]).replace(tzinfo=datetime.timezone.utc)
    got = tool.render(source, variables, int(clock.timestamp()))
    if "error" in case:
        if "error" not in got:
            return "rendered, but should fail with %r" % case["error"]
        # A bare exception class stands for messages that differ between versions of Python.
        if case["error"] != "TypeError" and case["error"] not in got["error"]:
            return "failed with %r instead of %r" % (got["error"], case["error"])
        return None
    if "error" in got:
        return "failed: %s" % got["error"]
    if got["prompt"] != case["prompt"]:
        at = len(os.path.commonprefix([got["prompt"], case["prompt"]]))
        return "differs at %d: got %r, expected %r" % (at, got["prompt"][at:at + 60], case["prompt"][at:at + 60])
    return None


def main():
    path = shared_path("golden", "templates", "cases.json")
    if not os.path.exists(path):
        print("skipped: there is no %s" % path)
        return SKIP
    with open(path, encoding="utf-8") as f:
        cases = json.load(f)
    tool = RenderTool(tool_path())
    passed = failed = 0
    for name, template_cases in sorted(cases["templates"].items()):
        with open(shared_path("golden", "templates", name + ".jinja"), encoding="utf-8", newline="") as f:
            source = f.read()
        for case in template_cases:
            wrong = check(tool, cases, source, case)
            passed += wrong is None
            failed += wrong is not None
            if wrong:
                print("%s, %s: %s" % (name, case["case"], wrong))
    if tool.close() != 0:
        print("the render tool failed")
        failed += 1
    print("%d passed, %d failed" % (passed, failed))
    return 1 if failed or not passed else 0


if __name__ == "__main__":
    sys.exit(main())
