"""A trainer that writes an arena's descriptor before any engine runs, as a process that tests can kill.

    python -m tests.wire.preloading_trainer MODEL_DIR DESCRIPTOR

It says "written", and then waits until its stdin is closed.
"""

from __future__ import annotations

import sys
from pathlib import Path

from rollout_engine.models.weights import model_layout
from tests.tiny import load_reference
from trainers_adapters import AdoptedArena


def main(model_dir: str, descriptor: str) -> None:
    model = load_reference(Path(model_dir))
    arena = AdoptedArena(None, model, layout=model_layout(model_dir, "float32"))
    arena.write_descriptor(descriptor)
    print("written", flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main(*sys.argv[1:])
