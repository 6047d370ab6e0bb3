"""Manifests against slots: what fits, and refusals that name both sides."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
import torch

from tests.unit.weight_updater.tiny_target import (
    EMBED,
    GATE,
    HEAD,
    INV_FREQ,
    NORM,
    UP,
    K,
    Q,
    TinyTarget,
    begin,
    make_updater,
    manifest_of,
    push,
    send,
    weights,
    whole,
)
from weight_updater.arena import Arena, SlotSpec, StorageSpec, WeightTarget
from weight_updater.errors import Reason, UpdateRefused
from weight_updater.plan import Planner, merged_ranges, plan_update
from weight_updater.requests import BeginUpdate, Manifest, Path, Recapture, Staging, TensorSpec

Tensors = dict[str, torch.Tensor]


def with_unknown(tensors: Tensors) -> Tensors:
    return {Q: tensors[Q], **{f"model.layers.{i}.other.weight": torch.ones(2) for i in range(9)}}


def without(name: str) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {key: value for key, value in tensors.items() if key != name}


def with_shape(name: str, *shape: int) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {**tensors, name: torch.ones(shape, dtype=torch.bfloat16)}


REFUSED: dict[str, tuple[Callable[[Tensors], Tensors], str]] = {
    "B018 unknown names are listed": (
        with_unknown,
        r"has 9 tensors that the model lacks: model\.layers\.0\.other.*model\.layers\.8\.other",
    ),
    "B012 nothing matches": (
        lambda tensors: {f"x.{name}": value for name, value in tensors.items()},
        r"none of the manifest's 6 tensors matches a slot: it brings x\.model.*the model has model\.embed",
    ),
    "B020 half of a fused storage": (without(K), rf"lacks 1 of the model's 6 tensors: {K}"),
    "B027 another size": (
        with_shape(EMBED, 10, 9),
        rf"{EMBED} has shape \[10, 9\], the model's {EMBED} has \[10, 6\]$",
    ),
    "B027 would broadcast": (with_shape(UP, 1, 6), r"has shape \[1, 6\], the model's .* has \[5, 6\]"),
    "B027 transposed": (with_shape(K, 6, 2), r"has shape \[6, 2\], the model's .* has \[2, 6\]"),
    "B009 adapters that were not merged": (
        lambda tensors: {**tensors, f"base_model.model.{Q[:-7]}.lora_A.default.weight": torch.ones(2, 6)},
        r"has 1 adapter tensors: .*q_proj\.lora_A\.default\.weight; merge them",
    ),
    "B006 one slot under two names": (
        lambda tensors: {**tensors, f"module.{Q}": tensors[Q]},
        rf"names {Q} twice: as '{Q}' and as 'module\.{Q}'",
    ),
    "B002 tied names that differ": (
        lambda tensors: {**tensors, HEAD: tensors[EMBED] + 1},
        rf"{HEAD} and {EMBED} are tied in this model but bring different values",
    ),
    "empty": (lambda tensors: {}, "the manifest is empty"),
}


@pytest.mark.case("B012")
@pytest.mark.case("B002")
@pytest.mark.case("B009")
@pytest.mark.case("B018")
@pytest.mark.case("B020")
@pytest.mark.case("B027")
@pytest.mark.parametrize(("change", "match"), REFUSED.values(), ids=REFUSED.keys())
def test_refused_at_begin_with_nothing_changed(change: Callable[[Tensors], Tensors], match: str) -> None:
    target = TinyTarget()
    updater = make_updater(target)
    before, addresses = target.buffer.clone(), target.addresses()
    with pytest.raises(UpdateRefused, match=match):
        begin(updater, change(weights(1)))
    assert torch.equal(target.buffer, before)
    assert target.addresses() == addresses
    assert (updater.version, updater.commit_sequence, updater.open, updater.torn_reason) == (4, 0, None, "")
    assert push(updater, weights(1)).version == 5


FIELDS: dict[str, tuple[dict[str, object], Reason, str]] = {
    "engines": ({"num_engines": 0}, Reason.INVALID_UPDATE, "num_engines is 0"),
    "lease": ({"lease_s": -1.0}, Reason.INVALID_UPDATE, "lease_s is -1"),
    "bucket": ({"bucket_bytes": -1}, Reason.INVALID_UPDATE, "bucket_bytes is -1"),
    "version": ({"version": 1 << 64}, Reason.INVALID_UPDATE, "64-bit"),
    "adopt elsewhere": ({"adopt": True}, Reason.INVALID_UPDATE, "only the ipc path can"),
    "adopt partial": (
        {"path": Path.IPC, "adopt": True, "partial": True},
        Reason.INVALID_UPDATE,
        "adopt and partial exclude each other",
    ),
    "adopt kept": (
        {"path": Path.IPC, "adopt": True, "keep_previous": True},
        Reason.INVALID_UPDATE,
        "leave keep_previous out",
    ),
    "adopt staged": (
        {"path": Path.IPC, "adopt": True, "staging": Staging.HOST},
        Reason.INVALID_UPDATE,
        "leave staging out",
    ),
    "adopt never": (
        {"path": Path.IPC, "adopt": True, "recapture": Recapture.NEVER},
        Reason.WOULD_MOVE,
        "adopting an arena moves all 4 weights",
    ),
    "keep nowhere": (
        {"keep_previous": True, "staging": Staging.NONE},
        Reason.INVALID_UPDATE,
        "staging=none has none",
    ),
    "no second arena": ({"staging": Staging.DEVICE}, Reason.NO_STAGING, "no second arena was reserved"),
    "many engines": (
        {"num_engines": 2, "staging": Staging.NONE},
        Reason.NO_STAGING,
        "cannot wait for 2 engines",
    ),
}


@pytest.mark.parametrize(("fields", "reason", "match"), FIELDS.values(), ids=FIELDS.keys())
def test_fields_that_are_refused(fields: dict[str, object], reason: Reason, match: str) -> None:
    updater = make_updater(TinyTarget())
    with pytest.raises(UpdateRefused, match=match) as caught:
        begin(updater, weights(1), **fields)
    assert caught.value.reason is reason
    assert updater.open is None


def test_wait_on_a_paused_engine_is_refused() -> None:
    updater = make_updater(TinyTarget())
    request = BeginUpdate(Path.TENSOR, manifest=manifest_of(weights(1)))
    with pytest.raises(UpdateRefused) as caught:
        updater.begin(request, updater.resolve(request), paused=True)
    assert caught.value.reason is Reason.PAUSED_WAIT


@pytest.mark.parametrize(
    "spec",
    [
        TensorSpec(Q, "int8", (6, 6)),
        TensorSpec(Q, "bfloat16", (-6, 6)),
        TensorSpec("", "bfloat16", (6, 6)),
        TensorSpec(Q, "bfloat16", (1 << 40, 1 << 40)),
        TensorSpec(Q, "bfloat16", (6, 6), checksum=1 << 64),
    ],
)
def test_tensors_that_can_be_right_for_no_model(spec: TensorSpec) -> None:
    with pytest.raises(UpdateRefused) as caught:
        plan_update(TinyTarget(), Manifest((spec,)), partial=True, merged=False)
    assert caught.value.reason is Reason.INVALID_UPDATE


@pytest.mark.case("B006")
@pytest.mark.case("B007")
@pytest.mark.parametrize("prefix", ["module.", "_orig_mod.", "module._orig_mod.", "_fsdp_wrapped_module."])
def test_wrapped_names_reach_the_same_slots(prefix: str) -> None:
    target = TinyTarget()
    reply = push(make_updater(target), {prefix + name: value for name, value in weights(1).items()})
    assert (reply.num_tensors, reply.unmatched) == (6, ())
    assert all(torch.equal(target.slot(name), value) for name, value in weights(1).items())


@pytest.mark.case("B009")
def test_merged_peft_names() -> None:
    target = TinyTarget()
    adapters = [f"base_model.model.{Q[:-7]}.lora_{part}.default.weight" for part in "AB"]
    sent = {"base_model.model." + n.replace("proj.", "proj.base_layer."): v for n, v in weights(1).items()}
    reply = push(make_updater(target), {**sent, **{name: torch.ones(3) for name in adapters}}, merged=True)
    assert reply.unmatched == tuple(adapters)
    assert all(torch.equal(target.slot(name), value) for name, value in weights(1).items())


@pytest.mark.case("B034")
def test_buffers_are_skipped() -> None:
    target = TinyTarget()
    reply = push(make_updater(target), {**weights(1), INV_FREQ: torch.full((4,), float("nan"))})
    assert (reply.num_tensors, reply.unmatched) == (6, (INV_FREQ,))


@pytest.mark.case("B018")
def test_partial_reports_unknown_names() -> None:
    target = TinyTarget()
    reply = push(make_updater(target), with_unknown(weights(1)), partial=True)
    assert (reply.num_tensors, len(reply.unmatched)) == (1, 9)
    assert torch.equal(target.slot(Q), weights(1)[Q])
    assert torch.equal(target.slot(K), weights(0)[K])
    with pytest.raises(UpdateRefused, match="none of the manifest's 1 tensors"):
        begin(make_updater(target), {"nope": torch.ones(1)}, partial=True)


@pytest.mark.case("B002")
@pytest.mark.parametrize("checksums_came", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("head_first", [True, False])
def test_equal_twins_are_written_once(checksums_came: bool, dtype: torch.dtype, head_first: bool) -> None:
    target = TinyTarget()
    new = weights(1)
    head = {HEAD: new[EMBED].to(dtype)}
    reply = push(
        make_updater(target),
        {**head, **new} if head_first else {**new, **head},
        checksums_came=checksums_came,
    )
    assert (reply.num_tensors, reply.unmatched) == (6, ())
    assert torch.equal(target.slot(HEAD), new[EMBED])


@pytest.mark.case("B002")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("skip_checksums", [True, False])
def test_twins_that_differ_are_refused_by_their_bytes(dtype: torch.dtype, skip_checksums: bool) -> None:
    target = TinyTarget()
    updater = make_updater(target)
    before = target.buffer.clone()
    sent = {**weights(1), HEAD: (weights(1)[EMBED] + 1).to(dtype)}
    with pytest.raises(UpdateRefused, match=f"{HEAD} and {EMBED} are tied") as caught:
        push(updater, sent, checksums_came=False, skip_checksums=skip_checksums)
    assert caught.value.reason is Reason.MANIFEST_MISMATCH
    assert torch.equal(target.buffer, before)
    assert updater.version == 4


def test_a_head_alone_fills_the_tied_slot() -> None:
    target = TinyTarget()
    sent = {HEAD if name == EMBED else name: value for name, value in weights(1).items()}
    assert push(make_updater(target), sent).num_tensors == 6
    assert torch.equal(target.slot(EMBED), weights(1)[EMBED])


@pytest.mark.case("B020")
def test_order_and_split_of_fused_slots_do_not_matter() -> None:
    found = []
    for order in ([EMBED, Q, K, GATE, UP, NORM], [NORM, UP, GATE, K, Q, EMBED]):
        target = TinyTarget()
        updater = make_updater(target)
        new = {name: weights(1)[name] for name in order}
        update_id = begin(updater, new)
        for chunk in whole(new):
            send(updater, update_id, iter([chunk]))
        found.append(updater.commit(update_id).live_checksum)
    assert found[0] == found[1]


@pytest.mark.case("B031")
@pytest.mark.case("B106")
def test_views_arrive_with_their_logical_values() -> None:
    target = TinyTarget()
    new = {**weights(1), Q: torch.arange(36.0).view(6, 6).t(), NORM: torch.arange(1e3)[10:17]}
    push(make_updater(target), new)
    assert torch.equal(target.slot(Q).float(), torch.arange(36.0).view(6, 6).t())
    assert torch.equal(target.slot(NORM), torch.arange(10.0, 17.0))


def test_ranges_merge_over_padding_only() -> None:
    target = TinyTarget()
    place = target.arena.placements
    assert plan_update(target, manifest_of(weights(1)), partial=False, merged=False).ranges == (
        (0, target.arena.nbytes),
    )
    ranges = merged_ranges(target, {K, GATE, NORM})
    k_start, gate_end = place[K].offset, place[GATE].offset + 60
    assert ranges == ((k_start, gate_end - k_start), (place[NORM].offset, 28))


@pytest.mark.case("B023")
def test_planning_grows_with_the_number_of_tensors_only() -> None:
    def seconds(count: int) -> float:
        names = [f"model.layers.0.mlp.experts.{i}.w.weight" for i in range(count)]
        slots = [SlotSpec(name, (8,)) for name in names]
        arena = Arena([StorageSpec("w", torch.float32, (8 * count,), tuple(slots))])
        parameter = torch.nn.Parameter(torch.empty(8 * count))
        target = WeightTarget(arena, {"w": parameter}, torch.device("cpu"))
        manifest = Manifest(tuple(TensorSpec(f"module.{name}", "float32", (8,)) for name in names))
        start = time.perf_counter()
        plan = plan_update(target, manifest, partial=False, merged=False)
        assert len(plan.applied) == count
        return time.perf_counter() - start

    assert seconds(18432) < 2.0
    assert seconds(36864) < 4.0


def test_a_manifest_seen_before_is_planned_anew_in_its_checksums_only() -> None:
    target = TinyTarget()
    planner = Planner(target)
    tied = {**weights(1), HEAD: weights(1)[EMBED]}
    first = manifest_of(tied)
    known = planner.plan(first, first.digest(), partial=False, merged=False)
    second = manifest_of({**weights(2), HEAD: weights(2)[EMBED]})
    plan = planner.plan(second, second.digest(), partial=False, merged=False)
    assert plan.slots is known.slots  # nothing was matched again
    assert (plan.manifest, known.manifest) == (second, first)
    differs = manifest_of({**weights(3), HEAD: weights(4)[EMBED]})
    with pytest.raises(UpdateRefused, match=f"{HEAD} and {EMBED} are tied"):
        planner.plan(differs, differs.digest(), partial=False, merged=False)
    wrong = second.with_checksums([1 << 64] * len(second.tensors))
    with pytest.raises(UpdateRefused, match="is not a 64-bit number"):
        planner.plan(wrong, wrong.digest(), partial=False, merged=False)
    part = Manifest(first.tensors[:2])
    with pytest.raises(UpdateRefused, match="lacks 4 of the model's 6 tensors"):
        planner.plan(part, part.digest(), partial=False, merged=False)
    assert not planner.plan(part, part.digest(), partial=True, merged=False).full
    with pytest.raises(UpdateRefused, match="lacks 4"):
        planner.plan(part, part.digest(), partial=False, merged=False)


def test_no_name_makes_a_digest_mean_two_manifests() -> None:
    two = Manifest((TensorSpec("a", "float32", (1,)), TensorSpec("b", "float32", (2,))))
    for end in ("\n", "\0", "\\n"):
        one = Manifest((TensorSpec(f"a\0float32\0(1,){end}b", "float32", (2,)),))
        assert one.digest() != two.digest()
    assert two.digest() == two.with_checksums([1, 2]).digest()
