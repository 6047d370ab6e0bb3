"""Every reason has a status code, in one file."""

from __future__ import annotations

import ast
from pathlib import Path
from urllib.parse import quote

import grpc
import pytest

import rollout_engine.server
from rollout_engine.errors import EngineError
from rollout_engine.errors import Reason as EngineReason
from rollout_engine.messages import ErrorInfo
from rollout_engine.server import status
from rollout_engine.v1 import rollout_pb2
from weight_updater.errors import Reason as UpdateReason
from weight_updater.errors import UpdateRefused, WeightsTorn

SERVER = Path(rollout_engine.server.__file__).parent


def test_every_reason_has_a_code():
    assert set(status.ENGINE_CODES) == set(EngineReason)
    assert set(status.UPDATE_CODES) == set(UpdateReason)


@pytest.mark.parametrize(
    ("error", "code", "kind"),
    [
        (EngineError(EngineReason.EMPTY_PROMPT, "x"), grpc.StatusCode.INVALID_ARGUMENT, "engine"),
        (UpdateRefused(UpdateReason.UPDATE_IN_PROGRESS, "x"), grpc.StatusCode.ABORTED, "refused"),
        (WeightsTorn(UpdateReason.PEER_LOST, "x"), grpc.StatusCode.UNAVAILABLE, "torn"),
    ],
)
def test_code_and_kind_of_an_error(error, code, kind):
    assert status.code_of(error) is code
    assert status.kind_of(error) == kind
    back = status.error_from(ErrorInfo(kind, error.reason.value, "x"))
    assert (type(back), back.reason, back.message) == (type(error), error.reason, "x")


def test_an_items_error_carries_the_number_of_the_code():
    item = status.item_error(EngineError(EngineReason.QUEUE_FULL, "full"))
    assert (item.status, item.reason, item.message) == (8, "QUEUE_FULL", "full")


def test_long_texts_are_cut():
    assert len(status.shorten("x" * 100_000)) == status.MAX_DETAILS
    assert status.shorten("x" * status.MAX_DETAILS) == "x" * status.MAX_DETAILS
    short = "a name: 名, 20%, \N{SNOWMAN}"
    assert status.shorten(short) == short


@pytest.mark.parametrize("character", ["é", "名", "\N{GRINNING FACE}", "%", "\n"])
def test_texts_are_cut_by_what_they_take_on_their_way(character):
    cut = status.shorten(character * 100_000)
    assert cut.endswith("...")
    assert status.MAX_DETAILS_BYTES - 40 < len(quote(cut, safe=" ")) <= status.MAX_DETAILS_BYTES + 9


def test_a_servicer_that_lacks_a_call_is_refused_at_import():
    class Half:
        pass

    with pytest.raises(TypeError, match=r"Half lacks Rollout\.Generate"):
        status.guarded(rollout_pb2.DESCRIPTOR.services_by_name["Rollout"])(Half)


def test_no_other_file_knows_status_codes():
    for path in SERVER.glob("*.py"):
        names = {n.attr for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.Attribute)}
        assert "StatusCode" not in names or path.name == "status.py", path
