"""Swap a running engine's weights from this process, by shared memory, and roll back.

rollsync serve --model DIRECTORY --dtype float32        (in another terminal)
python examples/swap_weights.py DIRECTORY
"""

from __future__ import annotations

import os
import sys

import torch
from transformers import AutoModelForCausalLM

from trainers_adapters import (
    IpcArena,
    ModuleSource,
    RolloutClient,
    RollsyncError,
    WeightsClient,
    push_weights,
)


def main() -> None:
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    address = os.environ.get("ROLLSYNC_ADDRESS", "127.0.0.1:50051")
    model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32)
    with RolloutClient(address) as engine, WeightsClient(address) as weights, IpcArena() as arena:

        def show(what: str) -> None:
            (completion,) = engine.generate([1, 2, 3], max_tokens=6, temperature=0.0)
            print(f"{what}: version {completion.weight_versions[0]}, tokens {completion.token_ids}")

        show("before")
        with torch.no_grad():
            for parameter in model.model.layers[0].parameters():
                parameter.mul_(0.5)
        report = push_weights(ModuleSource(model), weights, via=arena, keep_previous=True)
        reply = report.replies[address]
        print(
            f"pushed {reply.num_tensors} tensors, {reply.num_bytes / 1e6:.0f} MB, {reply.num_changed} new: "
            f"{report.seconds * 1e3:.0f} ms, of which generation paused {report.pause_seconds * 1e3:.0f} ms"
        )
        show("after")
        weights.rollback()
        show("rolled back")


if __name__ == "__main__":
    try:
        main()
    except RollsyncError as error:
        sys.exit(f"error: {error}")
