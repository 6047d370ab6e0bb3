"""A hand-written engine for tests of the trainer's side: both services over real gRPC, weights as bytes.

It keeps what it is sent, answers as the protos say, and can be told to refuse one method, or to be slow in
one. `events` is the order of the calls that reached it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent import futures
from contextlib import contextmanager
from typing import Any

import grpc

from rollout_engine.v1 import rollout_pb2 as rpb
from rollout_engine.v1 import rollout_pb2_grpc, weights_pb2_grpc
from rollout_engine.v1 import weights_pb2 as wpb
from weight_updater.requests import ITEMSIZE, Manifest, ShmSegment, TensorSpec
from weight_updater.shm import SharedSegment

DTYPES = {1: "float32", 2: "bfloat16", 3: "float16", 4: "float64"}


class FakeEngine(rollout_pb2_grpc.RolloutServicer, weights_pb2_grpc.WeightsServicer):
    def __init__(self) -> None:
        self.version = 0
        self.sequence = 0
        self.weights: dict[str, bytes] = {}
        self.events: list[str] = []
        self.refuse: dict[str, tuple[grpc.StatusCode, str, str]] = {}
        self.once: dict[str, tuple[grpc.StatusCode, str, str]] = {}
        self.manifests: dict[str, Manifest] = {}
        self.begun: list[wpb.BeginUpdateRequest] = []
        self.open: dict[str, Any] | None = None
        self.committed: dict[str, wpb.UpdateWeightsResponse] = {}
        self.ipc: list[wpb.UpdateWeightsFromIpcRequest] = []
        self.knows_lent = False  # what was lent by handle before
        self.loses_reply = False  # of the next commit in a call that does more than commit
        self.received: Callable[[], bool] = lambda: True  # waits for a broadcast: whether all of it came
        self.delay_s = 0.0
        self.slow: set[str] = set()  # methods that answer once the update is aborted, or never if that is one
        self.let_go = threading.Event()
        self.status = rpb.SERVING_STATUS_SERVING
        self.num_tensors_said: int | None = None
        self.generated: list[rpb.GenerateRequest] = []
        self.metadata: list[dict[str, Any]] = []
        self.layout = wpb.GetWeightLayoutResponse()
        self._lock = threading.Lock()

    def _enter(self, name: str, context: grpc.ServicerContext) -> None:
        with self._lock:
            self.events.append(name)
        time.sleep(self.delay_s)
        self.metadata.append(dict(context.invocation_metadata()))
        if name in self.slow:
            self.let_go.wait(60)
            self._refuse(context, grpc.StatusCode.ABORTED, "ABORTED", "the update was aborted")
        if name == "AbortUpdate":
            self.let_go.set()
        refusal = self.once.pop(name, None) or self.refuse.get(name)
        if refusal is not None:
            self._refuse(context, *refusal)

    def _refuse(self, context: Any, code: grpc.StatusCode, reason: str, message: str) -> None:
        if reason:
            context.set_trailing_metadata((("rollsync-reason", reason),))
        context.abort(code, message)

    # ------------------------------------------------------------ rollout

    def Generate(self, request: Any, context: Any) -> Iterator[rpb.GenerateResponse]:
        self._enter("Generate", context)
        self.generated.append(request)
        if not request.text and not request.token_ids.ids:
            self._refuse(context, grpc.StatusCode.INVALID_ARGUMENT, "EMPTY_PROMPT", "the prompt has no token")
        for start in range(0, 4, 2):
            for index in range(request.sampling.n or 1):
                yield rpb.GenerateResponse(
                    request_id="r",
                    index=index,
                    token_ids=[10 * index + start, 10 * index + start + 1],
                    logprobs=[-0.5, -1.5],
                    text=f"<{start}>",
                    version_spans=[rpb.VersionSpan(start=start, weight_version=7 + start, commit_sequence=1)],
                    finish_reason=rpb.FINISH_REASON_LENGTH if start else rpb.FINISH_REASON_UNSPECIFIED,
                    num_prompt_tokens=3,
                    logprob_mode=rpb.LOGPROB_MODE_PROCESSED,
                    weight_version=9,
                )

    def GenerateBatch(self, request: Any, context: Any) -> Iterator[rpb.GenerateBatchResponse]:
        self._enter("GenerateBatch", context)
        for position, item in reversed(list(enumerate(request.requests))):
            if not item.text and not item.token_ids.ids:
                error = rpb.RequestError(status=3, reason="EMPTY_PROMPT", message="the prompt has no token")
                yield rpb.GenerateBatchResponse(request_index=position, error=error)
                continue
            for index in reversed(range(item.sampling.n or 1)):
                completion = rpb.GenerateResponse(
                    index=index,
                    token_ids=[position, index],
                    logprobs=[-1.0, -2.0],
                    finish_reason=rpb.FINISH_REASON_STOP,
                    version_spans=[rpb.VersionSpan(weight_version=self.version)],
                )
                yield rpb.GenerateBatchResponse(request_index=position, completion=completion)

    def Score(self, request: Any, context: Any) -> rpb.ScoreResponse:
        self._enter("Score", context)
        spans = [rpb.VersionSpan(weight_version=self.version)]
        scores = [
            rpb.SequenceScore(logprobs=[-1.0] * (len(s.ids) - 1), version_spans=spans)
            for s in request.sequences
        ]
        return rpb.ScoreResponse(scores=scores)

    def GetEngineInfo(self, request: Any, context: Any) -> rpb.GetEngineInfoResponse:
        self._enter("GetEngineInfo", context)
        torn = self.status == rpb.SERVING_STATUS_NOT_SERVING
        state = rpb.EngineState(
            status=self.status,
            not_serving_reason="torn" if torn else "",
            weight_version=self.version,
            num_total_pages=8,
        )
        return rpb.GetEngineInfoResponse(
            architecture="LlamaForCausalLM",
            dtype="float32",
            device="cpu",
            eos_token_ids=[2],
            state=state,
            model_path="/models/first",
            weights_path="/models/last-good",
            weight_version=self.version,
        )

    def WatchEngine(self, request: Any, context: Any) -> Iterator[rpb.EngineState]:
        self._enter("WatchEngine", context)
        yield rpb.EngineState(status=rpb.SERVING_STATUS_SERVING, weight_version=self.version)

    def PauseGeneration(self, request: Any, context: Any) -> rpb.PauseGenerationResponse:
        self._enter(f"PauseGeneration {request.mode}", context)
        return rpb.PauseGenerationResponse(num_running=2)

    def ContinueGeneration(self, request: Any, context: Any) -> rpb.ContinueGenerationResponse:
        self._enter("ContinueGeneration", context)
        return rpb.ContinueGenerationResponse(weight_version=self.version)

    def Abort(self, request: Any, context: Any) -> rpb.AbortResponse:
        self._enter("Abort", context)
        return rpb.AbortResponse(unknown_request_ids=request.request_ids)

    # ------------------------------------------------------------ weights

    def BeginUpdate(self, request: Any, context: Any) -> wpb.BeginUpdateResponse:
        self._enter("BeginUpdate", context)
        return self._begin(request, context)

    def _begin(self, request: Any, context: Any) -> wpb.BeginUpdateResponse:
        self.begun.append(request)
        which = request.WhichOneof("source_manifest")
        if which == "manifest_digest" and request.manifest_digest not in self.manifests:
            self._refuse(context, grpc.StatusCode.NOT_FOUND, "MANIFEST_UNKNOWN", "never seen")
        if which == "manifest_digest":
            manifest = self.manifests[request.manifest_digest]
        else:
            manifest = Manifest(
                tuple(
                    TensorSpec(t.name, DTYPES[t.dtype], tuple(t.shape), t.checksum)
                    for t in request.manifest.tensors
                )
            )
        self.manifests[manifest.digest()] = manifest
        self.open = {
            "id": request.update_id or "u",
            "manifest": manifest,
            "path": request.path,
            "bytes": [bytearray(t.nbytes) for t in manifest.tensors],
            "next": request.weight_version or self.version + 1,
            "directory": request.directory,
        }
        return wpb.BeginUpdateResponse(
            update_id=self.open["id"],
            weight_version=self.version,
            next_weight_version=self.open["next"],
            manifest_digest=manifest.digest(),
            total_bytes=manifest.nbytes,
            bucket_bytes=request.bucket_bytes or 64 << 20,
            lease_ms=60000,
        )

    def UpdateWeightsFromTensor(self, requests: Any, context: Any) -> wpb.UpdateWeightsResponse:
        self._enter("UpdateWeightsFromTensor", context)
        header = next(requests).header
        if header.HasField("segment"):
            self._read_segment(header.segment)
        for message in requests:
            chunk = message.chunk
            assert chunk.offset % 8 == 0
            if chunk.packed:
                self._unpack(chunk.offset, chunk.data)
            else:
                place = self.open["bytes"][chunk.tensor]
                place[chunk.offset : chunk.offset + len(chunk.data)] = chunk.data
        return self._reply(wpb.UPDATE_STATE_RECEIVED)

    def UpdateWeightsFromIpc(self, request: Any, context: Any) -> wpb.UpdateWeightsResponse:
        self._enter("UpdateWeightsFromIpc", context)
        self.ipc.append(request)
        update_id = request.update_id or request.begin.update_id
        if update_id in self.committed:
            return self.committed[update_id]
        if request.HasField("begin"):
            self._begin(request.begin, context)
        if request.lent and not self.knows_lent:
            self._refuse(context, grpc.StatusCode.NOT_FOUND, "MANIFEST_UNKNOWN", "never seen")
        self.knows_lent = True
        if request.handles and request.handles[0].HasField("posix_shm"):
            self._read_segment(request.handles[0].posix_shm)
        if not (request.commit or request.HasField("begin")):
            return self._reply(wpb.UPDATE_STATE_RECEIVED)
        return self._commit_and_reply(update_id, context)

    def _commit_and_reply(self, update_id: str, context: Any) -> wpb.UpdateWeightsResponse:
        reply = self._commit(update_id)
        if self.loses_reply:
            self.loses_reply = False
            self._refuse(context, grpc.StatusCode.UNAVAILABLE, "", "connection lost")
        return reply

    def UpdateWeightsFromDisk(self, request: Any, context: Any) -> wpb.UpdateWeightsResponse:
        self._enter(f"UpdateWeightsFromDisk {request.directory}", context)
        if request.HasField("begin"):
            self.version = request.begin.weight_version or self.version + 1
            return self._reply(wpb.UPDATE_STATE_COMMITTED, num_tensors=3, path=1)
        return self._reply(wpb.UPDATE_STATE_RECEIVED)

    def UpdateWeightsFromDistributed(self, request: Any, context: Any) -> wpb.UpdateWeightsResponse:
        self._enter("UpdateWeightsFromDistributed", context)
        update_id = request.update_id or request.begin.update_id
        if update_id in self.committed:
            return self.committed[update_id]
        if request.HasField("begin"):
            self._begin(request.begin, context)
        if not self.received():
            self.open = None
            self._refuse(context, grpc.StatusCode.ABORTED, "PEER_LOST", "rank 0 gave up")
        if not request.HasField("begin"):
            return self._reply(wpb.UPDATE_STATE_RECEIVED)
        return self._commit_and_reply(update_id, context)

    def _unpack(self, start: int, data: bytes) -> None:
        offsets, _ = self.open["manifest"].packed_offsets()
        for at, value in enumerate(data, start):
            for place, offset in zip(self.open["bytes"], offsets, strict=True):
                if offset <= at < offset + len(place):
                    place[at - offset] = value

    def _read_segment(self, segment: wpb.SharedMemorySegment) -> None:
        shm = SharedSegment.open(ShmSegment(segment.name, segment.size, segment.allocation_id))
        try:
            offsets, _ = self.open["manifest"].packed_offsets()
            for place, offset in zip(self.open["bytes"], offsets, strict=True):
                place[:] = shm.buf[offset : offset + len(place)]
        finally:
            shm.close()

    def PrepareUpdate(self, request: Any, context: Any) -> wpb.UpdateWeightsResponse:
        self._enter("PrepareUpdate", context)
        return self._reply(wpb.UPDATE_STATE_PREPARED)

    def CommitUpdate(self, request: Any, context: Any) -> wpb.UpdateWeightsResponse:
        self._enter("CommitUpdate", context)
        return self._commit(request.update_id)

    def _commit(self, update_id: str) -> wpb.UpdateWeightsResponse:
        if update_id in self.committed:
            return self.committed[update_id]
        named = dict(
            zip((t.name for t in self.open["manifest"].tensors), map(bytes, self.open["bytes"]), strict=True)
        )
        changed = sum(self.weights.get(name) != data for name, data in named.items())
        self.weights.update(named)
        self.version = self.open["next"]
        self.sequence += 1
        reply = self._reply(wpb.UPDATE_STATE_COMMITTED, num_changed=changed)
        self.committed[update_id] = reply
        self.open = None
        return reply

    def _reply(self, state: int, **fields: Any) -> wpb.UpdateWeightsResponse:
        num_tensors = len(self.open["manifest"].tensors) if self.open else 0
        if self.num_tensors_said is not None:
            num_tensors = self.num_tensors_said
        values = {
            "update_id": self.open["id"] if self.open else "u",
            "state": state,
            "weight_version": self.version,
            "commit_sequence": self.sequence,
            "path": self.open["path"] if self.open else 1,
            "staging": 2,
            "num_tensors": num_tensors,
            "verified": True,
        }
        return wpb.UpdateWeightsResponse(**(values | fields))

    def AbortUpdate(self, request: Any, context: Any) -> wpb.AbortUpdateResponse:
        self._enter("AbortUpdate", context)
        found = self.open is not None and self.open["id"] == request.update_id
        self.open = None if found else self.open
        return wpb.AbortUpdateResponse(found=found)

    def Release(self, request: Any, context: Any) -> wpb.ReleaseResponse:
        self._enter("Release", context)
        return wpb.ReleaseResponse(num_released=len(request.allocation_ids))

    def InitWeightsUpdateGroup(self, request: Any, context: Any) -> wpb.InitWeightsUpdateGroupResponse:
        self._enter(f"InitWeightsUpdateGroup {request.rank}/{request.world_size}", context)
        return wpb.InitWeightsUpdateGroupResponse(backend="gloo")

    def DestroyWeightsUpdateGroup(self, request: Any, context: Any) -> wpb.DestroyWeightsUpdateGroupResponse:
        self._enter("DestroyWeightsUpdateGroup", context)
        return wpb.DestroyWeightsUpdateGroupResponse(found=True)

    def GetWeightLayout(self, request: Any, context: Any) -> wpb.GetWeightLayoutResponse:
        self._enter("GetWeightLayout", context)
        return self.layout

    def GetWeightChecksums(self, request: Any, context: Any) -> wpb.GetWeightChecksumsResponse:
        self._enter("GetWeightChecksums", context)
        checksums = [wpb.NamedChecksum(name="w", checksum=2**63 + 5)]
        return wpb.GetWeightChecksumsResponse(checksums=checksums, folded=3, weight_version=self.version)

    def GetWeightsByName(self, request: Any, context: Any) -> Iterator[wpb.GetWeightsByNameResponse]:
        self._enter("GetWeightsByName", context)
        for name in request.names:
            data = self.weights[name]
            for offset in range(0, len(data), 8):
                yield wpb.GetWeightsByNameResponse(
                    name=name,
                    dtype=1,
                    shape=[len(data) // ITEMSIZE["float32"]],
                    offset=offset,
                    data=data[offset : offset + 8],
                    weight_version=self.version,
                )


@contextmanager
def serving(engine: FakeEngine) -> Iterator[str]:
    """Run a fake engine on a free loopback port; gives host:port."""
    pool = futures.ThreadPoolExecutor(max_workers=8)
    server = grpc.server(pool)
    rollout_pb2_grpc.add_RolloutServicer_to_server(engine, server)
    weights_pb2_grpc.add_WeightsServicer_to_server(engine, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        engine.let_go.set()
        server.stop(0).wait()
        pool.shutdown()
