"""Whether bytes are the same, wherever they differ."""

import numpy as np
import pytest
import torch

from weight_updater import cast
from weight_updater.cast import same_bytes


@pytest.mark.parametrize("nbytes", [0, 1, 8, 13, 40, 64, 100])
def test_a_byte_that_differs_is_seen_wherever_it_is(nbytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cast, "_COMPARED_BYTES", 16)  # pieces of two words
    data = torch.from_numpy(np.random.default_rng(0).integers(0, 256, nbytes, dtype=np.uint8))
    assert same_bytes(data, data.clone())
    for at in range(nbytes):
        other = data.clone()
        other[at] ^= 0x80
        assert not same_bytes(data, other)


def test_nan_equals_itself_and_zero_not_minus_zero() -> None:
    values = torch.tensor([float("nan"), 0.0, 1.0])
    assert same_bytes(values, values.clone())
    assert not same_bytes(values, torch.tensor([float("nan"), -0.0, 1.0]))


def test_it_stops_at_the_first_piece_that_differs(monkeypatch: pytest.MonkeyPatch) -> None:
    read = []
    equal = np.array_equal
    monkeypatch.setattr(np, "array_equal", lambda x, y: read.append(x.nbytes) or equal(x, y))
    data = torch.zeros(4 * cast._COMPARED_BYTES, dtype=torch.uint8)
    other = data.clone()
    other[cast._COMPARED_BYTES] = 1
    assert not same_bytes(data, other)
    assert read == [cast._COMPARED_BYTES] * 2
