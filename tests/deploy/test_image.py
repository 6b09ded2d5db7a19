"""The Dockerfile: it builds, the image is slim and holds nothing to attack with, and its daemon serves."""
import os
import re
import subprocess

import httpx
import pytest

from container import Container, Image
from daemon import MODEL, SLOW, eventually
from wire import Wire

pytestmark = [pytest.mark.full, pytest.mark.needs_model]
IMAGE_BOUND_MB = 160  # Debian's minbase without its package lists, and a few libraries


@pytest.fixture(scope="module")
def image():
    i = Image()
    yield i
    i.close()


@pytest.fixture
def container(image):
    c = Container(image, MODEL, "--kv-memory", "128M")
    yield c
    c.process.kill()
    c.process.wait()
    c.log.close()


def test_the_image_says_how_it_wants_to_be_run(image):
    c = image.config
    assert c["Entrypoint"] == ["kvasir", "serve"] and c["StopSignal"] == "SIGTERM" and "8080/tcp" in c["ExposedPorts"]
    uid = re.fullmatch(r"(\d+):(\d+)", c["User"])
    assert uid and int(uid[1]) > 0, "an orchestrator can tell only from a number that it is not root"
    assert c["Healthcheck"]["Test"] == ["CMD", "kvasir", "health"] and c["Healthcheck"]["StartPeriod"] > 0


def test_the_image_is_slim(image):
    size = int(subprocess.run(["du", "-sxm", image.root], capture_output=True, text=True).stdout.split()[0])
    assert size < IMAGE_BOUND_MB
    for absent in ("usr/bin/gcc", "usr/bin/cc", "usr/bin/meson", "usr/bin/ninja", "usr/bin/python3", "usr/bin/curl", "src", "build",
                   "usr/include/uv.h"):
        assert not os.path.exists(os.path.join(image.root, absent)), absent
    assert not os.listdir(os.path.join(image.root, "var/lib/apt/lists"))
    headers = subprocess.run(["readelf", "-S", os.path.join(image.root, "usr/bin/kvasir")], capture_output=True, text=True).stdout
    assert ".text" in headers and ".symtab" not in headers and ".debug_info" not in headers


def test_its_daemon_serves_as_process_1_without_rights_on_a_read_only_root(container):
    assert container.health() != 0, "nothing is ready yet"

    def ready():
        assert container.process.poll() is None, open(container.log.name).read()
        return container.health() == 0
    eventually(ready, 60, "the container is healthy")
    with open(f"/proc/{container.pid()}/status") as f:
        status = f.read()
    assert re.search(r"^NSpid:.*\s1$", status, re.M) and re.search(r"^Uid:\s+65532\s", status, re.M)
    assert re.search(r"^CapEff:\s+0+$", status, re.M)
    with open(f"/proc/{container.pid()}/mountinfo") as f:
        options = {line.split()[4]: line.split()[5].split(",") for line in f}
    assert "ro" in options["/"] and "ro" in options["/models"]
    r = httpx.post(container.url + "/v1/completions", timeout=60 * SLOW,
                   json={"prompt": "The capital of France is", "max_tokens": 8, "temperature": 0})
    assert "Paris" in r.json()["choices"][0]["text"]
    with Wire(container) as w:
        assert w.ask("hi", max_output_tokens=4)[1]
    assert container.stop() == 0
