"""adapter_config.json of PEFT: what is read from it, and that whatever stands there ends in a typed error."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from weight_updater.adapter_config import FILE, read_spec
from weight_updater.errors import Reason, UpdateRefused
from weight_updater.requests import AdapterSpec

PLAIN = {"peft_type": "LORA", "r": 8, "lora_alpha": 16, "bias": "none"}


def written(directory: Path, config: dict[str, object]) -> str:
    (directory / FILE).write_text(json.dumps(config))
    return str(directory.resolve())


@pytest.mark.parametrize(
    ("more", "scaling"), [({}, 2.0), ({"use_rslora": True}, 16 / 8**0.5), ({"lora_alpha": 4.0}, 0.5)]
)
def test_rank_and_scaling_come_from_the_file(tmp_path, more, scaling):
    found = read_spec(written(tmp_path, PLAIN | more), AdapterSpec("math", base_checksum=7))
    assert found == AdapterSpec("math", 8, scaling, (), 7)


@pytest.mark.parametrize(
    "numbers",
    [
        {"r": True},
        {"r": 0},
        {"r": "8"},
        {"r": 10**400},
        {"lora_alpha": None},
        {"lora_alpha": True},
        {"lora_alpha": 10**400},
        {"lora_alpha": 10**400, "use_rslora": True},
    ],
    ids=lambda numbers: " ".join(f"{key}={value!r}"[:20] for key, value in numbers.items()),
)
def test_numbers_that_cannot_be_right_are_refused_and_shown_in_short(tmp_path, numbers):
    directory = written(tmp_path, PLAIN | numbers)
    with pytest.raises(UpdateRefused, match="lora_alpha") as refused:
        read_spec(directory, AdapterSpec("math"))
    assert refused.value.reason is Reason.FILE_CORRUPT
    assert len(refused.value.message) < len(directory) + 200


@pytest.mark.parametrize(
    "text", ["", "[]", "{", "[" * 100_000, '{"r": 1, "r": 2}', "\xff"], ids=lambda t: t[:9]
)
def test_a_file_that_is_no_json_object_is_refused(tmp_path, text):
    (tmp_path / FILE).write_bytes(text.encode("latin-1"))
    with pytest.raises(UpdateRefused, match="invalid JSON") as refused:
        read_spec(str(tmp_path.resolve()), AdapterSpec("math"))
    assert refused.value.reason is Reason.FILE_CORRUPT


@pytest.mark.parametrize("setting", [{"use_dora": True}, {"bias": "all"}, {"peft_type": "IA3"}])
def test_other_kinds_of_adapters_are_refused_by_their_setting(tmp_path, setting):
    (name,) = setting
    with pytest.raises(UpdateRefused, match=name) as refused:
        read_spec(written(tmp_path, PLAIN | setting), AdapterSpec("math"))
    assert refused.value.reason is Reason.INVALID_UPDATE


def test_an_adapter_over_base_weights_that_peft_changed_at_its_start_is_refused(tmp_path):
    """PiSSA and others subtract the first B @ A from the base layers, which no file of the adapter tells."""
    for init in ("pissa", "pissa_niter_16", "corda", "OLoRA", "loftq", "lora_ga", "what comes", {}, 1):
        with pytest.raises(UpdateRefused, match="init_lora_weights=") as refused:
            read_spec(written(tmp_path, PLAIN | {"init_lora_weights": init}), AdapterSpec("math"))
        assert refused.value.reason is Reason.INVALID_UPDATE
    for init in (True, False, None, "gaussian", "eva", "mica", "orthogonal"):
        found = read_spec(written(tmp_path, PLAIN | {"init_lora_weights": init}), AdapterSpec("math"))
        assert found.rank == 8


def test_a_link_inside_of_the_directory_is_followed_and_one_that_leaves_it_is_not(tmp_path):
    inside, outside = tmp_path / "adapter", tmp_path / "secret.json"
    (inside / "blobs").mkdir(parents=True)
    for target in (inside / "blobs" / "0", outside):
        target.write_text(json.dumps(PLAIN))
    (inside / FILE).symlink_to("blobs/0")
    assert read_spec(str(inside.resolve()), AdapterSpec("math")).rank == 8
    (inside / FILE).unlink()
    (inside / FILE).symlink_to(outside)
    with pytest.raises(UpdateRefused, match="link that leaves") as refused:
        read_spec(str(inside.resolve()), AdapterSpec("math"))
    assert refused.value.reason is Reason.PATH_FORBIDDEN
    (inside / FILE).unlink()
    with pytest.raises(UpdateRefused, match=f"has no {FILE}"):
        read_spec(str(inside.resolve()), AdapterSpec("math"))
