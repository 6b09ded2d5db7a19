"""HAProxy and nginx with the configurations of deploy/, in front of daemons of the tests.

The shipped files run as they are, except for the addresses: each that is replaced must be there.
"""
import os
import shutil
import subprocess
import tempfile

import httpx

from daemon import ROOT, SLOW, eventually, free_port

PATH = os.environ["PATH"] + ":/usr/sbin:/sbin"
KINDS = ("haproxy", "nginx")
SOURCES = {"haproxy": "deploy/haproxy/haproxy.cfg", "nginx": "deploy/nginx/kvasir.conf"}
BINDS = {"haproxy": "bind :80", "nginx": "listen 80;"}


def program(kind):
    return shutil.which(kind, path=PATH)


def configuration(kind, directory, port, daemon_ports):
    """Writes the configuration into the directory and returns the command that runs it."""
    with open(os.path.join(ROOT, SOURCES[kind])) as f:
        text = f.read()
    bind = BINDS[kind]
    replace = {bind: bind.replace(":80", f"127.0.0.1:{port}").replace(" 80", f" 127.0.0.1:{port}")}
    replace.update({f"10.0.0.{11 + i}:8080": f"127.0.0.1:{p}" for i, p in enumerate(daemon_ports)})
    for old, new in replace.items():
        assert old in text, f"{SOURCES[kind]} has no {old!r}"
        text = text.replace(old, new)
    path = os.path.join(directory, os.path.basename(SOURCES[kind]))
    with open(path, "w") as f:
        f.write(text)
    if kind == "haproxy":
        return [program(kind), "-f", path]
    temps = "".join(f"{name}_temp_path {directory}/{name};\n" for name in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi"))
    main = os.path.join(directory, "nginx.conf")
    with open(main, "w") as f:
        f.write(f"{'user root;' if os.getuid() == 0 else ''}\ndaemon off;\npid {directory}/nginx.pid;\nworker_processes 2;\n"
                f"error_log stderr warn;\nevents {{ worker_connections 2048; }}\n"
                f"http {{\naccess_log off;\n{temps}include {path};\n}}\n")
    return [program(kind), "-e", "stderr", "-p", directory, "-c", main]


class Balancer:
    """A running balancer; the url and ws_url that a daemon has."""

    def __init__(self, kind, daemons):
        self.directory = tempfile.TemporaryDirectory(prefix="kvasir-balancer-")
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.ws_url = f"ws://127.0.0.1:{self.port}/v1/responses"
        self.log = open(os.path.join(self.directory.name, "log"), "w+")
        command = configuration(kind, self.directory.name, self.port, [d.port for d in daemons])
        self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=self.log, stderr=self.log)

        def up():
            assert self.process.poll() is None, self.stderr()
            try:
                return httpx.get(self.url + "/health/ready", timeout=5 * SLOW).status_code == 200
            except httpx.TransportError:
                return False
        eventually(up, 20, f"{kind} serves")

    def stderr(self):
        with open(self.log.name, errors="replace") as f:
            return f.read()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.terminate()
        self.process.wait(10 * SLOW)
        self.log.close()
        self.directory.cleanup()
