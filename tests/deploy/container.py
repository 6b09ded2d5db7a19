"""The image of the Dockerfile, built by build_image.sh, and a container of it without a container engine: namespaces, a read-only
root, the user of the image, and the daemon as process 1. Needs root."""
import json
import os
import signal
import subprocess

import pytest

from daemon import ROOT, child_of, free_port

HERE = os.path.dirname(os.path.abspath(__file__))
CACHE = os.path.join(ROOT, ".cache", "deploy")


def script(name, *args, seconds=1800):
    """Runs a script that exits with 77, and says why, when it cannot be done here; its last line."""
    r = subprocess.run([os.path.join(HERE, name), *args], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=seconds)
    last = (r.stdout.splitlines() or [""])[-1]
    if r.returncode == 77:
        pytest.skip(last)
    assert r.returncode == 0, r.stdout[-3000:] + r.stderr[-3000:]
    return last


def buildah(*args):
    storage = ["--root", f"{CACHE}/storage", "--runroot", f"{CACHE}/run", "--storage-driver", "vfs"]
    r = subprocess.run(["buildah", *storage, *args], capture_output=True, text=True)
    assert r.returncode == 0, r.stderr
    return r.stdout.strip()


class Image:
    def __init__(self):
        self.name = script("build_image.sh", CACHE)
        self.config = json.loads(buildah("inspect", "--type", "image", self.name))["Docker"]["config"]
        self.container = buildah("from", "--pull-never", self.name)
        self.root = buildah("mount", self.container)

    def close(self):
        buildah("umount", self.container)
        buildah("rm", self.container)


# $1: the root, $2: the models, $3: the user; the rest is the command.
RUN = """
set -e
root=$1 models=$2 user=$3
shift 3
mkdir -p "$root/models"
mount --bind "$root" "$root"
mount --bind "$models" "$root/models"
mount -o remount,bind,ro "$root/models"
mount -t proc -o subset=pid proc "$root/proc"
mount -o remount,bind,ro "$root"
exec chroot --userspec="$user" "$root" "$@"
"""


class Container:
    """Runs the entry point of the image, as an engine would."""

    def __init__(self, image, model, *args):
        self.image, self.model = image, model
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.ws_url = f"ws://127.0.0.1:{self.port}/v1/responses"
        self.log = open(os.path.join(CACHE, "container.log"), "w+")
        command = [*image.config["Entrypoint"], "--model", "/models/" + os.path.basename(model), *map(str, args)]
        self.process = self.start(command, self.log)

    def start(self, command, out):
        env = dict(e.split("=", 1) for e in self.image.config["Env"])
        env["KVASIR_PORT"] = str(self.port)
        env["PATH"] += ":/usr/sbin:/sbin"
        return subprocess.Popen(["unshare", "--mount", "--pid", "--fork", "--kill-child", "sh", "-c", RUN, "run", self.image.root,
                                 os.path.dirname(os.path.abspath(self.model)), self.image.config["User"], *command],
                                stdin=subprocess.DEVNULL, stdout=out, stderr=out, env=env)

    def health(self):
        """The image's own check."""
        test = self.image.config["Healthcheck"]["Test"]
        assert test[0] == "CMD"
        return self.start(test[1:], subprocess.DEVNULL).wait(30)

    def pid(self):
        """Of process 1, as seen from outside."""
        return child_of(self.process.pid)

    def stop(self):
        os.kill(self.pid(), getattr(signal, self.image.config["StopSignal"]))
        return self.process.wait(30)
