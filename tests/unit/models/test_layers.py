"""Products of float32 matrices on the CPU: which operation takes them, and what it is compared with."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from rollout_engine.models import products
from rollout_engine.models.layers import Head, RMSNorm, rotate
from rollout_engine.models.products import MAX_FEW_ROWS, find_onednn, linear


def operations(product) -> SimpleNamespace:
    """What stands in for torch.ops.mkldnn."""
    return SimpleNamespace(_linear_pointwise=SimpleNamespace(default=product))


def raises(error: Exception):
    def product(*arguments):
        raise error

    return product


def other_arguments(x, weight, bias):
    return F.linear(x, weight, bias)


def as_in_torch(x, weight, bias, attribute, scalars, algorithm):
    assert (attribute, scalars, algorithm) == ("none", [], "")
    return F.linear(x, weight, bias)


def test_an_operation_that_works_is_used() -> None:
    product = find_onednn(operations(as_in_torch))
    assert product is not None
    x, weight = torch.randn(3, 8), torch.randn(5, 8)
    assert torch.equal(product(x, weight, None), F.linear(x, weight))


@pytest.mark.parametrize(
    "found",
    [
        SimpleNamespace(),
        SimpleNamespace(_linear_pointwise=SimpleNamespace()),
        operations(other_arguments),
        operations(raises(RuntimeError("built without oneDNN"))),
        operations(lambda x, weight, bias, *rest: F.linear(x, weight)),
        operations(lambda x, weight, bias, *rest: F.linear(x, weight, bias).relu() - 1),
        operations(lambda x, weight, bias, *rest: None),
    ],
    ids=["none", "no overload", "other arguments", "no oneDNN", "no bias", "other result", "no result"],
)
def test_an_operation_that_is_missing_or_does_something_else_is_not(found) -> None:
    assert find_onednn(found) is None


@pytest.mark.parametrize("bias", [False, True])
def test_without_onednn_the_blas_takes_over(bias: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "ONEDNN", None)
    head = Head(24, 40, bias=bias)
    head.weight.data.normal_()
    if head.bias is not None:
        head.bias.data.normal_()
    for rows in (1, MAX_FEW_ROWS, MAX_FEW_ROWS + 1, 33):
        x = torch.randn(rows, 24)
        torch.testing.assert_close(head(x), F.linear(x, head.weight, head.bias), atol=1e-5, rtol=0)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("decode", [False, True])
@pytest.mark.parametrize("rows", [1, 2, MAX_FEW_ROWS, MAX_FEW_ROWS + 1, 16, 70])
def test_products_of_any_height(rows: int, decode: bool, bias: bool) -> None:
    x, weight = torch.randn(rows, 576), torch.randn(96, 576)
    b = torch.randn(96) if bias else None
    exact = F.linear(x.double(), weight.double(), None if b is None else b.double())
    out = linear(x, weight, b, decode=decode)
    assert out.shape == (rows, 96)
    assert (out - exact).abs().max() < 2e-4
    if not decode:
        assert torch.equal(out, F.linear(x, weight, b)), "a prompt's sums are those of transformers"
    head = Head(576, 96, bias=bias)
    head.weight.data.copy_(weight)
    if head.bias is not None:
        head.bias.data.copy_(b)
    assert (head(x) - exact).abs().max() < 2e-4
    assert head(x).is_contiguous()


@pytest.mark.skipif(products.ONEDNN is None, reason="this torch has no oneDNN")
def test_a_row_of_a_decode_step_does_not_depend_on_how_many_there_are() -> None:
    x, weight, second = torch.randn(40, 576), torch.randn(96, 576), torch.randn(64, 96)

    def both(rows: int) -> torch.Tensor:
        """One product over what another left: it comes transposed."""
        return linear(linear(x[:rows], weight, None, decode=True), second, None, decode=True)

    assert products.ONEDNN is not None
    whole, by_onednn = both(40), products.ONEDNN(x, weight, None)
    for rows in (MAX_FEW_ROWS + 1, 15, 16, 17, 33):
        assert torch.equal(both(rows), whole[:rows])
        assert torch.equal(linear(x[:rows], weight, None, decode=True), by_onednn[:rows])


def test_onednn_compiles_products_for_few_numbers_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    heights = set()

    def product(weight: torch.Tensor, x: torch.Tensor, bias: None) -> torch.Tensor:
        heights.add(x.shape[0])
        return F.linear(weight, x, bias)

    monkeypatch.setattr(products, "ONEDNN", product)
    weight, b = torch.randn(24, 8), torch.randn(24)
    for rows in range(1, 81):
        x = torch.randn(rows, 8)
        torch.testing.assert_close(linear(x, weight, b, decode=True), F.linear(x, weight, b))
    assert heights == {16, 24, 32, 48, 64, 80}


def test_norm_and_rotation_round_as_in_transformers() -> None:
    from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb

    x, angles = torch.randn(50, 3, 16), torch.randn(50, 8) * 40
    theirs, ours = LlamaRMSNorm(16, 1e-5), RMSNorm(16, 1e-5)
    weight = torch.randn(16)
    theirs.weight.data.copy_(weight)
    ours.weight.data.copy_(weight)
    assert torch.equal(ours(x), theirs(x))
    cos, sin = angles.cos().repeat(1, 2), angles.sin().repeat(1, 2)
    expected, _ = apply_rotary_pos_emb(x.transpose(0, 1)[None], x.transpose(0, 1)[None], cos[None], sin[None])
    signed = torch.cat((-sin[:, :8], sin[:, 8:]), dim=-1)
    assert torch.equal(rotate(x, (cos[:, None], signed[:, None])), expected[0].transpose(0, 1))
