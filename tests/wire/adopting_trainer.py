"""A trainer that shares its arena with an engine, as a process that tests can kill.

    python -m tests.wire.adopting_trainer ADDRESS MODEL_DIR

It adopts once, says "adopted", and then does what each line on stdin says: `begin` opens an update and
writes half of the weights, without ever committing.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from tests.tiny import load_reference
from trainers_adapters import AdoptedArena, WeightsClient


def main(address: str, model_dir: str) -> None:
    model = load_reference(Path(model_dir))
    arena = AdoptedArena(WeightsClient(address), model)
    with arena.update():
        pass
    print("adopted", flush=True)
    for line in sys.stdin:
        assert line.strip() == "begin"
        update = arena.update()
        update.__enter__()
        with torch.no_grad():
            for parameter in list(model.parameters())[::2]:
                parameter.mul_(3.0)
        print("written", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
