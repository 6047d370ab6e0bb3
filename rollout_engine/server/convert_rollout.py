"""Generation between the wire and the dataclasses of sampling.py and messages.py, field by field."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TypeVar

from rollout_engine import __version__
from rollout_engine import messages as m
from rollout_engine.errors import EngineError, Reason
from rollout_engine.records import UpdateRecord
from rollout_engine.sampling import LogprobMode, SamplingParams
from rollout_engine.v1 import rollout_pb2 as pb

Value = TypeVar("Value")

LOGPROB_MODES: dict[int, LogprobMode] = {
    pb.LOGPROB_MODE_UNSPECIFIED: "processed",
    pb.LOGPROB_MODE_PROCESSED: "processed",
    pb.LOGPROB_MODE_RAW: "raw",
}
PAUSE_MODES: dict[int, str] = {
    pb.PAUSE_MODE_UNSPECIFIED: "keep",
    pb.PAUSE_MODE_KEEP: "keep",
    pb.PAUSE_MODE_ABORT: "abort",
    pb.PAUSE_MODE_WAIT: "wait",
    pb.PAUSE_MODE_RETRACT: "retract",
}
MEMORY_TAGS: dict[int, str] = {
    pb.MEMORY_TAG_WEIGHTS: "weights",
    pb.MEMORY_TAG_KV_CACHE: "kv_cache",
    pb.MEMORY_TAG_GRAPHS: "graphs",
}
LOGPROB_MODE_TO_WIRE = {"processed": pb.LOGPROB_MODE_PROCESSED, "raw": pb.LOGPROB_MODE_RAW}
MEMORY_TAG_TO_WIRE = {tag: pb.MemoryTag.Name(number) for number, tag in MEMORY_TAGS.items()}
FINISH_REASON_TO_WIRE = {
    "": pb.FINISH_REASON_UNSPECIFIED,
    "stop": pb.FINISH_REASON_STOP,
    "length": pb.FINISH_REASON_LENGTH,
    "abort": pb.FINISH_REASON_ABORT,
    "deadline": pb.FINISH_REASON_DEADLINE,
    "error": pb.FINISH_REASON_ERROR,
}
STATUS_TO_WIRE = {
    "serving": pb.SERVING_STATUS_SERVING,
    "paused": pb.SERVING_STATUS_PAUSED,
    "not_serving": pb.SERVING_STATUS_NOT_SERVING,
}


def known(table: Mapping[int, Value], number: int, field: str) -> Value:
    """Look an enum's number up; INVALID_REQUEST for unspecified without a meaning, and unknown numbers."""
    value = table.get(number)
    if value is None:
        what = "is unspecified" if number == 0 else f"is {number}, which this engine does not know"
        allowed = ", ".join(str(v) for v in dict.fromkeys(table.values()))
        raise EngineError(Reason.INVALID_REQUEST, f"{field} {what}; it must be one of {allowed}")
    return value


def sampling_params(wire: pb.SamplingParams) -> SamplingParams:
    """SamplingParams with the wire's defaults made explicit; not yet checked."""
    return SamplingParams(
        n=wire.n or 1,
        max_tokens=wire.max_tokens if wire.HasField("max_tokens") else None,
        min_tokens=wire.min_tokens,
        temperature=wire.temperature if wire.HasField("temperature") else 1.0,
        top_p=wire.top_p if wire.HasField("top_p") else 1.0,
        top_k=wire.top_k,
        min_p=wire.min_p,
        repetition_penalty=wire.repetition_penalty if wire.HasField("repetition_penalty") else 1.0,
        presence_penalty=wire.presence_penalty,
        frequency_penalty=wire.frequency_penalty,
        seed=wire.seed if wire.HasField("seed") else None,
        stop_token_ids=tuple(wire.stop_token_ids),
        stop=tuple(wire.stop),
        ignore_eos=wire.ignore_eos,
        logit_bias=tuple((bias.token_id, bias.bias) for bias in wire.logit_bias),
        logprobs=known(LOGPROB_MODES, wire.logprobs, "sampling.logprobs"),
        top_logprobs=wire.top_logprobs,
        prompt_logprobs=wire.prompt_logprobs,
    )


def version_spans(spans: Sequence[m.Span]) -> list[pb.VersionSpan]:
    return [
        pb.VersionSpan(
            start=span.start,
            weight_version=span.weight_version,
            commit_sequence=span.commit_sequence,
            adapter=span.adapter,
            adapter_version=span.adapter_version,
        )
        for span in spans
    ]


def hidden(rows: Sequence[bytes]) -> pb.Hidden | None:
    """Rows of float32, little-endian, as one matrix; None if there are none."""
    if not rows:
        return None
    return pb.Hidden(num_rows=len(rows), hidden_size=len(rows[0]) // 4, data=b"".join(rows))


def generate_response(output: m.SequenceOutput, text: str, mode: LogprobMode) -> pb.GenerateResponse:
    """A message of the stream (or a whole completion) for one output of the engine."""
    return pb.GenerateResponse(
        request_id=output.request_id,
        index=output.index,
        token_ids=output.token_ids,
        logprobs=output.logprobs,
        top_logprobs=[
            pb.TopLogprobs(token_ids=[i for i, _ in top], logprobs=[logprob for _, logprob in top])
            for top in output.top_logprobs
        ],
        text=text,
        version_spans=version_spans(output.spans),
        finish_reason=FINISH_REASON_TO_WIRE[output.finish_reason],
        error=output.error,
        prompt_logprobs=output.prompt_logprobs or (),
        num_prompt_tokens=output.num_prompt_tokens,
        num_cached_tokens=output.num_cached_tokens,
        logprob_mode=LOGPROB_MODE_TO_WIRE[mode],
        weight_version=output.weight_version,
        hidden_states=hidden(output.hidden_states),
        num_preemptions=output.num_preemptions,
    )


def memory_tags(numbers: Sequence[int]) -> list[str]:
    """Tags by name; the wire's empty list means all and stays empty."""
    return [known(MEMORY_TAGS, number, f"tags[{i}]") for i, number in enumerate(numbers)]


def engine_state(snapshot: m.Snapshot) -> pb.EngineState:
    return pb.EngineState(
        status=STATUS_TO_WIRE[snapshot.status],
        not_serving_reason=snapshot.reason if snapshot.status == "not_serving" else "",
        weight_version=snapshot.weight_version,
        commit_sequence=snapshot.commit_sequence,
        num_running=snapshot.num_running,
        num_waiting=snapshot.num_waiting,
        num_free_pages=snapshot.num_free_pages,
        num_cached_pages=snapshot.num_cached_pages,
        num_total_pages=snapshot.num_total_pages,
        open_update_id=snapshot.open_update_id,
        open_update_state=snapshot.open_update_state,
        num_steps=snapshot.num_steps,
        num_generated_tokens=snapshot.num_generated_tokens,
        open_update_received_bytes=snapshot.received_bytes,
        open_update_total_bytes=snapshot.total_bytes,
        paused_by=snapshot.paused_by,
        released_tags=[MEMORY_TAG_TO_WIRE[tag] for tag in snapshot.released_tags],
        num_prompt_tokens=snapshot.work.num_prompt_tokens,
        num_cached_tokens=snapshot.work.num_cached_tokens,
        adapters=[
            pb.AdapterState(
                name=held.name,
                version=held.version,
                rank=held.rank,
                base_weight_version=held.base_version,
                stale=held.stale,
                num_sequences=held.num_sequences,
            )
            for held in snapshot.adapters
        ],
    )


def update_summary(record: UpdateRecord) -> pb.UpdateSummary:
    return pb.UpdateSummary(
        update_id=record.update_id,
        path=record.path,
        staging=record.staging,
        end=record.end,
        reason=record.reason,
        message=record.message,
        weight_version=record.version,
        num_bytes=record.num_bytes,
        seconds=record.seconds,
        ended_at=record.ended_at,
        adapter=record.adapter,
        adapter_version=record.adapter_version,
    )


def engine_info(
    info: m.EngineInfo, snapshot: m.Snapshot, recent_updates: Iterable[UpdateRecord]
) -> pb.GetEngineInfoResponse:
    kv = info.kv
    return pb.GetEngineInfoResponse(
        instance_id=info.instance_id,
        rollsync_version=__version__,
        architecture=info.architecture,
        dtype=info.dtype,
        device=info.device,
        vocab_size=info.vocab_size,
        context_length=info.context_length,
        eos_token_ids=info.eos_token_ids,
        num_weight_tensors=info.num_weight_tensors,
        weight_bytes=info.weight_bytes,
        page_size=info.page_size,
        attention_backend=info.attention_backend,
        kv_capacity=pb.KvCapacity(
            pre_model_load_bytes=kv.pre_model_load_bytes,
            available_bytes=kv.available_bytes,
            reserved_bytes=kv.reserved_bytes,
            preloaded_weights_bytes=kv.preloaded_weights_bytes,
            kv_bytes=kv.kv_bytes,
            bytes_per_page=kv.bytes_per_page,
        ),
        forward_counts=pb.ForwardCounts(**info.forward_counts),
        state=engine_state(snapshot),
        model_path=info.model_path,
        weight_version=snapshot.weight_version,
        weights_path=info.weights_path,
        max_running_requests=info.max_running_requests,
        weights_address=info.weights_address,
        max_adapters=info.max_adapters,
        max_adapter_rank=info.max_adapter_rank,
        adapter_bytes=info.adapter_bytes,
        recent_updates=[update_summary(record) for record in recent_updates],
    )
