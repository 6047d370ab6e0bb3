"""Rows of a batch: what a forward pass must know of each sequence that the scheduler chose. No torch.

Making a row up counts its tokens as computed, since passes run in the order in which they are launched.
"""

from __future__ import annotations

from dataclasses import dataclass

from rollout_engine.batch.schedule import (
    CaptureHiddenMode,
    ForwardMode,
    PromptLogprobRow,
    SampleRow,
    ScheduleBatch,
)
from rollout_engine.sequence import Sequence
from weight_updater.adapters import AdapterBook


@dataclass(frozen=True, slots=True)
class Limits:
    """What the scheduler may use. Counts, all at least 1."""

    num_pages: int
    page_size: int
    context_length: int
    max_running: int
    max_prefill_tokens: int
    chunked_prefill: bool
    mixed_batches: bool
    prefix_cache: bool
    eos_token_ids: tuple[int, ...]


def build_batch(
    prefills: list[tuple[Sequence, int]],
    decodes: list[tuple[Sequence, int]],
    limits: Limits,
    weight_version: int,
    commit_sequence: int,
    adapters: AdapterBook,
) -> ScheduleBatch:
    """One forward pass over sequences and the number of tokens that each brings, prefills first.

    adapters: each sequence's is taken as it is now.
    """
    mode = ForwardMode.DECODE
    if prefills:
        mode = ForwardMode.MIXED if decodes else ForwardMode.EXTEND
    batch = ScheduleBatch(mode, weight_version=weight_version, commit_sequence=commit_sequence)
    for row, (sequence, num_tokens) in enumerate(prefills + decodes):
        _add_row(batch, row, sequence, num_tokens, limits)
    if adapters.held:
        rows = [adapters.get(sequence.adapter) for sequence, _ in prefills + decodes]
        batch.adapters = rows if any(rows) else []
    return batch


def stop_ids(sequence: Sequence, limits: Limits) -> tuple[int, ...]:
    """Token ids that end the sequence."""
    eos = () if sequence.params.ignore_eos else limits.eos_token_ids
    return eos + sequence.params.stop_token_ids


def _add_row(batch: ScheduleBatch, row: int, sequence: Sequence, num_tokens: int, limits: Limits) -> None:
    start, stop = sequence.num_computed, sequence.num_computed + num_tokens
    size, pages = limits.page_size, sequence.pages
    batch.sequence_ids.append(sequence.id)
    batch.req_pool_indices.append(sequence.pool_index)
    batch.seq_lens.append(stop)
    batch.extend_lens.append(num_tokens)
    batch.input_ids.extend(sequence.tokens(start, stop))
    batch.positions.extend(range(start, stop))
    batch.out_cache_loc.extend(pages[p // size] * size + p % size for p in range(start, stop))
    if (written := sequence.num_pages_written) < len(pages):
        slots = [page * size + offset for page in pages[written:] for offset in range(size)]
        first = written * size
        batch.slot_writes.append((sequence.pool_index, first, slots[: limits.context_length - first]))
        sequence.num_pages_written = len(pages)
    samples = stop == len(sequence) and not sequence.samples_nothing
    if samples:
        batch.samples.append(_sample_row(row, sequence, limits))
    if sequence.wants_prompt_logprobs:
        first, last = len(sequence.prompt_logprobs), min(stop, len(sequence.prompt_ids) - 1)
        if last > first:
            targets = sequence.prompt_ids[first + 1 : last + 1]
            batch.prompt_logprobs.append(
                PromptLogprobRow(row, first - start, last - start, targets, sequence.params)
            )
    if sequence.wants_hidden:
        batch.capture_hidden_mode = CaptureHiddenMode.LAST
    sequence.num_computed = stop
    sequence.num_launched += 1
    sequence.num_unknown += samples


def _sample_row(row: int, sequence: Sequence, limits: Limits) -> SampleRow:
    may_stop = len(sequence.output_ids) + sequence.num_unknown >= sequence.params.min_tokens
    return SampleRow(
        row=row,
        params=sequence.params,
        seed=sequence.seed,
        sample_index=sequence.index,
        position=len(sequence),
        prompt_ids=sequence.prompt_ids,
        output_ids=sequence.output_ids,
        forbidden_ids=() if may_stop else stop_ids(sequence, limits),
    )
