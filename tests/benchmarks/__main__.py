"""`python -m tests.benchmarks [ROWS ...]`: the two-core goals; all of them take about six minutes.

batch     a mixed batch, in process and through gRPC, against transformers generate
updates   push_weights of SmolLM2 by every path
tensors   what 18,432 tensors add to an update
flat      what 1,000 updates leave behind
front     what gRPC adds to a token

Exits with 1 if a goal is not met.
"""

from __future__ import annotations

import sys

from rollout_engine.models.packaged import packaged_smollm2
from tests.benchmarks import cpu, front, scale
from tests.benchmarks.table import save, show

TOPICS = {
    "batch": cpu.batch,
    "updates": cpu.updates,
    "tensors": scale.tensors,
    "flat": scale.flat,
    "front": front.front,
}


def main(chosen: list[str]) -> int:
    unknown = [name for name in chosen if name not in TOPICS]
    if unknown:
        print(f"there is no {unknown[0]!r}; choose from {', '.join(TOPICS)}", file=sys.stderr)
        return 2
    model_dir = packaged_smollm2(cpu.CACHE)
    rows = []
    for name in chosen or TOPICS:
        print(f"measuring: {name} ...", flush=True)
        rows += TOPICS[name](model_dir)
        save(rows, "cpu")
    show(rows)
    print(f"written: {save(rows, 'cpu')}")
    return 0 if all(row.met for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
