#!/usr/bin/env python3
"""Traces for `kvasir replay`: a workload of agents, and pieces and mixtures of other traces.

usage: make_trace.py agents [SEED]      programs that work in long loops over tools
       make_trace.py first TRACE        its first half
       make_trace.py second TRACE       its second half
       make_trace.py mix TRACE TRACE    both at the same time, sharing nothing

Writes one JSON object a line: timestamp (ms), input_length, output_length, hash_ids (blocks of 512 tokens).
"""
import heapq
import json
import random
import sys

BLOCK = 512


class Names:
    """Block ids that name a block together with all before it."""

    def __init__(self):
        self.ids = {}

    def of(self, chain):
        out, parent = [], None
        for block in chain:
            parent = self.ids.setdefault((parent, block), len(self.ids))
            out.append(parent)
        return out


def agents(seed, minutes=60):
    """Agents of a few products share a long beginning (instructions, tools). One works in a loop: it calls a tool, which takes
    seconds, and comes back with everything so far and the result. Some fork helpers that share what they know; some wait
    for a person in between; some never come back. Beside them run one-shot prompts with short answers (routers, classifiers,
    guards) and jobs that wake every few minutes."""
    rng = random.Random(seed)
    names, rows, events = Names(), [], []
    products = [[f"product {p} {i}" for i in range(rng.randint(6, 30))] for p in range(5)]
    fresh = 0

    def new_blocks(n):
        nonlocal fresh
        fresh += n
        return list(range(fresh - n, fresh))

    def at(time, kind, *what):
        heapq.heappush(events, (time, len(events) + len(rows), kind, what))

    def emit(time, chain, output):
        # The last block is not full and will not be found again: what follows replaces it.
        ids = names.of(chain + new_blocks(1))
        rows.append({"timestamp": int(time), "input_length": len(ids) * BLOCK - rng.randrange(BLOCK), "output_length": output,
                     "hash_ids": ids})

    end = minutes * 60_000
    time = 0.0
    while time < end:
        time += rng.expovariate(1 / 4_000)
        at(time, "agent", rng.choice(products), [], rng.choice((3, 8, 20, 45)), rng.uniform(1_500, 25_000))
    time = 0.0
    while time < end:
        time += rng.expovariate(1 / 700)
        at(time, "shot", rng.choice(products)[:2])
    for job in range(12):
        at(rng.uniform(0, 300_000), "job", products[job % 5] + new_blocks(rng.randint(5, 60)), rng.uniform(120_000, 600_000))

    while events:
        now, _, kind, what = heapq.heappop(events)
        if now > end:
            break
        if kind == "shot":
            emit(now, what[0] + new_blocks(rng.randint(1, 8)), rng.randint(1, 12))
        elif kind == "job":
            chain, period = what
            emit(now, chain, rng.randint(20, 300))
            at(now + period, "job", chain, period)
        else:
            product, history, turns, pace = what
            history = history + new_blocks(1 if rng.random() < 0.7 else rng.randint(2, 12))
            emit(now, product + history, rng.randint(30, 400))
            if turns > 1 and rng.random() < 0.97:
                pause = rng.expovariate(1 / 120_000) if rng.random() < 0.05 else rng.expovariate(1 / pace)
                at(now + 1_000 + pause, "agent", product, history, turns - 1, pace)
            if rng.random() < 0.04:
                for _ in range(rng.randint(2, 4)):
                    at(now + rng.uniform(500, 4_000), "agent", product, history, rng.choice((1, 3, 6)), pace)
    return rows


def read(path):
    with open(path, encoding="utf-8") as f:
        return [json.loads(line) for line in f if line.strip()]


def halves(rows):
    middle = len(rows) // 2
    start = rows[middle]["timestamp"]
    return rows[:middle], [dict(r, timestamp=r["timestamp"] - start) for r in rows[middle:]]


def mix(a, b):
    rows = [dict(r, hash_ids=[h * 2 + side for h in r["hash_ids"]]) for side, rows in enumerate((a, b)) for r in rows]
    return sorted(rows, key=lambda r: r["timestamp"])


def write(rows, out):
    for row in rows:
        out.write(json.dumps(row) + "\n")


def main(args):
    match args:
        case ["agents", *seed] if len(seed) < 2:
            rows = agents(int(seed[0]) if seed else 1)
        case ["first", path]:
            rows = halves(read(path))[0]
        case ["second", path]:
            rows = halves(read(path))[1]
        case ["mix", one, other]:
            rows = mix(read(one), read(other))
        case _:
            sys.exit(__doc__)
    write(rows, sys.stdout)


if __name__ == "__main__":
    main(sys.argv[1:])
