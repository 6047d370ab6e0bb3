"""Tensors that come once, on a GPU: buckets there, which the engine reads by CUDA IPC."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest
import torch

from tests.engines import RunningEngine
from tests.tiny import load_reference
from trainers_adapters.bucket_push import BucketPush
from trainers_adapters.errors import PushError
from weight_updater.checksum import checksum

pytestmark = pytest.mark.gpu

BUCKET_BYTES = 128 << 10
PROMPT = [5, 9, 77, 31, 8, 120, 64, 3] * 5

Weights = dict[str, torch.Tensor]


@pytest.fixture
def weights(tiny_bf16_dir: Path) -> Weights:
    """A trainer's, float32 on the first GPU."""
    return {name: tensor.cuda() for name, tensor in load_reference(tiny_bf16_dir).state_dict().items()}


def offer(push: BucketPush, weights: Weights) -> None:
    push.begin()
    for name, tensor in weights.items():
        lent = tensor.clone()
        if push.add(name, lent):
            push.send()
        lent.fill_(float("nan"))
    push.prepare()


@pytest.mark.parametrize("staging", ["device", "host"])
@pytest.mark.parametrize("path", ["ipc", "tensor"])
def test_buckets_of_a_gpu_become_live(path: str, staging: str, gpu_engine: RunningEngine, weights: Weights):
    with closing(
        BucketPush([gpu_engine.weights], path=path, staging=staging, bucket_bytes=BUCKET_BYTES)
    ) as push:
        for step in (1, 2, 3):
            for tensor in weights.values():
                tensor.add_(0.03 * step)
            offer(push, weights)
            assert [bucket.on_gpu for bucket in push._buckets] == [path == "ipc"] * 2
            report = push.commit()
            live = gpu_engine.weights.checksums()
            assert live.weight_version == report.version
            rounded = {name: tensor.bfloat16().cpu() for name, tensor in weights.items()}
            assert live.by_name == {name: checksum(tensor) for name, tensor in rounded.items()}
            assert gpu_engine.greedy(PROMPT, ignore_eos=True).weight_versions == [report.version] * 8
            if step == 2:
                push.free(on_gpu_only=True)
                assert bool(push._buckets) == (path == "tensor")


def test_a_value_that_is_not_finite_is_refused(gpu_engine: RunningEngine, weights: Weights):
    before = gpu_engine.weights.checksums()
    with closing(BucketPush([gpu_engine.weights], path="ipc", bucket_bytes=BUCKET_BYTES)) as push:
        with pytest.raises(PushError, match="NONFINITE"):
            offer(push, weights | {"model.norm.weight": weights["model.norm.weight"] / 0})
        push.abort()
        assert gpu_engine.weights.checksums() == before
        offer(push, weights)
        assert push.commit().version == before.weight_version + 1
