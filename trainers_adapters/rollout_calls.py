"""Requests of the Rollout service, and how their answers are read. No torch.

Every function takes `timeout_s`: seconds after which the caller gets RollsyncError(DEADLINE).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypedDict

import grpc
from typing_extensions import Unpack

from rollout_engine.v1 import rollout_pb2 as pb
from trainers_adapters.calls import (
    DEFAULT_TIMEOUT_S,
    WORK_TIMEOUT_S,
    Gathered,
    Stream,
    Unary,
    as_list,
    enum_words,
    number_of,
)
from trainers_adapters.errors import RollsyncError
from trainers_adapters.results import (
    Aborted,
    BatchItem,
    Completion,
    Score,
    VersionSpan,
    float32_rows,
)

FINISH_REASONS = enum_words(pb.FinishReason, "FINISH_REASON_", "")[1]
LOGPROB_MODES, LOGPROB_MODE_WORDS = enum_words(pb.LogprobMode, "LOGPROB_MODE_", "")

GRPC_STATUS_NAMES = {code.value[0]: code.name for code in grpc.StatusCode}


class Sampling(TypedDict, total=False):
    """Parameters of a request; those left out sample from the whole distribution at temperature 1."""

    n: int
    max_tokens: int
    min_tokens: int
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    seed: int
    stop_token_ids: Sequence[int]
    stop: Sequence[str]
    ignore_eos: bool
    logit_bias: dict[int, float]
    logprobs: str
    top_logprobs: int
    prompt_logprobs: bool


@dataclass(frozen=True, slots=True)
class Request:
    """A prompt of a batch (text or token ids) with sampling of its own, over the batch's.

    adapter: of this prompt; None: the batch's; "": none.
    """

    prompt: str | Sequence[int]
    sampling: Sampling = field(default_factory=Sampling)
    request_id: str = ""
    priority: int = 0
    adapter: str | None = None


def sampling_message(sampling: Sampling) -> pb.SamplingParams:
    """The wire form; a TypeError names an option that does not exist."""
    if unknown := sampling.keys() - Sampling.__annotations__.keys():
        known = ", ".join(Sampling.__annotations__)
        raise TypeError(f"unknown sampling option {sorted(unknown)[0]!r}; the options are {known}")
    fields: dict[str, Any] = {key: value for key, value in sampling.items() if value is not None}
    if "logit_bias" in fields:
        fields["logit_bias"] = [pb.LogitBias(token_id=i, bias=b) for i, b in fields["logit_bias"].items()]
    if "logprobs" in fields:
        fields["logprobs"] = number_of(fields["logprobs"], LOGPROB_MODES, "logprobs")
    for name in ("stop", "stop_token_ids"):
        if name in fields:
            fields[name] = as_list(fields[name])
    if fields.get("n", 1) < 1:
        raise ValueError(f"n is {fields['n']}; it must be at least 1")
    return pb.SamplingParams(**fields)


def _generate_request(
    prompt: str | Sequence[int],
    sampling: Sampling,
    *,
    request_id: str = "",
    priority: int = 0,
    deadline_s: float = 0.0,
    min_version: int = 0,
    adapter: str = "",
    min_adapter_version: int = 0,
    return_text: bool = False,
    return_hidden_states: bool = False,
) -> pb.GenerateRequest:
    request = pb.GenerateRequest(
        request_id=request_id,
        sampling=sampling_message(sampling),
        priority=priority,
        deadline_ms=round(deadline_s * 1000),
        min_version=min_version,
        adapter=adapter,
        min_adapter_version=min_adapter_version,
        return_text=return_text,
        return_hidden_states=return_hidden_states,
    )
    if isinstance(prompt, str):
        request.text = prompt
    else:
        request.token_ids.CopyFrom(pb.TokenIds(ids=prompt))  # an empty list is a prompt too: EMPTY_PROMPT
    return request


def parse_completion(message: pb.GenerateResponse) -> Completion:
    return Completion(
        request_id=message.request_id,
        index=message.index,
        token_ids=list(message.token_ids),
        logprobs=list(message.logprobs),
        spans=_spans(message.version_spans),
        finish_reason=FINISH_REASONS[message.finish_reason],
        text=message.text,
        error=message.error,
        top_logprobs=[list(zip(top.token_ids, top.logprobs, strict=True)) for top in message.top_logprobs],
        prompt_logprobs=list(message.prompt_logprobs),
        num_prompt_tokens=message.num_prompt_tokens,
        num_cached_tokens=message.num_cached_tokens,
        num_preemptions=message.num_preemptions,
        logprob_mode=LOGPROB_MODE_WORDS[message.logprob_mode],
        weight_version=message.weight_version,
        hidden_states=float32_rows(message.hidden_states.data, message.hidden_states.num_rows),
    )


def _spans(messages: Iterable[pb.VersionSpan]) -> tuple[VersionSpan, ...]:
    return tuple(
        VersionSpan(m.start, m.weight_version, m.commit_sequence, m.adapter, m.adapter_version)
        for m in messages
    )


def joined(parts: Sequence[Completion]) -> Completion:
    """One completion from its streamed parts, in order."""
    spans: list[VersionSpan] = []
    for part in parts:
        for span in part.spans:
            if not spans or spans[-1].label != span.label:
                spans.append(span)
    first, last_part = parts[0], parts[-1]
    return Completion(
        request_id=first.request_id,
        index=first.index,
        token_ids=[i for part in parts for i in part.token_ids],
        logprobs=[x for part in parts for x in part.logprobs],
        spans=tuple(spans),
        finish_reason=last_part.finish_reason,
        text="".join(part.text for part in parts),
        error=last_part.error,
        top_logprobs=[top for part in parts for top in part.top_logprobs],
        prompt_logprobs=first.prompt_logprobs,
        num_prompt_tokens=first.num_prompt_tokens,
        num_cached_tokens=first.num_cached_tokens,
        num_preemptions=max(part.num_preemptions for part in parts),
        logprob_mode=first.logprob_mode,
        weight_version=last_part.weight_version,
        hidden_states=[row for part in parts for row in part.hidden_states],
    )


# ---------------------------------------------------------------- generation


def generate_stream(
    prompt: str | Sequence[int],
    *,
    request_id: str = "",
    priority: int = 0,
    deadline_s: float = 0.0,
    min_version: int = 0,
    adapter: str = "",
    min_adapter_version: int = 0,
    return_text: bool = False,
    return_hidden_states: bool = False,
    timeout_s: float = WORK_TIMEOUT_S,
    **sampling: Unpack[Sampling],
) -> Stream[Completion]:
    """The completions of one prompt, part by part, as their tokens are sampled.

    deadline_s: the engine ends the request after so many seconds and returns what it has; 0: none.
    min_version: refuse while the engine serves an older weight version.
    adapter: that samples, over the base weights; min_adapter_version: refuse while it is older.
    """
    request = _generate_request(
        prompt,
        sampling,
        request_id=request_id,
        priority=priority,
        deadline_s=deadline_s,
        min_version=min_version,
        adapter=adapter,
        min_adapter_version=min_adapter_version,
        return_text=return_text,
        return_hidden_states=return_hidden_states,
    )
    return Stream("Generate", request, parse_completion, timeout_s)


def generate(
    prompt: str | Sequence[int],
    *,
    request_id: str = "",
    priority: int = 0,
    deadline_s: float = 0.0,
    min_version: int = 0,
    adapter: str = "",
    min_adapter_version: int = 0,
    return_text: bool = False,
    return_hidden_states: bool = False,
    timeout_s: float = WORK_TIMEOUT_S,
    **sampling: Unpack[Sampling],
) -> Gathered[list[Completion]]:
    """The n completions of one prompt, whole, by index; arguments as in generate_stream."""
    call = generate_stream(
        prompt,
        request_id=request_id,
        priority=priority,
        deadline_s=deadline_s,
        min_version=min_version,
        adapter=adapter,
        min_adapter_version=min_adapter_version,
        return_text=return_text,
        return_hidden_states=return_hidden_states,
        timeout_s=timeout_s,
        **sampling,
    )

    def gather() -> tuple[Callable[[Any], None], Callable[[], list[Completion]]]:
        parts: dict[int, list[Completion]] = {}

        def add(message: Any) -> None:
            part = parse_completion(message)
            parts.setdefault(part.index, []).append(part)

        return add, lambda: [joined(parts[index]) for index in sorted(parts)]

    return Gathered(call.method, call.request, gather, timeout_s)


def _batch_request(
    prompts: Sequence[str | Sequence[int] | Request],
    min_version: int,
    adapter: str,
    min_adapter_version: int,
    return_text: bool,
    sampling: Sampling,
) -> pb.GenerateBatchRequest:
    requests = [prompt if isinstance(prompt, Request) else Request(prompt) for prompt in prompts]
    return pb.GenerateBatchRequest(
        requests=[
            _generate_request(
                request.prompt,
                Sampling(**{**sampling, **request.sampling}),
                request_id=request.request_id,
                priority=request.priority,
                min_version=min_version,
                adapter=adapter if request.adapter is None else request.adapter,
                min_adapter_version=0 if request.adapter == "" else min_adapter_version,
                return_text=return_text,
            )
            for request in requests
        ]
    )


def _parse_item(message: pb.GenerateBatchResponse) -> BatchItem:
    if message.HasField("error"):
        refused = message.error
        error = RollsyncError(GRPC_STATUS_NAMES[refused.status], refused.reason, refused.message)
        return BatchItem(message.request_index, error=error)
    return BatchItem(message.request_index, completion=parse_completion(message.completion))


def generate_batch_stream(
    prompts: Sequence[str | Sequence[int] | Request],
    *,
    min_version: int = 0,
    adapter: str = "",
    min_adapter_version: int = 0,
    return_text: bool = False,
    timeout_s: float = WORK_TIMEOUT_S,
    **sampling: Unpack[Sampling],
) -> Stream[BatchItem]:
    """Each completion of many prompts, whole, as it finishes; a refused prompt comes as an error item."""
    request = _batch_request(prompts, min_version, adapter, min_adapter_version, return_text, sampling)
    return Stream("GenerateBatch", request, _parse_item, timeout_s)


def generate_batch(
    prompts: Sequence[str | Sequence[int] | Request],
    *,
    min_version: int = 0,
    adapter: str = "",
    min_adapter_version: int = 0,
    return_text: bool = False,
    timeout_s: float = WORK_TIMEOUT_S,
    **sampling: Unpack[Sampling],
) -> Gathered[list[list[Completion]]]:
    """All completions of many prompts: one list per prompt, in order, each by index.

    Raises:
        RollsyncError: of the first prompt that was refused, naming its position.
    """
    request = _batch_request(prompts, min_version, adapter, min_adapter_version, return_text, sampling)

    def gather() -> tuple[Callable[[Any], None], Callable[[], list[list[Completion]]]]:
        done: list[list[Completion]] = [[] for _ in prompts]

        def add(message: Any) -> None:
            item = _parse_item(message)
            if item.error is not None:
                raise RollsyncError(
                    item.error.code,
                    item.error.reason,
                    f"prompt {item.request_index} of the batch: {item.error.message}",
                )
            assert item.completion is not None
            done[item.request_index].append(item.completion)

        return add, lambda: [sorted(completions, key=lambda c: c.index) for completions in done]

    return Gathered("GenerateBatch", request, gather, timeout_s)


def score(
    sequences: Sequence[Sequence[int]],
    *,
    temperature: float = 1.0,
    min_version: int = 0,
    adapter: str = "",
    min_adapter_version: int = 0,
    timeout_s: float = WORK_TIMEOUT_S,
) -> Unary[list[Score]]:
    """Log-probabilities of given token ids, each from its second token on; nothing is sampled."""
    request = pb.ScoreRequest(
        sequences=[pb.TokenIds(ids=ids) for ids in sequences],
        temperature=temperature,
        min_version=min_version,
        adapter=adapter,
        min_adapter_version=min_adapter_version,
    )

    def parse(response: pb.ScoreResponse) -> list[Score]:
        return [Score(list(s.logprobs), _spans(s.version_spans)) for s in response.scores]

    return Unary("Score", request, parse, timeout_s, idempotent=True)


def abort(
    request_ids: str | Sequence[str] = (), *, all: bool = False, timeout_s: float = DEFAULT_TIMEOUT_S
) -> Unary[Aborted]:
    """End requests by id, or every one; what they had sampled goes to their own callers."""
    request = pb.AbortRequest(request_ids=as_list(request_ids), all=all)

    def parse(response: pb.AbortResponse) -> Aborted:
        return Aborted(list(response.aborted_request_ids), list(response.unknown_request_ids))

    return Unary("Abort", request, parse, timeout_s, idempotent=True)
