"""Fused matrices: each part to its own rows, whatever order, piece or path it comes by."""

from __future__ import annotations

import json
import time

import pytest
import torch

from rollout_engine.errors import EngineError
from rollout_engine.models.config import ModelConfig
from rollout_engine.models.registry import MODELS
from tests.cases.common import DOWN, GATE, LAYER, UP, K, Q, Tensors, V, assert_serves, live, trained
from tests.desk import chunks_of, desk
from tests.tiny import load_reference, make_tiny
from tests.unit.weight_updater.tiny_target import begin, make_updater, manifest_of, push, send
from tests.ways import STAGINGS, WAYS, Ways
from weight_updater.arena import Arena, SlotSpec, StorageSpec, WeightTarget
from weight_updater.errors import Reason, UpdateRefused
from weight_updater.requests import BeginUpdate, Path, Staging

ORDERS = {
    "as stored": list,
    "backwards": lambda names: list(reversed(names)),
    "halves apart": lambda names: sorted(names, key=lambda n: (n in (Q, UP), n in (K, GATE))),
    "by shape": lambda names: sorted(names, key=lambda n: n[::-1]),
}


@pytest.mark.case("B020")
@pytest.mark.parametrize("staging", STAGINGS)
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("way", WAYS)
def test_the_order_of_parts_does_not_matter(way, order, staging, engine, ways, tied_dir, weights):
    new = trained(weights)
    reply = ways.push(way, {name: new[name] for name in ORDERS[order](new)}, staging=staging)
    attention = engine.runner.model.model.layers[0].self_attn
    assert torch.equal(attention.qkv_proj.weight, torch.cat([new[Q], new[K], new[V]]))
    mlp = engine.runner.model.model.layers[0].mlp
    assert torch.equal(mlp.gate_up_proj.weight, torch.cat([new[GATE], new[UP]]))
    assert reply.verified
    assert_serves(engine, tied_dir, new)


@pytest.mark.case("B020")
@pytest.mark.parametrize("pieces", ["one tensor a call", "tiny chunks", "interleaved", "one call"])
@pytest.mark.parametrize("staging", STAGINGS)
def test_the_pieces_of_parts_do_not_matter(staging, pieces, engine, ways, tied_dir, weights):
    new = trained(weights)
    begun = engine.begin(BeginUpdate(Path.TENSOR, manifest=manifest_of(new), staging=staging))
    chunks = list(chunks_of(new, 1 << 20 if pieces in ("one call", "one tensor a call") else 1000 - 1000 % 8))
    if pieces == "interleaved":
        chunks.sort(key=lambda chunk: (chunk[1], -chunk[0]))
    calls = [[chunk] for chunk in chunks] if pieces == "one tensor a call" else [chunks]
    for call in calls:
        engine.stream(begun.update_id, call)
    engine.commit(begun.update_id)
    assert_serves(engine, tied_dir, new)


@pytest.mark.case("B020")
@pytest.mark.parametrize("lost", [Q, K, V, GATE, UP])
@pytest.mark.parametrize("staging", [Staging.DEVICE, Staging.HOST])
def test_a_part_that_never_comes_ends_the_session(staging, lost, engine, weights):
    """Whole but for one part, or but for its last bytes."""
    before, new = live(engine), trained(weights)
    order = list(new)
    for keep in (
        lambda chunk: order[chunk[0]] != lost,
        lambda chunk: order[chunk[0]] != lost or not chunk[1],
    ):
        for skips in (True, False):
            request = BeginUpdate(
                Path.TENSOR, manifest=manifest_of(new), staging=staging, skip_checksums=skips
            )
            begun = engine.begin(request)
            engine.stream(begun.update_id, filter(keep, chunks_of(new, 512)))
            with pytest.raises(
                UpdateRefused, match=f"1 of .* tensors have not arrived whole; the first is {lost}"
            ) as short:
                engine.commit(begun.update_id)
            assert short.value.reason is Reason.INCOMPLETE
            assert engine.abort_update(begun.update_id)
    assert live(engine) == before


@pytest.mark.case("B013")
@pytest.mark.parametrize("way", WAYS)
def test_gate_and_up_do_not_share_a_value(way, engine, ways, weights):
    """Two parts of one shape: a merged adapter of each, told apart by its values."""
    deltas = {GATE: 1.0, UP: 2.0}
    merged = {**weights, **{n: torch.full_like(weights[n], value) for n, value in deltas.items()}}
    sent = {name: tensor.clone() for name, tensor in merged.items()}
    ways.push(way, sent)
    fused = engine.runner.model.model.layers[0].mlp.gate_up_proj.weight
    assert (fused[: len(fused) // 2] == 1.0).all()
    assert (fused[len(fused) // 2 :] == 2.0).all()
    assert all(torch.equal(sent[name], merged[name]) for name in merged), "the sender's tensors are only read"


@pytest.mark.case("B021")
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(8, 2), (4, 4), (4, 1)])
def test_heads_of_q_k_and_v_stay_where_they_belong(num_heads, num_kv_heads, tmp_path):
    """By name they fill their own rows of the fused matrix; a matrix that comes fused has no name here, so it
    is refused before somebody cuts it at the wrong rows.
    """
    shape = {"num_attention_heads": num_heads, "num_key_value_heads": num_kv_heads}
    directory = make_tiny(tmp_path / "m", "llama", **shape)
    other = make_tiny(tmp_path / "n", "llama", seed=9, **shape)
    new = dict(load_reference(other).state_dict())
    with desk(directory) as engine, Ways(engine, tmp_path) as ways:
        before = live(engine)
        fused: Tensors = {n: t for n, t in new.items() if n not in (Q, K, V)}
        fused[f"{LAYER}self_attn.qkv_proj.weight"] = torch.cat([new[Q], new[K], new[V]])
        with pytest.raises(UpdateRefused, match=r"model lacks: .*qkv_proj"):
            ways.push("stream", fused)
        assert live(engine) == before
        ways.push("stream", new)
        assert_serves(engine, other, new)


def shards_of(tensors: Tensors, rank: int) -> Tensors:
    """What a rank of a tensor-parallel trainer of two holds: rows of q, k, v, gate, up and the embedding,
    columns of o and down, and the norms.
    """
    dims = {"q_proj": 0, "k_proj": 0, "v_proj": 0, "gate_proj": 0, "up_proj": 0, "embed_tokens": 0}
    dims |= {"o_proj": 1, "down_proj": 1}
    cut = {name: dims.get(name.split(".")[-2]) for name in tensors}
    return {n: t if cut[n] is None else t.chunk(2, cut[n])[rank].contiguous() for n, t in tensors.items()}


@pytest.mark.case("B001")
@pytest.mark.case("B021")
@pytest.mark.parametrize("staging", STAGINGS)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("rank", [0, 1])
def test_a_ranks_shards_are_refused_before_one_is_taken_for_the_whole(
    rank, way, staging, engine, ways, weights
):
    before, new = live(engine), trained(weights)
    shards = shards_of(new, rank)
    with pytest.raises(UpdateRefused, match="rank's shard, gather the whole tensor") as refused:
        ways.push(way, shards, staging=staging)
    first = next(n for n in new if shards[n].shape != new[n].shape)
    theirs, ours = list(shards[first].shape), list(new[first].shape)
    assert f"{first} has shape {theirs}, the model's {first} has {ours}" in refused.value.message
    assert refused.value.reason is Reason.MANIFEST_MISMATCH
    with pytest.raises(UpdateRefused, match=f"{Q} has shape"):
        ways.push(way, {Q: shards[Q]}, staging=staging, partial=True)
    assert live(engine) == before


def expert(i: int, part: str) -> str:
    return f"{LAYER}mlp.experts.{i}.{part}_proj.weight"


def experts_target(num_experts: int) -> tuple[WeightTarget, dict[str, torch.nn.Parameter]]:
    """Gate and up of all experts in one matrix, down in another, as a layer of experts holds them."""
    w13 = [SlotSpec(expert(i, part), (3, 4)) for i in range(num_experts) for part in ("gate", "up")]
    w2 = [SlotSpec(expert(i, "down"), (4, 3)) for i in range(num_experts)]
    storages = [
        StorageSpec("w13", torch.float32, (6 * num_experts, 4), tuple(w13)),
        StorageSpec("w2", torch.float32, (4 * num_experts, 3), tuple(w2)),
    ]
    parameters = {s.key: torch.nn.Parameter(torch.zeros(s.shape)) for s in storages}
    return WeightTarget(Arena(storages), parameters, torch.device("cpu")), parameters


@pytest.mark.case("B022")
def test_each_expert_fills_its_own_rows_and_another_number_is_refused():
    shapes = {expert(i, part): (3, 4) for i in range(4) for part in ("gate", "up")}
    shapes |= {expert(i, "down"): (4, 3) for i in range(4)}
    new = {name: torch.randn(shape) for name, shape in shapes.items()}
    for order in (sorted(new), sorted(new, reverse=True), sorted(new, key=lambda n: n[::-1])):
        target, parameters = experts_target(4)
        push(make_updater(target), {name: new[name] for name in order})
        for i in range(4):
            rows = parameters["w13"].data.view(4, 2, 3, 4)[i]
            assert torch.equal(rows[0], new[expert(i, "gate")])
            assert torch.equal(rows[1], new[expert(i, "up")])
            assert torch.equal(parameters["w2"].data.view(4, 4, 3)[i], new[expert(i, "down")])
    target, _ = experts_target(4)
    before = target.buffer.clone()
    fewer = {n: t for n, t in new.items() if ".3." not in n}
    more = {**new, expert(4, "gate"): torch.ones(3, 4)}
    stacked = {f"{LAYER}mlp.experts.gate_up_proj{leaf}": torch.ones(4, 6, 4) for leaf in ("", ".weight")}
    for sent, text in ((fewer, "lacks 3 of"), (more, "model lacks"), (stacked, "matches a slot")):
        with pytest.raises(UpdateRefused, match=text):
            push(make_updater(target), sent)
    assert torch.equal(target.buffer, before)


EXPERT_SHAPES = {
    "one by one": {expert(i, part): (96, 64) for i in range(4) for part in ("gate", "up")}
    | {expert(i, "down"): (64, 96) for i in range(4)},
    "stacked": {
        f"{LAYER}mlp.experts.gate_up_proj": (4, 192, 64),
        f"{LAYER}mlp.experts.down_proj": (4, 64, 96),
    },
    "stacked, as .weight": {f"{LAYER}mlp.experts.gate_up_proj.weight": (4, 192, 64)},
}


@pytest.mark.case("B022")
@pytest.mark.parametrize("form", EXPERT_SHAPES)
def test_experts_are_refused_by_name_by_a_model_that_has_none(form, engine, ways, tied_dir, weights):
    before, new = live(engine), trained(weights)
    experts = {name: torch.ones(shape) for name, shape in EXPERT_SHAPES[form].items()}
    dense = {name: tensor for name, tensor in new.items() if name not in (GATE, UP, DOWN)}
    for way in WAYS:
        with pytest.raises(UpdateRefused, match=f"{len(experts)} tensors that the model lacks") as refused:
            ways.push(way, {**dense, **experts})
        assert next(iter(experts)) in refused.value.message
    assert live(engine) == before
    reply = ways.push("stream", {**new, **experts}, partial=True, staging=Staging.HOST)
    assert set(reply.unmatched) == set(experts), "told, and put nowhere"
    assert_serves(engine, tied_dir, new)


@pytest.mark.case("B022")
@pytest.mark.parametrize("architecture", ["Qwen3MoeForCausalLM", "MixtralForCausalLM"])
def test_a_model_with_experts_is_not_taken_for_a_dense_one(architecture, tmp_path):
    directory = make_tiny(tmp_path / "m", "qwen3")
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"architectures": [architecture]}))
    with pytest.raises(EngineError, match=f"its architecture is '{architecture}'"):
        ModelConfig.from_directory(directory, known=tuple(MODELS))


@pytest.mark.case("B023")
@pytest.mark.parametrize("num_chunks", [200, 1150])
def test_many_small_tensors_in_many_chunks_take_time_in_their_number(num_chunks):
    def seconds(count: int) -> float:
        """Of this process, whatever else the machine does."""
        names = [f"{LAYER}mlp.experts.{i}.w.weight" for i in range(count)]
        slots = tuple(SlotSpec(name, (8,)) for name in names)
        arena = Arena([StorageSpec("w", torch.float32, (8 * count,), slots)])
        parameter = torch.nn.Parameter(torch.empty(8 * count))
        updater = make_updater(WeightTarget(arena, {"w": parameter}, torch.device("cpu")))
        new = {f"module.{name}": value for name, value in zip(names, torch.randn(count, 8), strict=True)}
        packed = torch.zeros(count, 64)
        packed[:, :8] = torch.stack(list(new.values()))
        started = time.process_time()
        update_id = begin(updater, new, checksums_came=False)
        for rows in packed.view(num_chunks, -1).view(torch.uint8).unbind():
            send(updater, update_id, iter([(None, seconds_at[0], rows)]))
            seconds_at[0] += rows.numel()
        updater.verify(update_id)
        updater.commit(update_id)
        taken = time.process_time() - started
        assert torch.equal(parameter.data.view(count, 8), packed[:, :8])
        return taken

    seconds_at = [0]
    small = seconds(9200)
    seconds_at = [0]
    large = seconds(18400)
    assert large < 2.0
    assert large < 2.5 * max(small, 0.1)
