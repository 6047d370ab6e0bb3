"""Wire and dataclasses carry the same fields; what has no meaning is refused by name."""

from __future__ import annotations

import dataclasses

import pytest

from rollout_engine import messages as m
from rollout_engine.errors import EngineError
from rollout_engine.server import convert, convert_rollout
from rollout_engine.v1 import rollout_pb2, weights_pb2
from tests.wire.fake_replies import begin_reply, update_reply
from weight_updater import requests as r
from weight_updater.errors import Reason, UpdateRefused

SPEC = weights_pb2.TensorSpec(name="a.weight", dtype=weights_pb2.DTYPE_BFLOAT16, shape=[2, 3], checksum=9)


def unset_fields(message) -> set[str]:
    """Fields of a message that are absent or at their default."""
    return {f.name for f in message.DESCRIPTOR.fields} - {f.name for f, _ in message.ListFields()}


def full_begin(**changes) -> weights_pb2.BeginUpdateRequest:
    fields = {
        "update_id": "u1",
        "path": weights_pb2.WEIGHTS_PATH_IPC,
        "weight_version": 7,
        "manifest": weights_pb2.Manifest(tensors=[SPEC]),
        "staging": weights_pb2.STAGING_NONE,
        "inflight": weights_pb2.INFLIGHT_RECOMPUTE,
        "partial": True,
        "keep_previous": True,
        "adopt": True,
        "recapture": weights_pb2.RECAPTURE_NEVER,
        "allow_nonfinite": True,
        "skip_checksums": True,
        "lease_ms": 1500,
        "bucket_bytes": 4096,
        "merged": True,
        "num_engines": 2,
        "directory": "/w",
        "checksums": [2**64 - 1],
        "num_streams": 3,
        "adapter": weights_pb2.AdapterSpec(
            name="math",
            rank=8,
            scaling=0.5,
            modules=[weights_pb2.AdapterModule(name="q_proj", rank=4, scaling=2.5)],
            base_checksum=2**64 - 1,
        ),
    }
    return weights_pb2.BeginUpdateRequest(**{**fields, **changes})


def test_begin_update_carries_every_field():
    assert unset_fields(full_begin()) == {"manifest_digest"}
    assert unset_fields(full_begin().adapter) == unset_fields(full_begin().adapter.modules[0]) == set()
    assert convert.begin_update(full_begin()) == r.BeginUpdate(
        path=r.Path.IPC,
        update_id="u1",
        version=7,
        manifest=r.Manifest((r.TensorSpec("a.weight", "bfloat16", (2, 3), 9),)),
        checksums=(2**64 - 1,),
        staging=r.Staging.NONE,
        inflight=r.Inflight.RECOMPUTE,
        partial=True,
        keep_previous=True,
        adopt=True,
        recapture=r.Recapture.NEVER,
        allow_nonfinite=True,
        skip_checksums=True,
        lease_s=1.5,
        bucket_bytes=4096,
        merged=True,
        num_engines=2,
        directory="/w",
        num_streams=3,
        adapter=r.AdapterSpec("math", 8, 0.5, (r.AdapterModule("q_proj", 4, 2.5),), 2**64 - 1),
    )


def test_an_adapter_needs_a_name_and_may_come_without_a_checksum():
    spec = weights_pb2.AdapterSpec(name="math", rank=8, scaling=0.5)
    assert convert.adapter_spec(spec) == r.AdapterSpec("math", 8, 0.5)
    with pytest.raises(UpdateRefused, match=r"adapter\.name"):
        convert.begin_update(full_begin(adapter=weights_pb2.AdapterSpec(rank=8)))


def test_begin_update_has_the_defaults_of_the_dataclass():
    wire = weights_pb2.BeginUpdateRequest(path=weights_pb2.WEIGHTS_PATH_DISK)
    assert convert.begin_update(wire) == r.BeginUpdate(r.Path.DISK)
    digest = weights_pb2.BeginUpdateRequest(path=weights_pb2.WEIGHTS_PATH_TENSOR, manifest_digest="d")
    assert convert.begin_update(digest) == r.BeginUpdate(r.Path.TENSOR, manifest_digest="d")


def test_a_checksum_of_zero_is_not_a_missing_one():
    specs = [weights_pb2.TensorSpec(name="a", dtype=1), weights_pb2.TensorSpec(name="b", dtype=1, checksum=0)]
    tensors = convert.manifest(weights_pb2.Manifest(tensors=specs)).tensors
    assert [tensor.checksum for tensor in tensors] == [None, 0]


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"path": 0}, "path is unspecified"),
        ({"path": 9}, "path is 9"),
        ({"staging": 9}, "staging is 9"),
        ({"inflight": 9}, "inflight is 9"),
        ({"recapture": 9}, "recapture is 9"),
        ({"path": weights_pb2.WEIGHTS_PATH_TENSOR}, "adopt goes with the ipc path only"),
        ({"manifest": None}, "manifest is missing"),
        ({"update_id": "x" * 257}, "update_id has 257 characters"),
        ({"adapter": weights_pb2.AdapterSpec(name="x" * 257)}, "adapter.name has 257 characters"),
        ({"manifest": weights_pb2.Manifest()}, "manifest has no tensors"),
        (
            {"manifest": weights_pb2.Manifest(tensors=[weights_pb2.TensorSpec(name="x")])},
            r"dtype of manifest\.tensors\[0\] \(x\)",
        ),
        ({"manifest": {"tensors": [SPEC, {"dtype": 1}]}}, r"tensors\[1\]"),
    ],
)
def test_updates_that_can_never_be_right_name_the_field(changes, field):
    with pytest.raises(UpdateRefused, match=field) as caught:
        convert.begin_update(full_begin(**changes))
    assert caught.value.reason is Reason.INVALID_UPDATE


@pytest.mark.parametrize("table", ["PATHS", "STAGINGS", "INFLIGHTS", "RECAPTURES", "DTYPES"])
def test_every_number_of_an_enum_is_known_but_a_meaningless_zero(table):
    enum = {
        "PATHS": weights_pb2.WeightsPath,
        "STAGINGS": weights_pb2.Staging,
        "INFLIGHTS": weights_pb2.Inflight,
        "RECAPTURES": weights_pb2.Recapture,
        "DTYPES": weights_pb2.DType,
    }[table]
    refused = {0} if table in ("PATHS", "DTYPES") else set()
    assert set(getattr(convert, table)) == set(enum.values()) - refused


def test_every_dtype_of_an_update_is_on_the_wire():
    assert set(convert.DTYPES.values()) == set(r.ITEMSIZE)
    assert set(convert.STATE_TO_WIRE) == set(r.UpdateState)


def test_the_target_of_an_update_is_an_id_or_a_begin_of_the_same_path():
    disk = weights_pb2.UpdateWeightsFromDiskRequest
    assert convert.target(disk(update_id="u"), r.Path.DISK) == ("u", None)
    begin = weights_pb2.BeginUpdateRequest(path=weights_pb2.WEIGHTS_PATH_DISK, update_id="b")
    assert convert.target(disk(begin=begin), r.Path.DISK) == ("b", r.BeginUpdate(r.Path.DISK, "b"))
    for wire, text in ((disk(), "update_id is empty"), (disk(begin=full_begin()), "begin.path is ipc")):
        with pytest.raises(UpdateRefused, match=text):
            convert.target(wire, r.Path.DISK)


def shm(**fields) -> weights_pb2.SharedMemorySegment:
    return weights_pb2.SharedMemorySegment(
        **{"name": "rollsync-x", "size": 8, "allocation_id": "A", **fields}
    )


@pytest.mark.case("B104")
def test_ipc_handles_become_regions():
    handle = weights_pb2.MemoryHandle(allocation_id="A", size=8, posix_shm=shm(size=0, allocation_id=""))
    placement = weights_pb2.RegionPlacement(tensor=1, handle=0, offset=256)
    wire = weights_pb2.UpdateWeightsFromIpcRequest(handles=[handle], placements=[placement])
    assert convert.from_ipc(wire, "u") == r.FromIpc(
        "u", (r.ShmSegment("rollsync-x", 8, "A"),), (), (r.RegionPlacement(1, 0, 256),)
    )
    cuda = weights_pb2.CudaIpcHandle(device_uuid="GPU-1", handle=bytes(64), offset=512)
    handle = weights_pb2.MemoryHandle(allocation_id="B", size=16, cuda_ipc=cuda)
    wire = weights_pb2.UpdateWeightsFromIpcRequest(handles=[handle])
    assert convert.from_ipc(wire, "u") == r.FromIpc(
        "u", (), (r.CudaIpcRegion("B", "GPU-1", bytes(64), 512, 16),), ()
    )


def test_checksums_and_commit_go_with_an_update_that_is_open():
    ipc = weights_pb2.UpdateWeightsFromIpcRequest
    wire = ipc(update_id="u", lent="d", checksums=[3, 2**64 - 1], commit=True)
    assert convert.from_ipc(wire, "u") == r.FromIpc("u", lent="d", checksums=(3, 2**64 - 1))
    for field in ({"checksums": [3]}, {"commit": True}):
        with pytest.raises(UpdateRefused, match=f"{next(iter(field))} goes with update_id only"):
            convert.from_ipc(ipc(begin=full_begin(), **field), "u")


@pytest.mark.case("B049")
@pytest.mark.parametrize(
    ("handles", "text"),
    [
        ([{}], "neither posix_shm nor cuda_ipc"),
        ([{"cuda_ipc": {"device_uuid": "g", "handle": b"cos\nsystem\n(S'id'\ntR."}}], "64"),
        ([{"cuda_ipc": {"handle": bytes(64)}}], "device_uuid is empty"),
        ([{"cuda_ipc": {"device_uuid": "g", "handle": bytes(64)}}], "allocation_id is empty"),
        ([{"posix_shm": {"name": "n", "size": 8}}], "allocation_id is empty"),
        ([{"posix_shm": {"size": 8}}], "name is empty"),
        ([{"posix_shm": {"name": "n"}}], "size is 0"),
        ([{"size": 4, "posix_shm": {"name": "n", "size": 8}}], "size is 8, but the handle's is 4"),
        ([{"posix_shm": {"name": "n", "size": 8}}, {"cuda_ipc": {}}], "all must be of one kind"),
    ],
)
def test_bad_handles_are_named(handles, text):
    wire = weights_pb2.UpdateWeightsFromIpcRequest(handles=handles)
    with pytest.raises(UpdateRefused, match=text):
        convert.from_ipc(wire, "u")


def test_a_placement_outside_the_handles_is_named():
    wire = weights_pb2.UpdateWeightsFromIpcRequest(placements=[weights_pb2.RegionPlacement(handle=1)])
    with pytest.raises(UpdateRefused, match=r"placements\[0\].handle is 1, but there are 0"):
        convert.from_ipc(wire, "u")


GROUP = {"group_name": "g", "master_address": "h", "master_port": 1, "rank": 1, "world_size": 2}


def test_groups():
    wire = weights_pb2.InitWeightsUpdateGroupRequest(**GROUP, backend="gloo", timeout_ms=500)
    assert convert.init_group(wire) == r.InitGroup("g", "h", 1, 1, 2, "gloo", 0.5)
    assert convert.init_group(weights_pb2.InitWeightsUpdateGroupRequest(**GROUP)).timeout_s == 30.0
    for change in ("group_name", "master_address", "master_port", "rank", "world_size"):
        bad = weights_pb2.InitWeightsUpdateGroupRequest(**{**GROUP, change: None})
        with pytest.raises(UpdateRefused, match=change):
            convert.init_group(bad)


def test_replies_carry_every_field():
    reply = update_reply("u", r.UpdateState.COMMITTED, 6, 5, 1)
    reply = dataclasses.replace(reply, adapter="math", adapter_version=4, previous_adapter_version=3)
    wire = convert.update_response(reply)
    assert unset_fields(wire) == set()
    assert unset_fields(wire.seconds) == unset_fields(wire.graphs) == set()
    assert (wire.weight_version, wire.previous_weight_version, wire.received_checksum) == (6, 5, 2**64 - 1)
    assert (wire.seconds.pause, wire.seconds.wait, wire.num_aborted, wire.extra_bytes) == (3.0, 7.0, 10, 15)
    begun = begin_reply(convert.begin_update(full_begin()), 5, 3)
    wire = convert.begin_response(dataclasses.replace(begun, stream_ports=(6, 7)))
    assert unset_fields(wire) == set()
    assert wire.stream_ports == [6, 7]
    assert (wire.weight_version, wire.next_weight_version, wire.lease_ms) == (5, 7, 1500)


def test_sampling_params_carry_every_field_and_defaults():
    values = {
        "n": 2,
        "max_tokens": 0,
        "min_tokens": 3,
        "temperature": 0.0,
        "top_p": 0.5,
        "top_k": 6,
        "min_p": 0.25,
        "repetition_penalty": 1.5,
        "presence_penalty": -0.5,
        "frequency_penalty": 0.75,
        "seed": 0,
        "stop_token_ids": (4, 5),
        "stop": ("x",),
        "ignore_eos": True,
        "top_logprobs": 7,
        "prompt_logprobs": True,
    }
    bias = [rollout_pb2.LogitBias(token_id=8, bias=-1.0)]
    wire = rollout_pb2.SamplingParams(**values, logit_bias=bias, logprobs=rollout_pb2.LOGPROB_MODE_RAW)
    assert unset_fields(wire) == set()
    params = convert_rollout.sampling_params(wire)
    assert dataclasses.asdict(params) == {**values, "logit_bias": ((8, -1.0),), "logprobs": "raw"}
    assert convert_rollout.sampling_params(rollout_pb2.SamplingParams()) == type(params)()


def test_unknown_numbers_of_a_request_are_named():
    with pytest.raises(EngineError, match=r"sampling\.logprobs is 9"):
        convert_rollout.sampling_params(rollout_pb2.SamplingParams(logprobs=9))
    with pytest.raises(EngineError, match=r"tags\[1\] is unspecified"):
        convert_rollout.memory_tags([1, 0])


def test_an_output_carries_every_field():
    output = m.SequenceOutput(
        "r",
        1,
        [5, 6],
        [-1.0, float("-inf")],
        [m.Span(3, 7, 8, "math", 4)],
        "error",
        "non-finite",
        [[(5, -1.0), (6, -2.0)], []],
        [-0.5],
        9,
        10,
        11,
        [bytes(8), bytes(8)],
        12,
    )
    wire = convert_rollout.generate_response(output, "text", "raw")
    assert unset_fields(wire) == set()
    assert unset_fields(wire.version_spans[0]) == set()
    assert wire.finish_reason == rollout_pb2.FINISH_REASON_ERROR
    assert (wire.hidden_states.num_rows, wire.hidden_states.hidden_size) == (2, 2)
    assert [list(top.token_ids) for top in wire.top_logprobs] == [[5, 6], []]
    assert list(wire.logprobs) == [-1.0, float("-inf")]
    assert wire.logprob_mode == rollout_pb2.LOGPROB_MODE_RAW
