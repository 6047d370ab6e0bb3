"""The chunks of an update in any order and size to a real engine."""

from __future__ import annotations

import itertools
import os

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.tiny import load_reference
from tests.wire.trainer import Named, checksums_of, snapshot, train
from trainers_adapters import RollsyncError
from weight_updater.requests import BeginUpdate
from weight_updater.requests import Path as Way

EXAMPLES = int(os.environ.get("FUZZ_EXAMPLES", "15"))
TUNED = settings(
    max_examples=EXAMPLES,
    deadline=None,
    suppress_health_check=[
        HealthCheck.too_slow,
        HealthCheck.data_too_large,
        HealthCheck.function_scoped_fixture,
    ],
)


FAULTS = ["", "", "twice", "missing", "beyond"]
"""What is wrong with a stream; nothing, in two of five."""


@pytest.fixture(scope="module")
def weights(model_dir) -> Named:
    model = load_reference(model_dir)
    train(model, 7)
    return snapshot(model)


@st.composite
def cuts(draw: st.DrawFn, sizes: list[int]) -> list[tuple[int, int, int]]:
    """(tensor, first byte, end) that cover every tensor once, in any order; bounds are multiples of 8."""
    found = []
    for tensor, size in enumerate(sizes):
        inner = draw(st.lists(st.integers(0, size // 8), max_size=3))
        bounds = sorted({0, size, *(8 * cut for cut in inner if 8 * cut < size)})
        found += [(tensor, start, end) for start, end in itertools.pairwise(bounds)]
    return draw(st.permutations(found))


@pytest.mark.usefixtures("flat")
@pytest.mark.parametrize("staging", ["none", "host", "device"])
def test_chunks_in_any_order_make_the_same_weights_and_others_are_refused(staging, engine, weights):
    pieces = [tensor.reshape(-1).view(-1).numpy().tobytes() for _, tensor in weights]
    manifest = weights.manifest()

    @TUNED
    @given(cuts([len(piece) for piece in pieces]), st.sampled_from(FAULTS), st.integers(0, 1 << 20))
    def run(order, fault, at):
        at %= len(order)
        tensor, start, end = order[at]
        chunks = [(t, a, pieces[t][a:b]) for t, a, b in order]
        if fault == "twice":
            chunks.insert(at, chunks[at])
        elif fault == "missing":
            del chunks[at]
        elif fault == "beyond":
            chunks[at] = (tensor, start, chunks[at][2] + bytes(len(pieces[tensor]) - end + 8))
        before = engine.weights.checksums().weight_version
        begin = BeginUpdate(path=Way.TENSOR, manifest=manifest, staging=staging)
        if fault:
            with pytest.raises(RollsyncError) as caught:
                engine.weights.update_from_tensor(begin, chunks)
            assert caught.value.reason in ("BAD_CHUNK", "INCOMPLETE")
            assert engine.rollout.info().state.weight_version == before
            return
        assert engine.weights.update_from_tensor(begin, chunks).version == before + 1
        assert engine.weights.checksums().by_name == checksums_of(weights)

    run()
