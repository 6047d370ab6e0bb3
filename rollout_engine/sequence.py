"""Sequence: one completion on its way, as the scheduler sees it. No torch.

[0, num_cached)      KV found in the prefix cache (or shared with the group's first sequence)
[0, num_computed)    KV valid
[num_computed, len)  tokens that a forward pass must still compute; the last one's logits are sampled

The counts follow what was launched. While a pass is in flight its sampled token is counted in `len`, but
nobody on the host knows it yet: its id reads as UNKNOWN_TOKEN, which the device replaces by the real one.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from rollout_engine.kv.prefix import Node, RootKey
from rollout_engine.messages import SequenceOutput, Span
from rollout_engine.records import SequenceRecord
from rollout_engine.sampling import SamplingParams
from weight_updater.adapters import HeldAdapter

UNKNOWN_TOKEN = -1
"""Stands for a token that a pass in flight samples."""


@dataclass(eq=False, slots=True)
class Sequence:
    """One completion of a request.

    leader is the group's first sequence: the others wait until it has computed the prompt, then share
    its pages. kv_key says under which weights and adapter all its KV was computed; None once it is mixed
    (inflight=keep): then none of its pages enter the prefix cache any more.
    """

    id: int
    request_id: str
    index: int
    prompt_ids: list[int]
    params: SamplingParams
    seed: int
    max_tokens: int
    priority: int = 0
    arrival: int = 0
    deadline: float = 0.0  # time.monotonic; 0 means none
    min_version: int = 0  # no older weights may sample it
    adapter: str = ""  # "": the base weights alone
    min_adapter_version: int = 0
    stream: bool = True
    wants_hidden: bool = False
    leader: Sequence | None = None

    output_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    top_logprobs: list[list[tuple[int, float]]] = field(default_factory=list)
    prompt_logprobs: list[float] = field(default_factory=list)
    hidden_states: list[bytes] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)
    finish_reason: str = ""
    error: str = ""

    pages: list[int] = field(default_factory=list)
    pool_index: int = -1  # row of req_to_token_pool while running
    num_computed: int = 0  # by passes that were launched
    num_launched: int = 0  # passes in flight that it has a row in
    num_unknown: int = 0  # output tokens that those passes sample
    num_cached: int = 0
    num_first_cached: int = -1  # prompt tokens cached at first admission, for the reply
    num_preemptions: int = 0
    num_pages_written: int = 0  # of `pages`, already written to req_to_token_pool
    kv_key: RootKey | None = None
    node: Node | None = None  # of the last page that is in the prefix cache
    num_node_pages: int = 0  # pages on the path to `node`
    num_emitted: int = 0  # output tokens already sent
    first_token_at: float = 0.0  # time.monotonic; 0 before it

    def __len__(self) -> int:
        return len(self.prompt_ids) + len(self.output_ids) + self.num_unknown

    @property
    def num_pending(self) -> int:
        """Tokens whose KV is still to be computed."""
        return len(self) - self.num_computed

    @property
    def order(self) -> tuple[int, int]:
        """Smaller runs first: higher priority, then earlier arrival."""
        return (-self.priority, self.arrival)

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Whether some prompt token's log-probability is asked for and not there yet."""
        return self.params.prompt_logprobs and len(self.prompt_logprobs) < len(self.prompt_ids) - 1

    @property
    def samples_nothing(self) -> bool:
        """Scoring only: the prompt is computed and nothing is drawn."""
        return self.max_tokens == 0

    def tokens(self, start: int, stop: int) -> list[int]:
        """Token ids [start, stop) of prompt and output together."""
        split = len(self.prompt_ids)
        if stop <= split:
            return self.prompt_ids[start:stop]
        known = self.output_ids[max(0, start - split) : stop - split]
        if start < split:
            known = self.prompt_ids[start:] + known
        return known + [UNKNOWN_TOKEN] * (stop - start - len(known))

    @property
    def must_wait(self) -> bool:
        """Whether its next pass cannot be made up before the one in flight has come back.

        Either that one ends it, whatever it samples, or the next one needs what it brings: prompt
        log-probabilities are cut by how many are there, and penalties count tokens by their ids.
        """
        if not self.num_launched:
            return False
        return (
            len(self.output_ids) + self.num_unknown >= self.max_tokens
            or self.params.prompt_logprobs
            or (self.num_unknown > 0 and self.params.has_penalties)
        )

    def label(
        self, start: int, weight_version: int, commit_sequence: int, adapter: HeldAdapter | None
    ) -> None:
        """Tokens from `start` on were sampled by these weights, through this adapter."""
        name, version = ("", 0) if adapter is None else (adapter.name, adapter.version)
        last = self.spans[-1] if self.spans else None
        if last is None or last.label != (weight_version, commit_sequence, name, version):
            self.spans.append(Span(start, weight_version, commit_sequence, name, version))

    def take_output(self, weight_version: int) -> SequenceOutput:
        """Everything since the previous output, and mark it as sent."""
        start, self.num_emitted = self.num_emitted, len(self.output_ids)
        first = start == 0
        return SequenceOutput(
            request_id=self.request_id,
            index=self.index,
            token_ids=self.output_ids[start:],
            logprobs=self.logprobs[start:],
            spans=self._spans_from(start),
            finish_reason=self.finish_reason,
            error=self.error,
            top_logprobs=self.top_logprobs[start:],
            prompt_logprobs=self.prompt_logprobs if first and self.params.prompt_logprobs else None,
            num_prompt_tokens=len(self.prompt_ids),
            num_cached_tokens=max(self.num_first_cached, 0),
            num_preemptions=self.num_preemptions,
            hidden_states=self.hidden_states[start:],
            weight_version=weight_version,
            record=self._record() if self.finish_reason else None,
        )

    def _record(self) -> SequenceRecord:
        """When it began to answer, and which weights sampled how many of its tokens."""
        spans = [] if self.samples_nothing else self.spans  # else they label prompt_logprobs
        ends = [*(span.start for span in spans[1:]), len(self.output_ids)]
        return SequenceRecord(
            self.first_token_at,
            [(span.weight_version, end - span.start) for span, end in zip(spans, ends, strict=False)],
        )

    def _spans_from(self, start: int) -> list[Span]:
        """Spans that cover tokens [start, len(output_ids)); the first one starts exactly there."""
        if self.samples_nothing:
            return list(self.spans)  # they label prompt_logprobs
        later = [span for span in self.spans if span.start > start]
        if start >= len(self.output_ids):
            return later
        covering = [span for span in self.spans if span.start <= start][-1]
        return [Span(start, *covering.label), *later]
