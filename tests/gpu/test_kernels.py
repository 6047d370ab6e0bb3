"""Triton kernels against plain torch."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from rollout_engine.batch.forward import SamplingInfo
from rollout_engine.batch.packing import Packer
from rollout_engine.batch.schedule import SampleRow
from rollout_engine.models.layers import rotate
from rollout_engine.ops import fused, kernels
from rollout_engine.ops.decode_attention import attend
from rollout_engine.ops.host_reads import fetch
from rollout_engine.runner.sampler import NO_TOKEN, sample
from rollout_engine.sampling import SamplingParams

pytestmark = pytest.mark.gpu
DEVICE = torch.device("cuda")


def random(*shape: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0, std: float = 1.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=generator) * std).to(dtype).to(DEVICE)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("rows", "size"), [(1, 4096), (7, 96), (300, 1024)])
def test_norms_round_where_the_reference_does(rows, size, dtype):
    x, residual, weight = (
        random(*s, dtype=dtype, seed=i) for i, s in enumerate([(rows, size)] * 2 + [(size,)])
    )
    expected = fused.rms_norm(x.cpu(), weight.cpu(), 1e-6)
    step = torch.finfo(dtype).eps
    assert torch.allclose(fused.rms_norm(x, weight, 1e-6).cpu(), expected, rtol=8 * step, atol=8 * step)
    expected, total = fused.add_rms_norm(x.cpu(), residual.cpu(), weight.cpu(), 1e-6)
    normed, summed = fused.add_rms_norm(x, residual.clone(), weight, 1e-6)
    assert torch.equal(summed.cpu(), total)
    assert torch.allclose(normed.cpu(), expected, rtol=8 * step, atol=8 * step)


def reference_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """The steps of transformers, each in torch's own kernels on the GPU."""
    wide = x.float()
    return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("size", [4096, 2560, 640])
def test_norms_of_many_rows_are_those_of_transformers_to_the_bit(size, dtype):
    """In float32 another order of a sum shows in every tenth value."""
    rows = kernels.MANY_ROWS + 1
    x, residual = (random(rows, size, dtype=dtype, seed=i) for i in range(2))
    weight = random(size, dtype=dtype, seed=2)
    assert torch.equal(fused.rms_norm(x, weight, 1e-6), reference_norm(x, weight, 1e-6))
    normed, total = fused.add_rms_norm(x, residual.clone(), weight, 1e-6)
    assert torch.equal(total, x + residual)
    assert torch.equal(normed, reference_norm(x + residual, weight, 1e-6))


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_heads_of_many_rows_are_those_of_transformers_to_the_bit(head_dim):
    T, N, K, eps = kernels.MANY_ROWS + 1, 8, 2, 1e-6
    qkv = random(T, (N + 2 * K) * head_dim, dtype=torch.float32)
    q_weight, k_weight = (random(head_dim, dtype=torch.float32, seed=seed) for seed in (1, 2))
    angles = random(T, 1, head_dim // 2, dtype=torch.float32, seed=3)
    rope = torch.cat((angles.cos(), angles.cos()), -1), torch.cat((-angles.sin(), angles.sin()), -1)
    slots = torch.randperm(T, generator=torch.Generator().manual_seed(4)).to(DEVICE)
    pools = [torch.zeros(T, K, head_dim, device=DEVICE) for _ in range(2)]
    q = kernels.norm_rope_write(qkv, (q_weight, k_weight, eps), rope, slots, *pools)
    wanted_q, wanted_k, wanted_v = qkv.view(T, -1, head_dim).split((N, K, K), dim=1)
    assert torch.equal(q, rotate(reference_norm(wanted_q, q_weight, eps), rope))
    assert torch.equal(pools[0][slots], rotate(reference_norm(wanted_k, k_weight, eps), rope))
    assert torch.equal(pools[1][slots], wanted_v)


def test_silu_mul():
    gate_up = random(37, 2 * 1500)
    assert torch.allclose(fused.silu_mul(gate_up).cpu(), fused.silu_mul(gate_up.cpu()), rtol=1e-2, atol=1e-6)


@pytest.mark.parametrize(("features", "size"), [(4096, 4096), (1001, 96), (151936, 1024)])
def test_one_row_times_a_matrix(features, size):
    x, weight = random(1, size), random(features, size, seed=1, std=0.02)
    expected = x.double() @ weight.double().t()
    error = (fused.linear(x, weight, None).double() - expected).norm() / expected.norm()
    assert error < 3e-3
    out = torch.full((1, features), torch.nan, dtype=torch.bfloat16, device=DEVICE)
    assert fused.linear(x, weight, None, out) is out
    assert torch.equal(out, fused.linear(x, weight, None))


@pytest.mark.parametrize("norm", [True, False])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_norm_rope_write(norm, head_dim):
    T, N, K, eps = 19, 8, 2, 1e-6
    qkv = random(T, (N + 2 * K) * head_dim)
    q_weight, k_weight = random(head_dim, seed=1), random(head_dim, seed=2)
    angles = random(T, 1, head_dim // 2, dtype=torch.float32, seed=3)
    cos = torch.cat((angles.cos(), angles.cos()), -1).bfloat16()
    sin = torch.cat((-angles.sin(), angles.sin()), -1).bfloat16()
    slots = torch.randperm(64, generator=torch.Generator().manual_seed(4))[:T].to(DEVICE)
    pools = [torch.zeros(64, K, head_dim, dtype=torch.bfloat16, device=DEVICE) for _ in range(2)]
    norms = (q_weight, k_weight, eps) if norm else None
    q = kernels.norm_rope_write(qkv, norms, (cos, sin), slots, *pools)

    heads = qkv.cpu().view(T, -1, head_dim)
    expected_q, expected_k, expected_v = heads.split((N, K, K), dim=1)
    if norm:
        expected_q = fused.rms_norm(expected_q, q_weight.cpu(), eps)
        expected_k = fused.rms_norm(expected_k, k_weight.cpu(), eps)
    rope = (cos.cpu().float(), sin.cpu().float())
    for found, expected in ((q, expected_q), (pools[0][slots], expected_k)):
        wanted = rotate(expected.float(), rope)
        assert (found.cpu().float() - wanted).abs().max() < 0.01 * wanted.abs().max()
    assert torch.equal(pools[1][slots].cpu(), expected_v)
    untouched = torch.ones(64, dtype=torch.bool)
    untouched[slots.cpu()] = False
    assert not pools[0].cpu()[untouched].any()
    assert not pools[1].cpu()[untouched].any()


def rows_of(params: list[SamplingParams]) -> list[SampleRow]:
    return [SampleRow(i, p, 11 * i + 1, 0, 5 + i, [], []) for i, p in enumerate(params)]


def draw_both(logits: torch.Tensor, params: list[SamplingParams]):
    """What the kernels draw, and the general sampler on the same device."""
    info = SamplingInfo.from_rows(rows_of(params), Packer(DEVICE))
    assert info.untouched
    pools = torch.arange(len(params), device=DEVICE).flip(0)
    last = torch.full((len(params),), -7, device=DEVICE)
    return sample(logits, info, pools, last), sample(logits, info), last.flip(0)


@pytest.mark.parametrize("vocab", [151936, 49152, 32768, 32000, 5000, 1024, 777])
def test_drawing_equals_the_general_sampler(vocab):
    params = [
        SamplingParams(temperature=t, logprobs=m) for t in (1.0, 0.0, 0.7, 1.6) for m in ("processed", "raw")
    ]
    params = params * 8
    logits = random(len(params), vocab, std=3.0, seed=5)
    fast, general, last = draw_both(logits, params)
    assert torch.equal(last, fast.token_ids)
    same = fast.token_ids == general.token_ids
    assert same.float().mean() >= 1 - 1 / len(params), "at most one draw may fall on an edge"
    assert (fast.logprobs - general.logprobs)[same].abs().max() < 2e-5


def test_drawing_follows_the_distribution():
    probs = torch.tensor([0.5, 0.25, 0.0, 0.125, 0.125])
    logits = probs.log().clamp_min(-1e30).expand(20000, 5).contiguous().to(DEVICE)
    fast, _, _ = draw_both(logits, [SamplingParams()] * 20000)
    counts = torch.bincount(fast.token_ids.cpu(), minlength=5) / 20000
    assert counts[2] == 0
    assert (counts - probs).abs().max() < 0.015


def test_rows_that_are_not_finite_say_so():
    logits = random(3, 5000, seed=6)
    logits[1, 4000] = torch.nan
    fast, _, last = draw_both(logits, [SamplingParams()] * 3)
    assert fast.token_ids[1] == NO_TOKEN
    assert torch.isnan(fast.logprobs).tolist() == [False, True, False]
    assert last[1] == 0


def test_packer_brings_many_arrays_in_one_copy():
    packer = Packer(DEVICE)
    for step in range(40):  # more than there are slots
        arrays = [
            np.arange(step, step + 33),
            np.array([[1.5, step]], dtype=np.float32),
            np.array([], dtype=np.int32),
        ]
        tensors = packer.put(arrays)
        for array, tensor in zip(arrays, tensors, strict=True):
            assert tensor.device.type == "cuda"
            assert np.array_equal(tensor.cpu().numpy(), array)


@pytest.mark.parametrize("splits", [1, 4, 32])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "page_size"),
    [(32, 8, 128, 16), (4, 2, 64, 1), (7, 7, 64, 32), (32, 1, 128, 16), (40, 2, 64, 16)],
)
def test_decode_attention_equals_sdpa_in_float32(splits, heads, kv_heads, head_dim, page_size):
    lengths = [1, 15, 16, 17, 63, 200, 333]
    num_pages = sum(-(-n // page_size) for n in lengths)
    k, v = (random(num_pages * page_size, kv_heads, head_dim, seed=s) for s in (1, 2))
    q = random(len(lengths), heads, head_dim, seed=3)
    order = torch.randperm(num_pages, generator=torch.Generator().manual_seed(4)).int()
    rows = torch.tensor([8, 0, 3, 5, 1, 2, 9])
    table = torch.full((10, -(-max(lengths) // page_size)), 1 << 30, dtype=torch.int32)
    expected, done = [], 0
    for i, n in enumerate(lengths):
        pages = order[done : done + -(-n // page_size)]
        done += len(pages)
        table[rows[i], : len(pages)] = pages
        slots = (pages[:, None] * page_size + torch.arange(page_size)).view(-1)[:n].long()
        keys, values = (pool.cpu()[slots].float().transpose(0, 1)[None] for pool in (k, v))
        query = q[i].cpu().float()[None, :, None]
        expected.append(
            torch.nn.functional.scaled_dot_product_attention(query, keys, values, enable_gqa=True)[0, :, 0]
        )
    lens = torch.tensor(lengths, device=DEVICE)
    out = attend(q, k, v, table.to(DEVICE), rows.to(DEVICE), lens, page_size, splits)
    wanted = torch.stack(expected)
    assert (out.cpu().float() - wanted).norm() / wanted.norm() < 5e-3
    alone = attend(q[5:6], k, v, table.to(DEVICE), rows[5:6].to(DEVICE), lens[5:6], page_size, splits)
    assert torch.equal(alone, out[5:6]), "a row's result depends on the rows beside it"


@pytest.mark.parametrize("num_words", [1, 2, 5, 1024, 1025, 100_003])
def test_a_kernel_fetches_what_the_host_wrote_last(num_words):
    pinned = torch.zeros(num_words * 8, dtype=torch.uint8, pin_memory=True)
    target = torch.zeros(num_words * 8 + 16, dtype=torch.uint8, device=DEVICE)
    for value in (3, 250):
        pinned.fill_(value)
        fetch(target[8:-8], pinned)
        torch.cuda.synchronize()
        assert bool((target[8:-8] == value).all())
        assert not target[:8].any()
        assert not target[-8:].any()


def test_packed_arrays_keep_their_values_while_the_slots_go_round():
    packer = Packer(torch.device(DEVICE), fetch)
    rng = np.random.default_rng(0)
    arrays = [
        [rng.integers(0, 1 << 40, (3, 5)), rng.random(7).astype(np.float32), rng.random(1) < 0.5]
        for _ in range(40)
    ]
    put = [packer.put(some) for some in arrays]
    for some, tensors in zip(arrays, put, strict=True):
        for array, tensor in zip(some, tensors, strict=True):
            assert np.array_equal(tensor.cpu().numpy(), array)
    filled = torch.zeros(5, 3, dtype=torch.int64, device=DEVICE)
    packer.fill(filled, arrays[0][0])
    assert np.array_equal(filled.cpu().numpy().reshape(3, 5), arrays[0][0])
