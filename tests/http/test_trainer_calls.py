"""Five trainers' calls, in their order, answered as they read the answers; and docs/http.md tells of each."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.http.trainer_calls import ADAPTER, BY_TRAINER, DIRECTORY, ELSEWHERE, SERVED, VERSION
from trainers_adapters import ModuleSource
from trainers_adapters.http_facade.elsewhere import ELSEWHERE as OTHER_WAYS
from weight_updater.safetensors_io import save_weights

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "http.md").read_text()


@pytest.mark.parametrize("trainer", BY_TRAINER)
def test_what_a_trainer_calls_is_answered_as_it_reads_it(trainer, call, engine, root, trained, adapter_dir):
    directory = str(root / trainer)
    save_weights(directory, ModuleSource(trained))
    version = engine.rollout.info().weight_version + 1000  # trainers number by steps of their own
    meant = {DIRECTORY: directory, ADAPTER: str(adapter_dir), VERSION: str(version)}
    for one in BY_TRAINER[trainer]:
        body = one.body
        if isinstance(body, dict):
            body = {
                name: meant.get(value, value) if isinstance(value, str) else value
                for name, value in body.items()
            }
        status, answer = call(one.path, body)
        if one.here == ELSEWHERE:
            assert (status, answer["error"]["type"]) == (501, "NOT_SERVED_HERE"), one
        else:
            assert status == 200, (one, answer)
            one.read(answer)
    state = engine.rollout.info().state
    assert (state.status, state.num_running, state.num_waiting) == ("serving", 0, 0)


def test_the_page_tells_of_every_call_and_of_no_other():
    rows = re.findall(r"^\| ([\w-]+) \| `([^`]+)`( \(\w+\))? \| (yes|other way) \|", PAGE, re.M)
    told = {(trainer, call + suffix): here for trainer, call, suffix, here in rows}
    assert told == {(c.trainer, c.call): c.here for calls in BY_TRAINER.values() for c in calls}
    assert set(told.values()) == {SERVED, ELSEWHERE}


def test_every_path_that_has_another_way_is_one_that_a_trainer_calls_or_vllm_names():
    called = {call.path.split("?")[0] for calls in BY_TRAINER.values() for call in calls}
    others = set(OTHER_WAYS) - called
    assert others == {
        "/areal_update_weights_lora",
        "/detokenize",
        "/finish_weight_update",
        "/get_remote_instance_transfer_engine_info",
        "/start_weight_update",
        "/stop_profile",
        "/tokenize",
        "/v1/chat/completions/render",
    }
