#!/usr/bin/env python3
"""
Every kernel, for every GPU it was compiled for, keeps its variables in registers: no spills, no local memory.

    check_resources.py [--verbose] FILE...

FILE is what ptxas printed (cuda/nvcc.sh keeps it). ALLOWED lists the exceptions, best none. Prints the wrong kernels, then how
many there are of each architecture; the last line is "N passed, N failed, N skipped". Without a FILE, as in a build without
nvcc, there is nothing to check: exit status 77.
"""

import collections
import re
import subprocess
import sys

# (pattern of the mangled name, architecture): bytes that are written to local memory and read back at most.
ALLOWED = {
    # Rows of a prompt that tell what they gave to pages, or meet chunks, on Turing: one value, and nobody else's kernel.
    (r"attend_wholeILi128ELb0ELi2EL7kv_form[0-3]ELNS_9rows_modeE1E", "sm_75"): 16,
}

ENTRY = re.compile(r"Compiling entry function '(\S+)' for '(\S+)'")
STACK = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
USED = re.compile(r"Used (\d+) registers(?:.*?(\d+) bytes smem)?")


def kernels(path):
    """(name, architecture, stack bytes, spilled bytes, registers) of each kernel."""
    entry = stack = None
    with open(path, encoding="utf-8") as f:
        for line in f:
            if m := ENTRY.search(line):
                entry, stack = m.groups(), None
            elif m := STACK.search(line):
                stack = [int(n) for n in m.groups()]
            elif (m := USED.search(line)) and entry:
                if stack is None:
                    raise SystemExit(f"{path}: no stack frame is given for {entry[0]}")
                yield *entry, stack[0], stack[1] + stack[2], int(m.group(1))
                entry = None


def demangled(name):
    try:
        return subprocess.run(["c++filt", name], capture_output=True, text=True, check=True).stdout.strip().split("(")[0]
    except (OSError, subprocess.CalledProcessError):
        return name


def allowed(name, arch):
    """Bytes that a kernel may spill."""
    return max((n for (pattern, a), n in ALLOWED.items() if a == arch and re.search(pattern, name)), default=0)


def main(argv):
    verbose = "--verbose" in argv
    if not [a for a in argv if not a.startswith("--")]:
        print("skipped: this build has no kernels (nvcc was not found, or -Dcuda=disabled)\n0 passed, 0 failed, 1 skipped")
        return 77
    count, failed, most = collections.Counter(), 0, collections.Counter()
    for path in (a for a in argv if not a.startswith("--")):
        for name, arch, stack, spilled, registers in kernels(path):
            count[arch] += 1
            most[arch] = max(most[arch], registers)
            if verbose:
                print(f"{arch} {registers:4d} registers {stack:5d} stack {spilled:5d} spilled  {demangled(name)}")
            if max(stack, spilled) > allowed(name, arch):
                failed += 1
                print(f"FAIL {arch} {demangled(name)}: {stack} bytes of local memory, {spilled} bytes spilled")
    for arch in sorted(count):
        print(f"{arch}: {count[arch]} kernels, at most {most[arch]} registers")
    if not count:
        print("no kernels were found")
        failed += 1
    print(f"{sum(count.values()) - failed if failed < sum(count.values()) else 0} passed, {failed} failed, 0 skipped")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
