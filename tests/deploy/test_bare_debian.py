"""deploy/quickstart.sh and .ci/run on a Debian 12 that has nothing: a fresh debootstrap and a clean clone of the repository."""
import os
import re
import shutil
import signal
import ssl
import subprocess
import tempfile

import httpx
import pytest

from container import CACHE, script
from daemon import ROOT, SLOW, child_of, eventually, free_port

pytestmark = pytest.mark.full
# Both commands ask the network for packages, and the machine may be busy.
PATIENCE_S = 3000

# What this machine trusts: its network may have an authority of its own.
AUTHORITIES = os.environ.get("SSL_CERT_FILE") or ssl.get_default_verify_paths().cafile or "/etc/ssl/certs/ca-certificates.crt"

# $1: the root; the rest is the command.
RUN = """
set -e
root=$1
shift
mount -t proc proc "$root/proc"
mount --rbind /dev "$root/dev"
cp /etc/resolv.conf "$root/etc/resolv.conf"
exec chroot "$root" "$@"
"""


class Bare:
    def __init__(self):
        script("bookworm.sh", f"{CACHE}/bookworm.tar")
        self.root = tempfile.mkdtemp(prefix="bare-", dir=CACHE)
        subprocess.run(["tar", "-C", self.root, "-xf", f"{CACHE}/bookworm.tar"], check=True)
        if os.path.exists(AUTHORITIES):
            shutil.copy(AUTHORITIES, f"{self.root}/root/authorities.crt")
        subprocess.run(["git", "clone", "-q", "--no-hardlinks", ROOT, f"{self.root}/root/kvasir"], check=True)

    def start(self, command, out=subprocess.PIPE, **env):
        """As root of the bare system, with nothing of this machine's environment but how packages are reached."""
        clean = {k: v for k, v in os.environ.items() if k.lower().endswith("_proxy") or k in ("PIP_INDEX_URL", "PIP_TRUSTED_HOST")}
        if os.path.exists(f"{self.root}/root/authorities.crt"):
            clean.update(SSL_CERT_FILE="/root/authorities.crt", PIP_CERT="/root/authorities.crt")
        clean.update(HOME="/root", PATH="/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", **env)
        return subprocess.Popen(["unshare", "--mount", "--pid", "--fork", "--kill-child", "sh", "-c", RUN, "run", self.root, *command],
                                stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT, text=True, env=clean)

    def run(self, command, **env):
        p = self.start(command, **env)
        out = p.communicate(timeout=PATIENCE_S)[0]
        return p.returncode, out


@pytest.fixture(scope="module")
def bare():
    if os.getuid() != 0:
        pytest.skip("a chroot needs root")
    b = Bare()
    yield b
    shutil.rmtree(b.root)


def printed_lines(text):
    """The commands that the quick start shows, each as it would be pasted."""
    block = re.search(r"from another terminal:\n\n(.*?)\n\n  or open", text, re.S)[1]
    return [part for part in re.split(r"\n\s*\n", block) if part.strip()]


def test_quickstart_leads_to_a_daemon_that_answers(bare):
    port = free_port()
    command = ["/root/kvasir/deploy/quickstart.sh", "--prefix", "/opt/kvasir", "--port", str(port)]
    status, out = bare.run([*command, "--no-serve"])
    assert status == 0, out[-4000:]
    assert "/opt/kvasir/bin/kvasir serve --model /opt/kvasir/models/" in out
    # Again: nothing is left to do but to serve.
    log = open(f"{CACHE}/quickstart.log", "w+")
    serving = bare.start(command, out=log)
    try:
        def ready():
            assert serving.poll() is None, open(log.name).read()[-4000:]
            try:
                return httpx.get(f"http://127.0.0.1:{port}/health/ready", timeout=5 * SLOW).status_code == 200
            except httpx.TransportError:
                return False
        eventually(ready, 180, "it serves")
        text = open(log.name).read()
        assert "all there" in text and "installing" not in text
        assert f"http://127.0.0.1:{port}" in text
        lines = printed_lines(text)
        assert len(lines) == 2
        status, out = bare.run(["bash", "-c", lines[0]])
        assert status == 0 and '"finish_reason"' in out, out
        status, out = bare.run(["bash", "-c", lines[1]])
        assert '"response.output_text.delta"' in out and re.search('"response.(completed|incomplete)"', out), out
        assert httpx.get(f"http://127.0.0.1:{port}/").headers["content-type"].startswith("text/html")
    finally:
        os.kill(child_of(serving.pid), signal.SIGTERM)
        assert serving.wait(60) == 0
        log.close()


def test_ci_installs_what_the_tests_need(bare):
    """Its packages are enough to build with warnings as errors, and for the unit tests."""
    model = next((os.path.join(d, f) for d, _, files in os.walk(f"{bare.root}/opt/kvasir") for f in files if f.endswith(".gguf")), "")
    status, out = bare.run(["/root/kvasir/.ci/run", "includes", "readme", "noserver", "unit"],
                           KVASIR_TEST_MODEL=model.removeprefix(bare.root) or "/none", KVASIR_JOBS="2")
    last = out.splitlines()[-1]
    assert status == 0 and re.fullmatch(r"\d+ passed, 0 failed, \d+ skipped", last), out[-6000:]
    assert int(last.split()[0]) > 40
