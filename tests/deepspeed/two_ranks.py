"""The real DeepSpeed, ZeRO-3 on two gloo ranks of a CPU, where it is installed: whole weights arrive.

    pip install --no-build-isolation deepspeed     (it compiles a small part when it runs: g++ and ninja)
    python -m tests.deepspeed.two_ranks

The suite does without: tests/unit/adapters/zero3_stand_in.py is a stand-in for what is used of DeepSpeed.
"""

from __future__ import annotations

import os
import subprocess
import sys
import warnings

import torch
from torch import distributed as dist

from tests.unit.adapters.sharded_nets import IDS, Net, expected_of, with_adapters


def main() -> None:
    """The parent: an engine's stand-in, and two ranks."""
    from tests.unit.adapters.fake_engine import FakeEngine, serving

    with serving(FakeEngine()) as address:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        environment = os.environ | {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
        command += ["-m", "tests.deepspeed.two_ranks", address]
        sys.exit(subprocess.run(command, env=environment).returncode)


def rank(address: str) -> None:
    import deepspeed

    from trainers_adapters import ShardedSource, WeightsClient, push_sharded

    warnings.simplefilter("ignore")
    deepspeed.init_distributed("gloo", verbose=False)
    for lora in (False, True):
        torch.manual_seed(0)
        net = with_adapters(Net()) if lora else Net()
        expected = {name: tensor.clone() for name, tensor in expected_of(net, lora)}
        config = {
            "train_batch_size": 2,
            "train_micro_batch_size_per_gpu": 1,
            "zero_force_ds_cpu_optimizer": False,
            "zero_allow_untested_optimizer": True,
            "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
        }
        optimizer = torch.optim.SGD([p for p in net.parameters() if p.requires_grad], lr=0.5)
        engine, *_ = deepspeed.initialize(model=net, optimizer=optimizer, config=config)
        assert all(p.numel() == 0 for p in engine.module.parameters()), "nothing was sharded"
        source = ShardedSource(engine, bucket_bytes=400, timeout_s=60.0)
        client = WeightsClient(address) if source.rank == 0 else None
        got = source.together(lambda source=source: dict(source))
        if got is not None:
            assert list(got) == list(expected)
            assert all(torch.equal(got[name], tensor) for name, tensor in expected.items())
        push_sharded(source, client)
        loss = engine(IDS).square().sum()
        engine.backward(loss)
        engine.step()
        pushed = push_sharded(source, client)
        assert all(p.numel() == 0 for p in engine.module.parameters()), "the push left whole parameters"
        if pushed.report is not None:
            changed = pushed.report.num_changed
            assert changed > 0
            print(f"ZeRO-3, LoRA {lora}: version {pushed.version}, {changed} tensors changed", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    rank(sys.argv[1]) if sys.argv[1:] else main()
