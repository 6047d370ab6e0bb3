"""A scheduler small enough to see through: makes ScheduleBatches by hand for tests of the runner."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from rollout_engine.batch.schedule import (
    ForwardMode,
    PromptLogprobRow,
    SampleRow,
    ScheduleBatch,
    StepResult,
)
from rollout_engine.config import ServeConfig
from rollout_engine.runner.model_runner import ModelRunner
from rollout_engine.sampling import SamplingParams

GREEDY = SamplingParams(temperature=0.0)


def make_runner(directory, *, num_pages: int = 64, **flags) -> ModelRunner:
    """A runner that is ready to run, in float32 on the CPU."""
    runner = ModelRunner(ServeConfig(model=directory, device="cpu", **{"dtype": "float32", **flags}))
    runner.initialize()
    runner.alloc_memory_pool(num_pages)
    runner.init_attention_backends()
    runner.init_cuda_graphs()
    return runner


@dataclass
class Row:
    """A sequence: its tokens, its pages (in no order), and what was sampled."""

    index: int
    prompt: list[int]
    params: SamplingParams
    slots: list[int]
    sample_index: int = 0
    computed: int = 0
    written: bool = False
    output: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    prompt_logprobs: list[float] = field(default_factory=list)

    @property
    def tokens(self) -> list[int]:
        return self.prompt + self.output


class HandScheduler:
    """Rows share a runner's pool; pages are dealt in a shuffled order, so that no row is contiguous."""

    def __init__(self, runner: ModelRunner, *, seed: int = 0) -> None:
        self.runner = runner
        self.pages = list(range(runner.token_to_kv_pool.num_pages))
        random.Random(seed).shuffle(self.pages)
        self.num_rows = 0

    def row(
        self, prompt: list[int], params: SamplingParams = GREEDY, *, room: int = 64, sample_index: int = 0
    ) -> Row:
        """A new row with pages for its prompt and `room` more tokens."""
        size = self.runner.token_to_kv_pool.page_size
        pages = [self.pages.pop() for _ in range(-(-(len(prompt) + room) // size))]
        slots = [page * size + offset for page in pages for offset in range(size)]
        row = Row(self.num_rows, list(prompt), params, slots, sample_index)
        self.num_rows += 1
        return row

    def batch(self, work: list[tuple[Row, int]], mode: ForwardMode | None = None) -> ScheduleBatch:
        """A batch that computes so many more tokens of each row; rows that reach their end are sampled."""
        lengths = [tokens for _, tokens in work]
        if mode is None:
            decodes = [row.computed >= len(row.prompt) for row, _ in work]
            mode = ForwardMode.MIXED if any(decodes) and not all(decodes) else ForwardMode.EXTEND
            mode = ForwardMode.DECODE if all(decodes) else mode
        batch = ScheduleBatch(mode, extend_lens=lengths)
        for i, (row, tokens) in enumerate(work):
            start, stop = row.computed, row.computed + tokens
            batch.sequence_ids.append(row.index)
            batch.req_pool_indices.append(row.index)
            batch.seq_lens.append(stop)
            batch.input_ids += row.tokens[start:stop]
            batch.positions += range(start, stop)
            batch.out_cache_loc += row.slots[start:stop]
            if not row.written:
                batch.slot_writes.append((row.index, 0, row.slots))
                row.written = True
            if stop == len(row.tokens):
                batch.samples.append(
                    SampleRow(
                        i, row.params, row.params.seed or 0, row.sample_index, stop, row.prompt, row.output
                    )
                )
            last = min(stop, len(row.prompt) - 1)
            if row.params.prompt_logprobs and last > start:
                targets = row.prompt[start + 1 : last + 1]
                batch.prompt_logprobs.append(PromptLogprobRow(i, 0, last - start, targets, row.params))
        return batch

    def apply(self, work: list[tuple[Row, int]], batch: ScheduleBatch, result: StepResult) -> None:
        """Book what a step gave back."""
        for scored, values in zip(batch.prompt_logprobs, result.prompt_logprobs, strict=True):
            work[scored.row][0].prompt_logprobs += values
        for sample, token_id, logprob in zip(batch.samples, result.token_ids, result.logprobs, strict=True):
            row = work[sample.row][0]
            row.output.append(token_id)
            row.logprobs.append(logprob)
        for row, tokens in work:
            row.computed += tokens

    def step(self, work: list[tuple[Row, int]], mode: ForwardMode | None = None) -> StepResult:
        batch = self.batch(work, mode)
        result = self.runner.forward(batch)
        self.apply(work, batch, result)
        return result

    def run(self, rows: list[Row], num_tokens: int, *, chunk: int = 0, delay: int = 0) -> None:
        """Until each row has `num_tokens` tokens: whole prompts, or chunks of `chunk`.

        Row i joins at step i * delay, so that prefill chunks meet decode rows (MIXED).
        """
        for step in range(100_000):
            work = []
            for i, row in enumerate(rows):
                left = len(row.tokens) - row.computed
                if step >= i * delay and len(row.output) < num_tokens:
                    work.append((row, min(left, chunk) if chunk else left))
            if not work and all(len(row.output) >= num_tokens for row in rows):
                return
            if work:
                self.step(work)
