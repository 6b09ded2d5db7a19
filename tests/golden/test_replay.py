#!/usr/bin/env python3
"""kvasir replay on real traces: the default eviction policy finds more than every other one, at every size, and is told nothing.

Reads KVASIR_SHARED/traces (default: ../shared next to the repository); what is absent is skipped, with the reason printed. With
KVASIR_FULL=yes the times are scaled as well. Exit status: 0 all passed, 1 a failure, 77 nothing could be run.
"""
import heapq
import json
import os
import pathlib
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests" / "tools"))
import make_trace  # noqa: E402

TRACES = pathlib.Path(os.environ.get("KVASIR_SHARED", ROOT.parent / "shared")) / "traces"
BIN = os.environ.get("KVASIR_BIN", str(ROOT / "build" / "server" / "kvasir"))
FULL = os.environ.get("KVASIR_FULL") == "yes"
SIZES = (1600, 5000, 16000, 32000)
POLICIES = {"default", "lru", "lfu", "dual", "s3fifo", "gdsf", "belady"}


class Score:
    def __init__(self):
        self.passed = self.failed = 0

    def check(self, ok, what):
        self.passed += bool(ok)
        self.failed += not ok
        if not ok:
            print("FAILED", what)


def replay(path, *args):
    done = subprocess.run([BIN, "replay", str(path), "--json", *args], capture_output=True, text=True, check=True)
    answer = json.loads(done.stdout)
    return answer, {(row["policy"], row["capacity_blocks"]): row for row in answer["rows"]}


def show(name, cells):
    for size in SIZES:
        rates = {p: cells[p, size]["hit_rate"] for p in POLICIES}
        best = max((r, p) for p, r in rates.items() if p not in ("default", "belady"))
        print(f"  {name:24} {size:6}  default {rates['default']:.4f}  best other {best[0]:.4f} ({best[1]})  bound {rates['belady']:.4f}")


def best_other(cells, size):
    return max(cells[p, size]["hit_rate"] for p in POLICIES - {"default", "belady"})


def check_bound(score, name, cells):
    for size in SIZES:
        for p in POLICIES:
            score.check(cells[p, size]["hit_rate"] <= cells["belady", size]["hit_rate"], f"{name}: {p} passes the bound at {size}")


def wins(score, name, path, *args):
    """The default beats every other policy, at every size."""
    cells = replay(path, "--capacity", ",".join(map(str, SIZES)), *args)[1]
    show(name, cells)
    check_bound(score, name, cells)
    for size in SIZES:
        mine, best = cells["default", size]["hit_rate"], best_other(cells, size)
        score.check(mine > best, f"{name}: the default finds {mine:.4f} at {size} blocks, another {best:.4f}")


def holds(score, name, path, *args):
    """The default is as good as the best other one at every size, but for chance (2%), and better on the whole."""
    cells = replay(path, "--capacity", ",".join(map(str, SIZES)), *args)[1]
    show(name, cells)
    check_bound(score, name, cells)
    for size in SIZES:
        mine, best = cells["default", size]["hit_rate"], best_other(cells, size)
        score.check(mine > best * 0.98, f"{name}: the default finds {mine:.4f} at {size} blocks, another {best:.4f}")
    mine = sum(cells["default", size]["hit_rate"] for size in SIZES)
    for p in POLICIES - {"default", "belady"}:
        score.check(mine > sum(cells[p, size]["hit_rate"] for size in SIZES), f"{name}: {p} is better on the whole")


def lru_hits(rows, capacity):
    """Leaf-first lru in so many words."""
    used, children, parent, heap, clock, hits = {}, {}, {}, [], 0, 0
    for row in rows:
        ids = row["hash_ids"]
        n = next((i for i, b in enumerate(ids) if b not in used), len(ids))
        hits += n
        mine = set(ids)
        for i, block in enumerate(ids):
            while i >= n and len(used) >= capacity:
                at, victim = heapq.heappop(heap)
                if used.get(victim) != at or children[victim] or victim in mine:
                    continue
                del used[victim]
                above = parent[victim]
                if above is not None:
                    children[above] -= 1
                    if not children[above]:
                        heapq.heappush(heap, (used[above], above))
            if i >= n:
                parent[block] = ids[i - 1] if i else None
                children[block] = 0
                if i:
                    children[ids[i - 1]] += 1
            clock += 1
            used[block] = clock
        heapq.heappush(heap, (used[ids[-1]], ids[-1]))
    return hits


def main():
    real = {name: TRACES / f"mooncake_{name}.jsonl" for name in ("conversation", "synthetic")}
    missing = [str(p) for p in real.values() if not p.exists()]
    if missing:
        print(f"skipped: there is no {missing[0]} (set KVASIR_SHARED)")
        print("0 passed, 0 failed, 1 skipped")
        return 77
    score = Score()
    rows = {name: make_trace.read(path) for name, path in real.items()}

    answer, cells = replay(real["synthetic"], "--capacity", "5000", "--policy", "lru,default")
    blocks = sum(len(r["hash_ids"]) for r in rows["synthetic"])
    score.check(answer["prompts"] == len(rows["synthetic"]) and answer["blocks"] == blocks, "the trace is read whole")
    score.check(set(cells) == {("lru", 5000), ("default", 5000)}, "the rows are those that were asked for")
    score.check(cells["lru", 5000]["hits"] == lru_hits(rows["synthetic"], 5000), "lru finds what a model of it finds")
    again = replay(real["synthetic"], "--capacity", "5000", "--policy", "default")[1]
    score.check(again["default", 5000]["hits"] == cells["default", 5000]["hits"], "a second run finds the same")

    for name, path in real.items():
        wins(score, name, path)
    with tempfile.TemporaryDirectory() as folder:
        made = {f"{name}, {part} half": piece for name in real
                for part, piece in zip(("first", "second"), make_trace.halves(rows[name]))}
        made["both mixed"] = make_trace.mix(rows["conversation"], rows["synthetic"])
        made["agents"] = make_trace.agents(1)
        for name, piece in made.items():
            path = pathlib.Path(folder) / "trace.jsonl"
            with open(path, "w", encoding="utf-8") as f:
                make_trace.write(piece, f)
            holds(score, name, path)
    for name, path in real.items():
        for scale in ("0.01", "0.1", "10", "100") if FULL else ():
            holds(score, f"{name}, times x {scale}", path, "--scale", scale)
    print(f"{score.passed} passed, {score.failed} failed")
    return 1 if score.failed else 0


if __name__ == "__main__":
    sys.exit(main())
