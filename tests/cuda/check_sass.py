#!/usr/bin/env python3
"""
The kernels that decode is made of read memory 16 bytes a time: the machine code of each has LDG.E.128 loads (of whatever cache
policy), for each GPU it was compiled for.

    check_sass.py CUOBJDUMP [OBJECT...]

Exits with 77 when there is no cuobjdump (NVIDIA's package nvidia-cuda-cuobjdump has it), or no OBJECT, as in a build without nvcc. The last line is
"N passed, N failed, N skipped".
"""

import os
import re
import shutil
import subprocess
import sys

# A kernel whose name is one of these reads its weights or pages by wide loads. cp.async of 16 bytes is one, too.
WIDE = re.compile(r"\b(LDG\.E(\.\w+)*\.128|LDGSTS(\.\w+)*\.128)\b")
# Of attention there is one for each kind of KV: f16, fp8_e4m3, int8 and bf16 (cuda/kernels.cuh, PAGES_BF16).
DECODE_KERNELS = [re.compile(k) for k in ("few_rows", *(rf"attend_parts.*kv_form\D?{form}E" for form in range(4)))]

FUNCTION = re.compile(r"^\s*Function : (\S+)")
ARCH = re.compile(r"^arch = (sm_\w+)")


def wide_loads(tool, path):
    """{(architecture, function): number of 16-byte loads}."""
    found, arch, function = {}, None, None
    out = subprocess.run([tool, "-sass", path], capture_output=True, text=True)
    if out.returncode:
        raise SystemExit(f"cuobjdump {path}: {out.stderr.strip()}")
    for line in out.stdout.splitlines():
        if m := ARCH.match(line):
            arch = m.group(1)
        elif m := FUNCTION.match(line):
            function = m.group(1)
            found.setdefault((arch, function), 0)
        elif function and WIDE.search(line):
            found[arch, function] += 1
    return found


def main(tool, objects):
    tool = shutil.which(os.environ.get("KVASIR_CUOBJDUMP") or tool)
    if not tool:
        print("skipped: no cuobjdump (the Python package nvidia-cuda-cuobjdump has it)\n0 passed, 0 failed, 1 skipped")
        return 77
    if not objects:
        print("skipped: this build has no kernels (nvcc was not found, or -Dcuda=disabled)\n0 passed, 0 failed, 1 skipped")
        return 77
    passed = failed = 0
    seen = set()
    for path in objects:
        for (arch, function), n in wide_loads(tool, path).items():
            kind = next((k for k in DECODE_KERNELS if k.search(function)), None)
            if not kind:
                continue
            seen.add(kind)
            if n:
                passed += 1
            else:
                failed += 1
                print(f"FAIL {arch} {function}: no 16-byte load")
    for kind in DECODE_KERNELS:
        if kind not in seen:
            failed += 1
            print(f"FAIL no kernel is named ...{kind.pattern}...")
    print(f"{passed} passed, {failed} failed, 0 skipped")
    return 1 if failed else 0


if __name__ == "__main__":
    if len(sys.argv) < 2:
        raise SystemExit(__doc__)
    sys.exit(main(sys.argv[1], sys.argv[2:]))
