"""One request from the wire to the engine and its outputs back: checks, seeds, text, stop strings."""

from __future__ import annotations

import dataclasses
import secrets
import uuid
from collections.abc import Sequence

import msgspec

from rollout_engine import messages as m
from rollout_engine.errors import EngineError, Reason
from rollout_engine.sampling import SamplingParams
from rollout_engine.server import convert_rollout as convert
from rollout_engine.server.live import LiveRequest
from rollout_engine.server.text import CompletionText, TextCodec
from rollout_engine.v1 import rollout_pb2 as pb

MAX_MERGED_TOKENS = 256
"""Outputs that wait for a slow client are merged up to this many tokens a message."""


def check_prompt(token_ids: Sequence[int], max_tokens: int | None, info: m.EngineInfo) -> None:
    """Refuse a prompt that cannot run.

    Raises:
        EngineError: EMPTY_PROMPT, TOKEN_OUT_OF_RANGE, PROMPT_TOO_LONG.
    """
    if not token_ids:
        raise EngineError(Reason.EMPTY_PROMPT, "the prompt has no tokens; give at least one")
    if max(token_ids) >= info.vocab_size:
        at, token = next((i, t) for i, t in enumerate(token_ids) if t >= info.vocab_size)
        raise EngineError(
            Reason.TOKEN_OUT_OF_RANGE, f"prompt token {at} is {token}; it must be in [0, {info.vocab_size})"
        )
    wanted = 1 if max_tokens is None else max_tokens
    if len(token_ids) + wanted > info.context_length:
        asked = "room for one token" if max_tokens is None else f"max_tokens {max_tokens}"
        raise EngineError(
            Reason.PROMPT_TOO_LONG,
            f"prompt of {len(token_ids)} tokens and {asked} exceed the context length of "
            f"{info.context_length}; shorten the prompt or lower max_tokens",
        )


def complete_params(params: SamplingParams, token_ids: Sequence[int], info: m.EngineInfo) -> SamplingParams:
    """Checked parameters with a seed; how far max_tokens None may go is the engine's to say (its pool)."""
    params.check(info.vocab_size)
    check_prompt(token_ids, params.max_tokens, info)
    seed = secrets.randbits(63) if params.seed is None else params.seed
    return dataclasses.replace(params, seed=seed)


class Generation:
    """One GenerateRequest: what goes to the engine, and the messages made of what comes back.

    Args:
        wire: the request.
        token_ids: its prompt.
        whole: make one message per completion, at its end, instead of a stream of them.

    Raises:
        EngineError: the request cannot run; nothing was submitted.
    """

    def __init__(
        self,
        wire: pb.GenerateRequest,
        token_ids: list[int],
        info: m.EngineInfo,
        codec: TextCodec,
        *,
        whole: bool,
    ) -> None:
        params = complete_params(convert.sampling_params(wire.sampling), token_ids, info)
        self._whole = whole
        self._params = params
        # A completion's text does not show the id that ended it.
        self._ending_ids = {*params.stop_token_ids, *(() if params.ignore_eos else info.eos_token_ids)}
        self._texts: dict[int, CompletionText] = {}
        if wire.return_text or params.stop:
            self._texts = {i: codec.decoder(params.stop, params.min_tokens) for i in range(params.n)}
        self._return_text = wire.return_text
        self._live: LiveRequest | None = None
        self._parts: dict[int, list[tuple[m.SequenceOutput, str]]] = {}
        self._open = set(range(params.n))  # completions whose client has not had the last message
        self.request = m.SubmitRequest(
            request_id=wire.request_id or uuid.uuid4().hex,
            token_ids=token_ids,
            params=params,
            priority=wire.priority,
            deadline_s=wire.deadline_ms / 1000,
            min_version=wire.min_version,
            return_hidden_states=wire.return_hidden_states,
            stream=bool(params.stop) or not whole,
            adapter=wire.adapter,
            min_adapter_version=wire.min_adapter_version,
        )

    @property
    def done(self) -> bool:
        """Every completion's last message was made."""
        return not self._open

    def attach(self, live: LiveRequest) -> None:
        """The request was submitted."""
        self._live = live

    def leave(self) -> None:
        """The client was answered or is gone; what still runs is ended."""
        if self._live is not None:
            self._live.leave()

    def take(self, outputs: Sequence[m.SequenceOutput]) -> list[pb.GenerateResponse]:
        """The messages for outputs of this request, in order; those of one completion may be merged."""
        pieces: dict[int, list[tuple[m.SequenceOutput, str]]] = {}
        for output in outputs:
            if output.index in self._open:
                piece = self._with_text(output)
                pieces.setdefault(output.index, []).append(piece)
                if piece[0].finish_reason:
                    self._open.discard(output.index)
        responses: list[pb.GenerateResponse] = []
        for index, arrived in pieces.items():
            if not self._whole:
                responses += [self._response(group) for group in _groups(arrived)]
                continue
            parts = self._parts.setdefault(index, [])
            parts += arrived
            if parts[-1][0].finish_reason:
                responses.append(self._response(self._parts.pop(index)))
        return responses

    def _response(self, parts: Sequence[tuple[m.SequenceOutput, str]]) -> pb.GenerateResponse:
        output = merge([output for output, _ in parts])
        text = "".join(text for _, text in parts) if self._return_text else ""
        return convert.generate_response(output, text, self._params.logprobs)

    def _with_text(self, output: m.SequenceOutput) -> tuple[m.SequenceOutput, str]:
        """The output with its text; cut after the token that completed a stop string, and finished there."""
        decoder = self._texts.get(output.index)
        if decoder is None:
            return output, ""
        ids = output.token_ids
        if output.finish_reason == "stop" and ids and ids[-1] in self._ending_ids:
            ids = ids[:-1]
        if not self._params.stop:
            text = decoder.add_all(ids) if ids else ""
            return output, text + (decoder.flush() if output.finish_reason else "")
        text = ""
        for position, token_id in enumerate(ids):
            piece, matched = decoder.add(token_id)
            text += piece
            if matched:
                if self._live is not None and not output.finish_reason:
                    self._live.finish(output.index)
                return cut(output, position + 1), text
        return output, text + (decoder.flush() if output.finish_reason else "")


def cut(output: m.SequenceOutput, length: int) -> m.SequenceOutput:
    """The first `length` tokens of an output, as the last of its completion, ended by a stop string."""
    start = output.spans[0].start if output.spans else 0
    return msgspec.structs.replace(
        output,
        token_ids=output.token_ids[:length],
        logprobs=output.logprobs[:length],
        top_logprobs=output.top_logprobs[:length],
        hidden_states=output.hidden_states[:length],
        spans=[span for span in output.spans if span.start < start + length],
        finish_reason="stop",
        error="",
    )


def merge(outputs: Sequence[m.SequenceOutput]) -> m.SequenceOutput:
    """Consecutive outputs of one completion as one: its end is the last's, its prompt the first's."""
    if len(outputs) == 1:
        return outputs[0]
    spans: list[m.Span] = []
    for output in outputs:
        for span in output.spans:
            if not spans or spans[-1].label != span.label:
                spans.append(span)
    first, last = outputs[0], outputs[-1]
    return msgspec.structs.replace(
        last,
        token_ids=[i for output in outputs for i in output.token_ids],
        logprobs=[logprob for output in outputs for logprob in output.logprobs],
        top_logprobs=[top for output in outputs for top in output.top_logprobs],
        hidden_states=[row for output in outputs for row in output.hidden_states],
        spans=spans,
        prompt_logprobs=first.prompt_logprobs,
        num_prompt_tokens=first.num_prompt_tokens,
        num_cached_tokens=first.num_cached_tokens,
    )


def _groups(parts: Sequence[tuple[m.SequenceOutput, str]]) -> list[list[tuple[m.SequenceOutput, str]]]:
    """Parts to merge into one message each; those with wide payloads stay alone."""
    groups: list[list[tuple[m.SequenceOutput, str]]] = []
    size = 0
    for part in parts:
        output = part[0]
        length = len(output.token_ids)
        wide = bool(output.top_logprobs or output.hidden_states)
        if not groups or wide or size + length > MAX_MERGED_TOKENS:
            groups.append([])
            size = 0
        groups[-1].append(part)
        size = MAX_MERGED_TOKENS if wide else size + length
    return groups
