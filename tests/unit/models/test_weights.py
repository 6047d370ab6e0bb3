"""Slots: fused storage, ties, addresses, buffers."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file

from rollout_engine.models.weights import is_buffer
from tests.hand_scheduler import HandScheduler, make_runner
from tests.tiny import ARCHITECTURES, load_reference, make_tiny


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_every_hugging_face_name_is_a_slot_with_its_bytes(name, tied, tmp_path):
    target = make_runner(make_tiny(tmp_path, name, tied=tied)).target
    stored = load_file(tmp_path / "model.safetensors")
    assert set(stored) == set(target.arena.slot_names)
    for key, tensor in stored.items():
        assert torch.equal(target.slot(key), tensor)
        assert target.slot(key).data_ptr() % 4 == 0


@pytest.mark.parametrize("name", ["llama", "mistral", "qwen3"])
def test_slots_lie_in_the_order_in_which_trainers_send(name, tmp_path):
    directory = make_tiny(tmp_path, name)
    names = [key for key, _ in load_reference(directory).named_parameters()]
    assert make_runner(directory).target.arena.slot_names == names


def test_q_k_v_and_gate_up_are_views_of_one_matrix_each(tiny_tied_dir):
    runner = make_runner(tiny_tied_dir)
    layer, target = runner.model.model.layers[1], runner.target
    attention = "model.layers.1.self_attn."
    for leaf in ("weight", "bias"):
        parts = [target.slot(f"{attention}{part}_proj.{leaf}") for part in "qkv"]
        assert torch.equal(torch.cat(parts), getattr(layer.self_attn.qkv_proj, leaf))
        assert parts[0].data_ptr() == getattr(layer.self_attn.qkv_proj, leaf).data_ptr()
    up = target.slot("model.layers.1.mlp.up_proj.weight")
    up.fill_(3.0)
    assert (layer.mlp.gate_up_proj.weight[layer.mlp.size :] == 3.0).all()
    assert not (layer.mlp.gate_up_proj.weight[: layer.mlp.size] == 3.0).any()


@pytest.mark.case("B001")
def test_a_tied_head_is_one_parameter_and_an_alias(tiny_tied_dir):
    runner = make_runner(tiny_tied_dir)
    assert runner.model.lm_head.weight is runner.model.model.embed_tokens.weight
    assert runner.target.arena.aliases == {"lm_head.weight": "model.embed_tokens.weight"}
    assert runner.target.slot("lm_head.weight").data_ptr() == runner.model.lm_head.weight.data_ptr()


def test_an_untied_head_has_bytes_of_its_own(tiny_llama_dir):
    target = make_runner(tiny_llama_dir).target
    assert target.arena.aliases == {}
    assert target.slot("lm_head.weight").data_ptr() != target.slot("model.embed_tokens.weight").data_ptr()


def test_writing_a_slot_changes_the_next_token_and_no_address(tmp_path, tiny_llama_dir):
    other = load_file(make_tiny(tmp_path, "llama", seed=1) / "model.safetensors")
    runner, expected = make_runner(tiny_llama_dir), make_runner(tmp_path)
    addresses = runner.target.addresses()
    outputs = []
    for r in (runner, expected):
        scheduler = HandScheduler(r)
        row = scheduler.row([4, 5, 6])
        scheduler.run([row], 8)
        outputs.append(row.output)
    assert outputs[0] != outputs[1]
    for key, tensor in other.items():
        runner.target.slot(key).copy_(tensor)
    runner.target.finalise()
    assert runner.target.addresses() == addresses
    row = HandScheduler(runner).row([4, 5, 6])
    HandScheduler(runner).run([row], 8)
    assert row.output == outputs[1]


def test_finalise_recomputes_rotary_tables_in_place(tiny_llama_dir):
    runner = make_runner(tiny_llama_dir)
    rotary = runner.model.model.rotary_emb
    address, kept = rotary.cos.data_ptr(), rotary.cos.clone()
    rotary.cos.fill_(float("nan"))
    runner.target.finalise()
    assert torch.equal(rotary.cos, kept)
    assert rotary.cos.data_ptr() == address


@pytest.mark.case("B034")
def test_inverse_frequencies_are_buffers_by_whole_segments():
    assert is_buffer("model.layers.0.self_attn.rotary_emb.inv_freq")
    assert is_buffer("model.rotary_emb.inv_freq")
    assert not is_buffer("model.my_rotary_emb.inv_freq")
    assert not is_buffer("model.rotary_emb.inv_freq.weight")


def test_parameters_can_be_updated_outside_inference_mode(tiny_llama_dir):
    runner = make_runner(tiny_llama_dir)
    HandScheduler(runner).run([HandScheduler(runner).row([3, 4])], 2)
    assert not any(parameter.is_inference() for parameter in runner.model.parameters())
    runner.target.slot("model.norm.weight").add_(1.0)
