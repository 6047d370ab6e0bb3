"""top_k and top_p against a sort of the whole vocabulary."""

from __future__ import annotations

import pytest
import torch

from rollout_engine.runner import truncation
from rollout_engine.runner.truncation import NUM_CANDIDATES, truncate

V = 5000
INF = float("inf")


def by_hand(logits: torch.Tensor, top_k: int, top_p: float) -> list[int]:
    """Ids that are kept, token by token in float64; logits: [V]."""
    order = sorted(range(len(logits)), key=lambda i: (-float(logits[i]), i))[:top_k]
    mass = torch.softmax(logits[order].double(), dim=-1).tolist()
    kept, before = [], 0.0
    for i, share in zip(order, mass, strict=True):
        if kept and top_p < 1.0 and before >= top_p:
            break
        kept.append(i)
        before += share
    return sorted(kept)


def distributions() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    normal = torch.randn(V, generator=generator)
    return {
        "peaked": normal * 6,
        "plain": normal * 2,
        "flat": normal * 0.01,
        "ties": (normal * 2).round(),
        "all equal": torch.zeros(V),
        "one alone": torch.full((V,), -INF).index_fill(0, torch.tensor([77]), 3.0),
        "few left": torch.where(torch.arange(V) % 9 == 0, normal * 4, -INF),
        "a tie at the edge": torch.where(torch.arange(V) < 900, 9.0 - torch.arange(V) / 900, 1.0),
    }


SETTINGS = [
    (k, p)
    for k in (1, 2, 50, 1023, 1024, 1025, 3000, V)
    for p in (1e-9, 0.1001, 0.5003, 0.9007, 0.9503, 0.9991, 1.0)
]


@pytest.mark.parametrize("name", distributions())
def test_candidates_give_what_a_whole_sort_gives(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    logits = distributions()[name].expand(len(SETTINGS), V).contiguous()
    top_k = torch.tensor([k for k, _ in SETTINGS])
    top_p = torch.tensor([p for _, p in SETTINGS], dtype=torch.float64)
    before = logits.clone()
    ours = truncate(logits, top_k, top_p)
    assert torch.equal(logits, before)
    monkeypatch.setattr(truncation, "NUM_CANDIDATES", V)
    assert torch.equal(ours, truncate(logits, top_k, top_p))
    for row, (k, p) in enumerate(SETTINGS):
        kept = ours[row].isfinite()
        assert torch.equal(ours[row][kept], logits[row][kept])
        expected = [i for i in by_hand(logits[row], k, p) if logits[row][i] > -INF]
        assert kept.nonzero()[:, 0].tolist() == expected, (k, p)


def test_one_of_the_two_alone() -> None:
    logits = distributions()["plain"].expand(2, V).contiguous()
    k, p = torch.tensor([7, V]), torch.tensor([0.3, 1.0], dtype=torch.float64)
    only_k, only_p = truncate(logits, k, None), truncate(logits, None, p)
    assert only_k.isfinite().sum(dim=-1).tolist() == [7, V]
    assert only_p[0].isfinite().nonzero()[:, 0].tolist() == by_hand(logits[0], V, 0.3)
    assert torch.equal(only_p[1], logits[1])


def test_the_vocabulary_is_sorted_only_for_rows_that_candidates_do_not_decide(monkeypatch) -> None:
    sorted_rows = []
    sort = torch.Tensor.sort
    monkeypatch.setattr(
        torch.Tensor, "sort", lambda t, *a, **k: sorted_rows.append(tuple(t.shape)) or sort(t, *a, **k)
    )
    logits = torch.stack([distributions()[name] for name in ("peaked", "flat", "peaked")])
    truncate(logits, None, torch.full((3,), 0.9, dtype=torch.float64))
    assert sorted(sorted_rows)[-1] == (3, NUM_CANDIDATES)
    assert (1, V) in sorted_rows  # the flat one
    sorted_rows.clear()
    truncate(logits[[0, 2]], torch.tensor([50, 50]), torch.full((2,), 0.9, dtype=torch.float64))
    assert set(sorted_rows) == {(2, NUM_CANDIDATES)}
