"""How many bytes the KV pool may take, and what may be said of weights that were there before."""

from __future__ import annotations

from typing import Any

import pytest

from rollout_engine.errors import ConfigError
from rollout_engine.kv.capacity import KvCapacity, max_decode_logits_rows

GB = 10**9


@pytest.mark.parametrize("fraction", [0.05, 0.5, 0.85, 0.999999999])
def test_an_adopted_arena_gives_the_pool_that_loading_the_same_weights_gives(fraction: float) -> None:
    free, weights, reserved = 139 * GB, 16 * GB + 7, 3 * GB
    loaded = KvCapacity(free, fraction, reserved)
    adopted = KvCapacity(free - weights, fraction, reserved)
    uncounted = adopted.kv_bytes(free - weights)
    adopted.account_preloaded_weights(weights, owner="adopted")
    assert adopted.preloaded_weights_bytes == weights
    assert adopted.kv_bytes(free - weights) == loaded.kv_bytes(free - weights)
    kept = 1 - fraction
    assert loaded.kv_bytes(free - weights) == max(0, free - weights - round(free * kept) - reserved)
    if loaded.kv_bytes(free - weights):
        assert uncounted - adopted.kv_bytes(free - weights) == pytest.approx(weights * kept, abs=2)


def test_each_owner_counts_once() -> None:
    capacity = KvCapacity(100, 0.5, 0)
    capacity.account_preloaded_weights(10, owner="adopted")
    capacity.account_preloaded_weights(6, owner="draft")
    with pytest.raises(ValueError, match="'adopted' has already been counted with 10 bytes"):
        capacity.account_preloaded_weights(20, owner="adopted")
    assert capacity.preloaded_weights_bytes == 16
    assert capacity.kv_bytes(80) == 80 - 58


def test_nothing_is_counted_of_nothing() -> None:
    capacity = KvCapacity(100, 0.5, 0)
    capacity.account_preloaded_weights(0, owner="adopted")
    assert capacity.kv_bytes(80) == 30
    capacity.account_preloaded_weights(8, owner="adopted")
    assert capacity.preloaded_weights_bytes == 8


@pytest.mark.parametrize(
    ("wrong", "kind"), [(1.0, "float"), (True, "bool"), ("1", "str"), (None, "NoneType")]
)
def test_sizes_are_whole_numbers(wrong: Any, kind: str) -> None:
    capacity = KvCapacity(100, 0.5, 0)
    with pytest.raises(TypeError, match=f"must be an int, not {kind}"):
        capacity.account_preloaded_weights(wrong, owner="adopted")
    assert capacity.preloaded_weights_bytes == 0


def test_a_negative_size_is_refused() -> None:
    capacity = KvCapacity(100, 0.5, 0)
    with pytest.raises(ValueError, match="must be >= 0, not -1"):
        capacity.account_preloaded_weights(-1, owner="adopted")
    assert capacity.preloaded_weights_bytes == 0


def test_pages_are_whole_and_there_is_at_least_one() -> None:
    capacity = KvCapacity(100, 0.5, 5)
    assert capacity.num_pages(80, 8) == 3
    assert capacity.num_pages(63, 8) == 1
    with pytest.raises(ConfigError, match="62 bytes are available after loading, 5 are reserved"):
        capacity.num_pages(62, 8)
    assert capacity.kv_bytes(10) == 0


@pytest.mark.parametrize(
    ("sizes", "tokens", "rows"), [([1, 2, 256], [1], 256), ([4, 8], [1, 5], 40), ([], [1], 0), ([8], [], 0)]
)
def test_one_logits_buffer_fits_every_captured_pass(sizes: list[int], tokens: list[int], rows: int) -> None:
    assert max_decode_logits_rows(sizes, tokens) == rows
