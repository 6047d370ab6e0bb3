"""Start an engine on a trainer's arena, so that the weights are in memory once; train a step in it; show the
KV pool and the arithmetic behind its size.

python examples/start_on_arena.py DIRECTORY [OPTIONS OF rollsync serve ...]
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from rollout_engine.models.weights import model_layout
from trainers_adapters import AdoptedArena, RolloutClient, RollsyncError, WeightsClient

FRACTION = 0.5


def start(
    directory: str, dtype: str, descriptor: Path, options: list[str]
) -> tuple[subprocess.Popen[bytes], str]:
    """`rollsync serve` on the arena that the descriptor names; the process and its address."""
    ready = descriptor.with_name("ready.json")
    command = [sys.executable, "-m", "rollout_engine.cli", "serve", "--model", directory, "--dtype", dtype]
    command += ["--weights", f"ipc:{descriptor}", "--mem-fraction-static", str(FRACTION)]
    command += ["--port", "0", "--ready-file", str(ready), *options]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    while not ready.exists():
        if process.poll() is not None:
            sys.exit(f"the engine exited with code {process.returncode}; its log says why")
        time.sleep(0.1)
    return process, json.loads(ready.read_text())["address"]


def show_pool(kv: dict[str, int]) -> None:
    """kv: EngineInfo.kv_capacity."""
    before, arena = kv["pre_model_load_bytes"], kv["preloaded_weights_bytes"]
    kept_free = round((before + arena) * (1 - FRACTION))
    pool = kv["available_bytes"] - kept_free - kv["reserved_bytes"]
    rows = [
        ("free once the model is there", kv["available_bytes"]),
        (f"kept free: {1 - FRACTION:.0%} of what was free before, and of the arena", -kept_free),
        ("reserved for graphs, logits, staging", -kv["reserved_bytes"]),
        ("left for the KV pool", pool),
        ("would be left, had nobody counted the arena", pool + round(arena * (1 - FRACTION))),
        (
            f"taken, in pages of {kv['bytes_per_page']} bytes, no more than the largest batch fills",
            kv["kv_bytes"],
        ),
    ]
    for what, nbytes in rows:
        print(f"{nbytes / 1e6:12,.1f} MB  {what}")


def main() -> None:
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    directory, *options = sys.argv[1:]
    device, dtype = ("cuda", "bfloat16") if torch.cuda.is_available() else ("cpu", "float32")
    model: torch.nn.Module = AutoModelForCausalLM.from_pretrained(directory, dtype=getattr(torch, dtype))
    model = model.to(device)
    with tempfile.TemporaryDirectory() as folder:
        descriptor = Path(folder) / "arena.json"
        with AdoptedArena(None, model, layout=model_layout(directory, dtype)) as arena:
            arena.write_descriptor(descriptor)
            engine, address = start(directory, dtype, descriptor, options)
            try:
                with RolloutClient(address) as rollout, WeightsClient(address) as weights:
                    info = rollout.info()
                    print(f"an engine on {info.weight_bytes / 1e6:,.1f} MB of this process's weights")
                    show_pool(info.kv_capacity)
                    arena.connect(weights)
                    with arena.update(), torch.no_grad():
                        for parameter in model.parameters():
                            parameter.mul_(0.99)
                    assert arena.report is not None
                    (completion,) = rollout.generate([1, 2, 3], max_tokens=6, temperature=0.0)
                    print(
                        f"version {arena.report.version} in {arena.report.seconds.pause * 1e3:.1f} ms, "
                        f"{arena.report.extra_bytes} bytes of new memory; tokens {completion.token_ids} of "
                        f"versions {sorted(set(completion.weight_versions))}"
                    )
            finally:
                engine.terminate()
                engine.wait()


if __name__ == "__main__":
    try:
        main()
    except RollsyncError as error:
        sys.exit(f"error: {error}")
