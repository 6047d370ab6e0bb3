"""The Rollout service: generation, scoring, and the engine's state."""

from __future__ import annotations

import asyncio
import uuid
from typing import TypeAlias

import grpc

from rollout_engine import messages as m
from rollout_engine.errors import EngineError, Reason
from rollout_engine.sampling import SamplingParams
from rollout_engine.server import convert_rollout as convert
from rollout_engine.server.engine_client import EngineClient
from rollout_engine.server.generation import Generation, complete_params
from rollout_engine.server.live import Inbox
from rollout_engine.server.status import DomainError, error_from, guarded, item_error, kind_of
from rollout_engine.server.text import TextCodec
from rollout_engine.v1 import rollout_pb2 as pb
from rollout_engine.v1 import rollout_pb2_grpc
from weight_updater.errors import UpdateError

Context: TypeAlias = grpc.aio.ServicerContext

LOGPROB_BYTES = 4
SCORE_OVERHEAD_BYTES = 64
"""Of a sequence's scores in a message, beside its log-probabilities and the adapter's name."""


@guarded(pb.DESCRIPTOR.services_by_name["Rollout"])
class RolloutService(rollout_pb2_grpc.RolloutServicer):
    """Handlers write to the context instead of yielding, so that a cancelled call stops in them at once.

    Args:
        max_message_bytes: a completion that is larger cannot be sent whole.
        draining: set when the server stops; streams of state then end.
    """

    def __init__(
        self, engine: EngineClient, codec: TextCodec, max_message_bytes: int, draining: asyncio.Event
    ) -> None:
        self.tally = engine.tally
        self._engine = engine
        self._codec = codec
        self._max_message_bytes = max_message_bytes
        self._draining = draining

    # -------------------------------------------------------- generation

    async def Generate(self, request: pb.GenerateRequest, context: Context) -> None:
        ids = await self._codec.prompt(request)
        generation = Generation(request, ids, self._engine.info, self._codec, whole=False)
        inbox = Inbox()
        generation.attach(self._engine.submit(generation.request, inbox))
        try:
            while not generation.done:
                outputs = []
                for arrival in await inbox.take():
                    if isinstance(arrival, m.RequestRefused):
                        raise error_from(arrival.error)
                    outputs.append(arrival)
                for response in generation.take(outputs):
                    await context.write(response)
        finally:
            generation.leave()

    async def GenerateBatch(self, request: pb.GenerateBatchRequest, context: Context) -> None:
        inbox = Inbox()
        batch: dict[str, tuple[int, Generation]] = {}
        try:
            for index, item in enumerate(request.requests):
                try:
                    ids = await self._codec.prompt(item)
                    generation = Generation(item, ids, self._engine.info, self._codec, whole=True)
                    if generation.request.request_id in batch:  # maybe ended, but not answered yet
                        raise EngineError(
                            Reason.DUPLICATE_REQUEST,
                            f"request_id {item.request_id!r} stands twice in the batch; give each its own",
                        )
                    generation.attach(self._engine.submit(generation.request, inbox))
                except (EngineError, UpdateError) as error:
                    await context.write(self._refused(index, error))
                else:
                    batch[generation.request.request_id] = index, generation
            left = set(batch)
            while left:
                for arrival in await inbox.take():
                    index, generation = batch[arrival.request_id]
                    if isinstance(arrival, m.RequestRefused):
                        left.discard(arrival.request_id)
                        await context.write(self._refused(index, error_from(arrival.error)))
                        continue
                    for completion in generation.take([arrival]):
                        await context.write(self._completed(index, completion))
                    if generation.done:
                        left.discard(arrival.request_id)
        finally:
            for _, generation in batch.values():
                generation.leave()

    def _completed(self, index: int, completion: pb.GenerateResponse) -> pb.GenerateBatchResponse:
        """A whole completion, or an error in its place if no message can carry it."""
        size = completion.ByteSize()
        if size + 64 <= self._max_message_bytes:
            return pb.GenerateBatchResponse(request_index=index, completion=completion)
        error = EngineError(
            Reason.INVALID_REQUEST,
            f"completion {completion.index} takes {size} bytes, more than a message of "
            f"{self._max_message_bytes} bytes can carry; use Generate, which sends it in pieces",
        )
        return self._refused(index, error)

    def _refused(self, index: int, error: DomainError) -> pb.GenerateBatchResponse:
        self.tally.errored(kind_of(error), error.reason)
        return pb.GenerateBatchResponse(request_index=index, error=item_error(error))

    async def Score(self, request: pb.ScoreRequest, context: Context) -> pb.ScoreResponse:
        temperature = request.temperature if request.HasField("temperature") else 1.0
        if temperature == 0:
            raise EngineError(Reason.INVALID_REQUEST, "temperature is 0; it must be > 0 to score")
        self._check_scores_fit(request)
        params = SamplingParams(max_tokens=0, temperature=temperature, prompt_logprobs=True)
        call_id = uuid.uuid4().hex
        submits = []
        for index, sequence in enumerate(request.sequences):
            ids = list(sequence.ids)
            try:
                complete = complete_params(params, ids, self._engine.info)
            except EngineError as error:
                raise EngineError(error.reason, f"sequences[{index}]: {error.message}") from error
            submits.append(
                m.SubmitRequest(
                    f"{call_id}/{index}",
                    ids,
                    complete,
                    min_version=request.min_version,
                    stream=False,
                    adapter=request.adapter,
                    min_adapter_version=request.min_adapter_version,
                )
            )
        inbox, live, scores = Inbox(), [], dict[str, pb.SequenceScore]()
        try:
            live = [self._engine.submit(submit, inbox) for submit in submits]
            while len(scores) < len(submits):
                for arrival in await inbox.take():
                    scores[arrival.request_id] = _score(arrival)
        finally:
            for one in live:
                one.leave()
        return pb.ScoreResponse(
            scores=[scores[submit.request_id] for submit in submits],
            weight_version=self._engine.state.weight_version,
        )

    def _check_scores_fit(self, request: pb.ScoreRequest) -> None:
        """Refuse what could be computed, and then not be sent: a token takes more bytes there than here.

        Raises:
            EngineError: INVALID_REQUEST.
        """
        num_tokens = sum(len(sequence.ids) for sequence in request.sequences)
        each = SCORE_OVERHEAD_BYTES + len(request.adapter.encode())
        size = LOGPROB_BYTES * num_tokens + each * len(request.sequences)
        if size > self._max_message_bytes:
            raise EngineError(
                Reason.INVALID_REQUEST,
                f"scores of {num_tokens} tokens in {len(request.sequences)} sequences take up to {size} "
                f"bytes, more than a message of {self._max_message_bytes} bytes can carry; score fewer in a "
                "call",
            )

    async def Abort(self, request: pb.AbortRequest, context: Context) -> pb.AbortResponse:
        requests = self._engine.requests
        aborted, unknown = requests.abort(requests.ids() if request.all else request.request_ids)
        return pb.AbortResponse(
            aborted_request_ids=aborted,
            unknown_request_ids=unknown,
            weight_version=self._engine.state.weight_version,
        )

    # -------------------------------------------------------- control

    async def PauseGeneration(
        self, request: pb.PauseGenerationRequest, context: Context
    ) -> pb.PauseGenerationResponse:
        mode = convert.known(convert.PAUSE_MODES, request.mode, "mode")
        reply = await self._engine.call(m.Pause, mode=mode)
        return pb.PauseGenerationResponse(
            num_running=reply.result["num_running"], weight_version=reply.weight_version
        )

    async def ContinueGeneration(
        self, request: pb.ContinueGenerationRequest, context: Context
    ) -> pb.ContinueGenerationResponse:
        reply = await self._engine.call(m.Continue)
        return pb.ContinueGenerationResponse(weight_version=reply.weight_version)

    async def FlushCache(self, request: pb.FlushCacheRequest, context: Context) -> pb.FlushCacheResponse:
        reply = await self._engine.call(m.FlushCache)
        return pb.FlushCacheResponse(num_pages=reply.result["num_pages"], weight_version=reply.weight_version)

    async def ReleaseMemoryOccupation(
        self, request: pb.ReleaseMemoryOccupationRequest, context: Context
    ) -> pb.ReleaseMemoryOccupationResponse:
        tags = convert.memory_tags(request.tags) or list(convert.MEMORY_TAGS.values())
        reply = await self._engine.call(m.ReleaseMemory, tags=tags)
        return pb.ReleaseMemoryOccupationResponse(
            released_bytes=reply.result["bytes"], weight_version=reply.weight_version
        )

    async def ResumeMemoryOccupation(
        self, request: pb.ResumeMemoryOccupationRequest, context: Context
    ) -> pb.ResumeMemoryOccupationResponse:
        tags = convert.memory_tags(request.tags) or list(self._engine.state.released_tags)
        reply = await self._engine.call(m.ResumeMemory, tags=tags)
        return pb.ResumeMemoryOccupationResponse(
            resumed_bytes=reply.result["bytes"],
            needs_update=reply.result["needs_update"],
            weight_version=reply.weight_version,
        )

    # -------------------------------------------------------- state

    async def GetEngineInfo(
        self, request: pb.GetEngineInfoRequest, context: Context
    ) -> pb.GetEngineInfoResponse:
        info = await self._engine.fresh_info()
        return convert.engine_info(info, self._engine.state, self.tally.recent_updates)

    async def WatchEngine(self, request: pb.WatchEngineRequest, context: Context) -> None:
        draining = asyncio.create_task(self._draining.wait())
        sent: m.Snapshot | None = None
        try:
            while not draining.done():
                changed = self._engine.changed
                if self._engine.state != sent:
                    sent = self._engine.state
                    await context.write(convert.engine_state(sent))
                    continue
                change = asyncio.create_task(changed.wait())
                try:
                    await asyncio.wait({change, draining}, return_when=asyncio.FIRST_COMPLETED)
                finally:
                    change.cancel()
        finally:
            draining.cancel()


def _score(arrival: m.SequenceOutput | m.RequestRefused) -> pb.SequenceScore:
    if isinstance(arrival, m.RequestRefused):
        raise error_from(arrival.error)
    if arrival.finish_reason == "error":
        raise EngineError(Reason.INTERNAL, f"scoring failed: {arrival.error}")
    if arrival.finish_reason != "length":
        raise EngineError(
            Reason.BUSY, f"scoring was ended ({arrival.finish_reason}) before it was done; call again"
        )
    return pb.SequenceScore(
        logprobs=arrival.prompt_logprobs or (), version_spans=convert.version_spans(arrival.spans)
    )
