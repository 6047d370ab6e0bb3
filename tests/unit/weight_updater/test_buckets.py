import pytest
from hypothesis import given
from hypothesis import strategies as st

from weight_updater.buckets import plan_buckets
from weight_updater.errors import Reason, UpdateRefused
from weight_updater.requests import Manifest, TensorSpec


def manifest(*sizes: int, dtype: str = "bfloat16") -> Manifest:
    return Manifest(tuple(TensorSpec(f"t{i}", dtype, (size,)) for i, size in enumerate(sizes)))


@given(st.lists(st.integers(0, 2000), min_size=1, max_size=20), st.integers(1, 5000))
def test_every_byte_travels_once_and_in_order(sizes: list[int], bucket_bytes: int) -> None:
    given_manifest = manifest(*sizes)
    plan = plan_buckets(given_manifest, bucket_bytes)
    arrived = [0] * len(sizes)
    for bucket in range(len(plan)):
        assert 0 < plan.size(bucket) <= plan.bucket_bytes
        end = 0
        for piece in plan.pieces(bucket):
            assert piece.start == arrived[piece.tensor]
            assert piece.start % 256 == piece.position % 256 == 0
            assert piece.position >= end
            end = piece.position + piece.size
            arrived[piece.tensor] += piece.size
        assert end <= plan.size(bucket)
    assert arrived == [tensor.nbytes for tensor in given_manifest.tensors]
    assert sum(plan.size(bucket) for bucket in range(len(plan))) == plan.total_bytes


@pytest.mark.case("B094")
def test_a_tensor_larger_than_a_bucket_is_cut() -> None:
    plan = plan_buckets(manifest(1000, dtype="float32"), 1024)
    assert len(plan) == 4
    assert [plan.size(k) for k in range(4)] == [1024, 1024, 1024, 1024]
    assert [piece.size for k in range(4) for piece in plan.pieces(k)] == [1024, 1024, 1024, 928]


def test_nothing_needs_no_bucket() -> None:
    assert len(plan_buckets(manifest(0, 0))) == 0
    assert len(plan_buckets(Manifest(()))) == 0


def test_sizes_are_rounded_up_and_checked() -> None:
    assert plan_buckets(manifest(1)).bucket_bytes == 64 << 20
    assert plan_buckets(manifest(1), 257).bucket_bytes == 512
    for wrong in (-1, 1 << 40):
        with pytest.raises(UpdateRefused) as caught:
            plan_buckets(manifest(1), wrong)
        assert caught.value.reason is Reason.INVALID_UPDATE


@pytest.mark.case("B093")
def test_the_digest_tells_order_shapes_dtypes_and_buckets_apart() -> None:
    a, b = TensorSpec("a", "float32", (2, 3)), TensorSpec("b", "float32", (2, 3))
    plans = [
        plan_buckets(Manifest((a, b))),
        plan_buckets(Manifest((b, a))),
        plan_buckets(Manifest((a,))),
        plan_buckets(Manifest((a, b)), 1 << 20),
        plan_buckets(Manifest((TensorSpec("a", "float32", (3, 2)), b))),
        plan_buckets(Manifest((TensorSpec("a", "bfloat16", (2, 3)), b))),
    ]
    assert len({plan.digest() for plan in plans}) == len(plans)
    with_checksum = Manifest((TensorSpec("a", "float32", (2, 3), checksum=5), b))
    assert plan_buckets(with_checksum).digest() == plans[0].digest()
