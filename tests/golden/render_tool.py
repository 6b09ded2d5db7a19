"""The render tool as a coprocess: one template and its variables in, the prompt or the error out."""

import json
import os
import subprocess
import sys


def tool_path():
    """The tool named on the command line, or built by meson next to this file."""
    if len(sys.argv) > 1 and not sys.argv[1].startswith("-"):
        return sys.argv[1]
    here = os.path.dirname(os.path.abspath(__file__))
    return os.path.join(here, "..", "..", "build", "tests", "golden", "render-tool")


def shared_path(*parts):
    root = os.environ.get("KVASIR_SHARED") or os.path.join(
        os.path.dirname(os.path.abspath(__file__)), "..", "..", "..", "shared")
    return os.path.join(root, *parts)


class RenderTool:
    def __init__(self, path):
        self.process = subprocess.Popen([path], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, encoding="utf-8")

    def render(self, source, variables, now, trusted=False):
        """A dict with `prompt` and `data`, or with `error` and `status`."""
        request = {"source": source, "vars": variables, "now": now, "trusted": trusted}
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        answer = self.process.stdout.readline()
        if not answer:
            raise RuntimeError("the render tool died with status %s" % self.process.wait())
        return json.loads(answer)

    def close(self):
        self.process.stdin.close()
        return self.process.wait()
