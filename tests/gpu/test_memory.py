"""Releasing memory of a GPU: it is really given back, addresses stay, and everything works again after."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from rollout_engine.models.config import ModelConfig
from rollout_engine.runner.kv_pool import KVPool
from rollout_engine.runner.memory import discard_contents, restore_contents
from tests.unit.weight_updater.tiny_target import TinyTarget, make_updater, push, weights
from weight_updater import virtual_memory
from weight_updater.arena import Arena, SlotSpec, StorageSpec, WeightTarget

pytestmark = [pytest.mark.gpu, pytest.mark.alone]

DEVICE = torch.device("cuda:0")
NUM_BYTES = 512 << 20
SLACK = 16 << 20


@pytest.fixture(scope="module", autouse=True)
def _kernels_are_loaded() -> None:
    """A kernel's code takes device memory when it first runs: not what these tests count."""
    for dtype in (torch.uint8, torch.int32):
        data = torch.zeros(1 << 20, dtype=dtype, device=DEVICE)
        data.fill_(7)
        assert data.any()
        assert (data == 7).all()


def free_bytes() -> int:
    torch.cuda.synchronize(DEVICE)
    torch.cuda.empty_cache()  # what torch only keeps for later is free
    return torch.cuda.mem_get_info(DEVICE)[0]


def test_the_binding_is_there():
    assert virtual_memory.is_supported()


def test_memory_is_given_back_and_taken_again_at_the_same_address():
    before = free_bytes()
    data = virtual_memory.allocate(NUM_BYTES, DEVICE)
    view = data[256:].view(torch.int32)
    assert (data.dtype, data.numel(), data.device) == (torch.uint8, NUM_BYTES, DEVICE)
    assert not data.any()
    assert data.data_ptr() % 256 == 0
    assert abs(before - free_bytes() - NUM_BYTES) < SLACK
    view.fill_(7)
    addresses = data.data_ptr(), view.data_ptr()

    assert NUM_BYTES <= virtual_memory.release(data) < NUM_BYTES + SLACK
    assert abs(before - free_bytes()) < SLACK
    assert virtual_memory.release(data) == 0

    assert NUM_BYTES <= virtual_memory.resume(data) < NUM_BYTES + SLACK
    assert virtual_memory.resume(data) == 0
    assert abs(before - free_bytes() - NUM_BYTES) < SLACK
    assert (data.data_ptr(), view.data_ptr()) == addresses
    assert not view.any()
    view.fill_(3)
    assert bool((view == 3).all())

    del data, view
    assert abs(before - free_bytes()) < SLACK


def test_memory_that_is_dropped_while_released_gives_its_addresses_back():
    before = free_bytes()
    for _ in range(8):
        data = virtual_memory.allocate(NUM_BYTES, DEVICE)
        virtual_memory.release(data)
        del data
    assert abs(before - free_bytes()) < SLACK


def test_a_plain_tensor_keeps_its_contents():
    plain = torch.ones(1024, device=DEVICE)
    assert discard_contents(plain) == 0
    assert restore_contents(plain) == 0
    assert bool((plain == 1).all())


def test_too_much_is_an_out_of_memory_error_and_leaves_nothing_behind():
    before = free_bytes()
    with pytest.raises(torch.OutOfMemoryError):
        virtual_memory.allocate(1 << 42, DEVICE)
    assert abs(before - free_bytes()) < SLACK
    assert virtual_memory.allocate(256, DEVICE).numel() == 256


@pytest.mark.case("B058")
def test_a_captured_graph_reads_the_memory_that_came_back():
    data = virtual_memory.allocate(1 << 20, DEVICE).view(torch.float32)
    out = torch.zeros(4, device=DEVICE)
    data.fill_(1.0)
    stream = torch.cuda.Stream(DEVICE)
    with torch.cuda.stream(stream):
        out.copy_(data[:4] * 2)  # warm
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        out.copy_(data[:4] * 2)
    virtual_memory.release(data)
    virtual_memory.resume(data)
    data.fill_(5.0)
    torch.cuda.synchronize(DEVICE)
    graph.replay()
    torch.cuda.synchronize(DEVICE)
    assert out.tolist() == [10.0] * 4


@pytest.mark.case("B113")
def test_weights_and_staging_come_back_with_the_next_full_update():
    shape = (8192, 8192)  # 128 MiB in bfloat16
    storages = [StorageSpec("w", torch.bfloat16, shape, (SlotSpec("w", shape),))]
    parameter = torch.nn.Parameter(torch.empty(0, dtype=torch.bfloat16, device=DEVICE))
    target = WeightTarget(Arena(storages), {"w": parameter}, DEVICE)
    updater = make_updater(target, device_staging=True)
    new = {"w": torch.randn(shape, generator=torch.Generator().manual_seed(1)).bfloat16()}
    push(updater, new)
    addresses, before = target.addresses(), free_bytes()

    updater.discard()
    released = discard_contents(target.buffer) + updater.buffers.release()
    assert 2 * target.arena.nbytes <= released < 2 * target.arena.nbytes + SLACK
    assert abs(free_bytes() - before - released) < SLACK

    assert restore_contents(target.buffer) + updater.buffers.resume() == released
    assert target.addresses() == addresses
    assert updater.torn_reason
    push(updater, new)
    assert not updater.torn_reason
    assert torch.equal(parameter.data.cpu(), new["w"])
    updater.close()


def test_small_weights_too():
    target = TinyTarget(device=DEVICE)
    updater = make_updater(target, device_staging=True)
    updater.discard()
    assert discard_contents(target.buffer) > 0
    assert updater.buffers.release() > 0
    restore_contents(target.buffer)
    updater.buffers.resume()
    push(updater, weights(3))
    for name, value in weights(3).items():
        assert torch.equal(target.slot(name).cpu(), value)
    updater.close()


@pytest.mark.case("B058")
def test_the_kv_pool_keeps_its_addresses(tiny_llama_dir):
    config = ModelConfig.from_directory(tiny_llama_dir, known=("LlamaForCausalLM",))
    config = dataclasses.replace(config, dtype=torch.bfloat16)
    pages = NUM_BYTES // (config.bytes_per_token * 16)
    pool = KVPool(config, pages, 16, DEVICE)
    addresses = [tensor.data_ptr() for tensor in (*pool.k, *pool.v, *pool.k_pages)]
    pool.k[0].fill_(1.0)
    before = free_bytes()
    released = pool.release()
    assert released >= pool.nbytes
    assert abs(free_bytes() - before - released) < SLACK
    assert pool.resume() == pool.nbytes
    assert abs(free_bytes() - before) < SLACK
    assert [tensor.data_ptr() for tensor in (*pool.k, *pool.v, *pool.k_pages)] == addresses
    assert not pool.k[0].any()
    pool.write(
        0, torch.tensor([3], device=DEVICE), *(torch.ones(1, *pool.k[0].shape[1:]).bfloat16().to(DEVICE),) * 2
    )
    assert bool((pool.v[0][3] == 1).all())
