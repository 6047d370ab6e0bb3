"""Runs the kernels between matrix products, and those that draw, in triton's interpreter; see
test_interpreted_kernels.py.
"""

from __future__ import annotations

import math

import torch

from rollout_engine.batch.forward import SamplingInfo
from rollout_engine.batch.packing import Packer
from rollout_engine.batch.schedule import SampleRow
from rollout_engine.models.layers import rotate
from rollout_engine.ops import fused, kernels
from rollout_engine.ops.host_reads import fetch
from rollout_engine.ops.sampling_kernels import BLOCK, draw
from rollout_engine.runner.sampler import NO_TOKEN, sample
from rollout_engine.sampling import SamplingParams

CPU = torch.device("cpu")
KINDS = [
    SamplingParams(temperature=t, logprobs=m) for t in (1.0, 0.0, 0.7, 1.6) for m in ("processed", "raw")
]


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float16, std: float = 1.0) -> torch.Tensor:
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * std).to(dtype)


def close(found: torch.Tensor, expected: torch.Tensor, steps: int = 4) -> bool:
    """Equal but for some steps of the dtype's rounding."""
    step = steps * torch.finfo(expected.dtype).eps
    return torch.allclose(found, expected, rtol=step, atol=step)


def norms() -> None:
    many = kernels.MANY_ROWS + 1
    kinds = (
        (1, 96, torch.float16),
        (5, 64, torch.float32),
        (3, 600, torch.float16),
        (many, 384, torch.float16),
    )
    for rows, size, dtype in kinds:
        x, residual = random(rows, size, dtype=dtype), random(rows, size, seed=1, dtype=dtype)
        weight = random(size, seed=2, dtype=dtype)
        assert close(kernels.rms_norm(x, weight, 1e-6), fused.rms_norm(x, weight, 1e-6))
        heads = random(rows, 2 * size, seed=3, dtype=dtype).view(rows, 2, size)
        strided = heads.transpose(0, 1)
        assert close(kernels.rms_norm(strided, weight, 1e-6), fused.rms_norm(strided, weight, 1e-6))
        expected, total = fused.add_rms_norm(x, residual, weight, 1e-6)
        in_place = residual.clone()
        assert close(kernels.add_rms_norm(x, in_place, weight, 1e-6), expected)
        assert torch.equal(in_place, total)
    assert kernels.rms_norm(random(0, 64), random(64), 1e-6).shape == (0, 64)


def products() -> None:
    for rows, size in ((3, 700), (1, 1025)):
        gate_up = random(rows, 2 * size)
        assert close(kernels.silu_mul(gate_up), fused.silu_mul(gate_up))
    x, weight = random(1, 1100), random(7, 1100, seed=1, std=0.02)
    expected = (x.double() @ weight.double().t()).to(x.dtype)
    out = torch.full_like(expected, torch.nan)
    assert kernels.matvec(x, weight, out) is out
    assert close(out, expected, steps=16)
    assert torch.equal(kernels.matvec(x, weight), out)


def heads() -> None:
    few, many = torch.tensor([9, 0, 4]), torch.randperm(300, generator=torch.Generator().manual_seed(4))
    for N, K, H, norm, slots in (
        (8, 2, 64, True, few),
        (3, 3, 64, False, few),
        (12, 1, 128, True, few),
        *((2, 1, size, True, many[: kernels.MANY_ROWS + 1]) for size in (64, 128, 256)),
    ):
        T, eps = len(slots), 1e-6
        qkv = random(T, (N + 2 * K) * H)
        weights = random(H, seed=1), random(H, seed=2)
        angles = random(T, 1, H // 2, seed=3, dtype=torch.float32)
        cos, sin = (
            torch.cat([angles.cos()] * 2, -1).half(),
            torch.cat((-angles.sin(), angles.sin()), -1).half(),
        )
        pools = [torch.full((300, K, H), 7.0).half() for _ in range(2)]
        into = torch.full((T, N, H), torch.nan).half()
        q = kernels.norm_rope_write(
            qkv, (*weights, eps) if norm else None, (cos, sin), slots, *pools, into if norm else None
        )
        assert not norm or q is into
        wanted_q, wanted_k, wanted_v = qkv.view(T, -1, H).split((N, K, K), dim=1)
        if norm:
            wanted_q = fused.rms_norm(wanted_q, weights[0], eps)
            wanted_k = fused.rms_norm(wanted_k, weights[1], eps)
        assert close(q, rotate(wanted_q, (cos, sin)), steps=16)
        assert close(pools[0][slots], rotate(wanted_k, (cos, sin)), steps=16)
        assert torch.equal(pools[1][slots], wanted_v)
        others = torch.ones(300, dtype=torch.bool)
        others[slots] = False
        assert all(bool((pool[others] == 7.0).all()) for pool in pools)


def unknown_tokens() -> None:
    ids, pools, last = torch.tensor([5, -1, 0, -1]), torch.tensor([0, 3, 1, 2]), torch.tensor([9, 8, 7, 6])
    assert kernels.resolve_tokens(ids, pools, last).tolist() == [5, 6, 0, 7]


def host_words() -> None:
    for num_words in (1, 5, 1025):
        memory = torch.arange(num_words * 8).to(torch.uint8)
        target = torch.full((num_words * 8 + 16,), 255, dtype=torch.uint8)
        fetch(target[8:-8], memory)
        assert torch.equal(target[8:-8], memory)
        assert bool((target[:8] == 255).all() & (target[-8:] == 255).all())


def info_of(params: list[SamplingParams]) -> SamplingInfo:
    rows = [SampleRow(i, p, 11 * i + 1, 0, 5 + i, [], []) for i, p in enumerate(params)]
    info = SamplingInfo.from_rows(rows, Packer(CPU))
    assert info.untouched
    return info


def drawn(logits: torch.Tensor, info: SamplingInfo) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids and log-probabilities of the kernels, which must have noted what they drew."""
    S = len(logits)
    pools, last = torch.arange(S).flip(0), torch.full((S + 1,), -7)
    any_raw = info.any_raw and not info.plain
    packed = draw(logits, info.temperatures, info.draws, info.greedy, info.raw, pools, last, any_raw)
    ids, logprobs = packed[: 8 * S].view(torch.int64), packed[8 * S :].view(torch.float32)
    assert torch.equal(last[:S].flip(0), ids.clamp_min(0))
    assert last[S] == -7
    return ids, logprobs


def draws() -> None:
    for vocab in (5, BLOCK, BLOCK + 1, 3 * BLOCK - 7):
        for dtype in (torch.float16, torch.float32):
            params = KINDS * 2
            wide = random(len(params), vocab + 9, std=3.0, seed=vocab, dtype=dtype)
            logits = wide[:, :vocab]  # rows that do not follow each other
            info = info_of(params)
            ids, logprobs = drawn(logits, info)
            general = sample(logits, info)
            assert torch.equal(ids, general.token_ids)
            assert (logprobs - general.logprobs).abs().max() < 2e-5
    plain = info_of([SamplingParams(logprobs="raw")] * 2)
    logits = random(2, 50, seed=8)
    assert (drawn(logits, plain)[1] - sample(logits, plain).logprobs).abs().max() < 2e-5


def ties_and_edges() -> None:
    """The first of equal logits, in whichever block; never a token without mass, whatever the draw."""
    greedy = info_of([SamplingParams(temperature=0.0)] * 3)
    logits = torch.zeros(3, 2 * BLOCK + 5)
    logits[0, [BLOCK + 3, BLOCK + 9, 2 * BLOCK]] = 4.0
    logits[1, -1] = 1.0
    assert drawn(logits, greedy)[0].tolist() == [BLOCK + 3, 2 * BLOCK + 4, 0]
    masked = torch.full((4, 2 * BLOCK + 5), -1e30)
    masked[:, [7, BLOCK + 1]] = 0.0
    info = info_of([SamplingParams()] * 4)
    info.draws.copy_(torch.tensor([0.0, 0.4999, 0.5001, math.nextafter(1.0, 0.0)]))
    ids, logprobs = drawn(masked, info)
    assert ids.tolist() == [7, 7, BLOCK + 1, BLOCK + 1]
    assert torch.allclose(logprobs, torch.full((4,), math.log(0.5)))
    masked[:, 7] = -1e30  # no mass in the first block, nor at the start of the second
    assert drawn(masked, info)[0].tolist() == [BLOCK + 1] * 4


def not_finite() -> None:
    logits = random(4, BLOCK + 50, dtype=torch.float32)
    logits[1, BLOCK + 40], logits[2, 3], logits[3, 0] = math.nan, math.inf, -math.inf
    ids, logprobs = drawn(logits, info_of(KINDS[:4]))
    assert (ids == NO_TOKEN).tolist() == logprobs.isnan().tolist() == [False, True, True, True]


def main() -> None:
    for check in (norms, products, heads, unknown_tokens, host_words, draws, ties_and_edges, not_finite):
        check()


if __name__ == "__main__":
    main()
